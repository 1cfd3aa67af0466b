"""The learning rates that a run really used: the number of the step, the first and the last rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Rates:
    """of_step: a step, counted from 0 over all epochs -> its learning rate
    step: the next one; a resumed run does not begin at 0
    first, last: rates that the optimizer had at the end of a step; None before the first step
    """

    of_step: Callable[[int], float]
    step: int = 0
    first: float | None = None
    last: float | None = None

    @property
    def next(self) -> float:
        return self.of_step(self.step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: with `load` a run continues where this one is."""
        return {"step": self.step, "first": self.first, "last": self.last}

    def load(self, state: Mapping[str, Any]) -> None:
        self.step, self.first, self.last = state["step"], state["first"], state["last"]

    def used(self, rate: float) -> float:
        """A step has ended with this rate in the optimizer."""
        self.step += 1
        self.first, self.last = rate if self.first is None else self.first, rate
        return rate
