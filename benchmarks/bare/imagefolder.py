"""The loader of torchvision's reference training: github.com/pytorch/vision, references/classification.

One setting is not the reference's: its workers end with each epoch and start anew, here they stay, as ddlbench's do.
"""

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.bare.reading import timed

training = [v2.RandomHorizontalFlip(0.5), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
normalize = v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def epochs(folder: str, batch: int, size: int, workers: int) -> Iterator[DataLoader]:
    transform = v2.Compose([v2.RandomResizedCrop(size, antialias=True), *training, normalize])
    images = ImageFolder(str(Path(folder) / "train"), transform)
    return repeat(
        DataLoader(images, batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0)
    )


if __name__ == "__main__":
    timed(epochs)
