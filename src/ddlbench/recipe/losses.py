"""The training loss: cross-entropy over classes or over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class CrossEntropy:
    """A loss of output [B, C] and targets [B], or output [B, T, V] and targets [B, T]: mean nats a scored target.

    Targets of -100 are not scored. Smoothing as in Szegedy et al. 2016, section 7: with weight `label_smoothing`
    the target is the uniform distribution. Computed in float32 whatever the output's type, under autocast too.
    """

    label_smoothing: float

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            output.flatten(0, -2).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )
