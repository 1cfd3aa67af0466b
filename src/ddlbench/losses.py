"""The losses of steps, which the host reads later."""

from __future__ import annotations

import torch
from torch import Tensor


class Losses:
    """One tensor on the device. A list would keep one small tensor per step between the large blocks that the step
    frees: on the CPU the next step could not reuse them whole, and the process would grow at every step.
    """

    def __init__(self, most: int) -> None:
        """most: steps between two calls of `clear`."""
        self.most, self.count = most, 0
        self._values = torch.empty(0)

    def add(self, loss: Tensor) -> None:
        """A number; the host does not wait for it."""
        if self.count == 0:
            self._values = torch.empty(self.most, device=loss.device)
        self._values[self.count] = loss
        self.count += 1

    def clear(self) -> None:
        self.count = 0

    def values(self) -> Tensor:
        """[count] on the device, of 32 bits."""
        return self._values[: self.count]

    def tolist(self) -> list[float]:
        """All of them, in order. Waits for the device."""
        return self.values().tolist()
