"""ddlbench's own loaders of images, as the training loop reads them: python -m benchmarks.reading NAME FOLDER ...

NAME: native | dali; the rest, and what is printed, as benchmarks/bare/reading.py has it
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import count

import torch

from benchmarks.bare.reading import timed
from ddlbench.data.feed import Loader, Request
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.loaders.dali import Dali
from ddlbench.data.loaders.native import Native
from ddlbench.job import Batch, Place
from ddlbench.models.resnet import ResNet


def epochs(name: str, folder: str, batch: int, size: int, workers: int) -> Iterator[Iterator[Batch | None]]:
    data, model = ImageFolders("folders", root=folder), ResNet("resnet50", [3, 4, 6, 3], image_size=size)
    loader: Loader = Native(name, workers=workers) if name == "native" else Dali(name, threads=workers)
    loader.check(data, model, torch.device("cpu"))
    data.prepare()
    feed = loader.open(data, Request(model, Place(0, 1), torch.device("cpu"), seed=0, replica_batch=batch))
    return map(feed.train, count())


if __name__ == "__main__":
    timed(partial(epochs, sys.argv.pop(1)))
