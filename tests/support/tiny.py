"""Small data in memory, the same for the same seed or index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ddlbench.data.feed import Fetched
from ddlbench.data.staging import StagedFiles
from ddlbench.job import Model


def samples(model: Model, count: int = 3, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets of a model."""
    generator = torch.Generator().manual_seed(seed)
    if model.kind == "text":
        tokens = torch.randint(model.outputs(), (count, model.input_shape()[0] + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    inputs = torch.randn(count, *model.input_shape(), generator=generator)
    return inputs, torch.randint(model.outputs(), (count,), generator=generator)


@dataclass
class TinySplit:
    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, keys: list[tuple[int, int]]) -> Fetched:
        rows = torch.tensor([index for _, index in keys], dtype=torch.long)
        return Fetched(self.inputs[rows], self.targets[rows], torch.ones(len(rows), dtype=torch.bool))


@dataclass
class TinyData:
    """A data set held in memory, of the kind the model takes."""

    train_samples: int
    val_samples: int
    kind: str = "images"
    name: str = "tiny"
    root: str | None = None
    stage_to: str | None = None

    mapped = True
    costly = False

    def check(self, model: Model, validate: bool = True) -> None: ...

    def prepare(self) -> None: ...

    def files_to_stage(self) -> list[StagedFiles]:
        return []

    def files_read(self) -> list[Path]:
        return []

    def split(self, train: bool, model: Model, seed: int) -> TinySplit:
        count = self.train_samples if train else self.val_samples
        generator = torch.Generator().manual_seed(1 if train else 2)
        if model.kind == "images":
            # Coarse patches of color: of mere noise deep layers see the same mean everywhere, and BatchNorm would blow
            # up rounding errors.
            patches = torch.randn(count, 3, 4, 4, generator=generator) * 2
            inputs = F.interpolate(patches, model.input_shape()[1:], mode="nearest")
            return TinySplit(inputs, torch.randint(model.outputs(), (count,), generator=generator))
        length = model.input_shape()[0]
        tokens = torch.randint(model.outputs(), (count, length + 1), generator=generator)
        return TinySplit(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def describe(self) -> dict[str, Any]:
        return {"hash": "tiny", "train_samples": self.train_samples, "val_samples": self.val_samples}
