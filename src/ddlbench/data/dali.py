"""NVIDIA DALI over folders of images: it reads, decodes and augments in threads of its own, on the CPU or the GPU.

Order, shares and the last batch are replica_feed.py's, as for every loader. Crops and flips are drawn by DALI: from the
same distribution as the native loader's, from another stream (docs/adr/0011).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddlbench.data.dali_graph import DEVICES, Graph, first_bad, library, pipeline
from ddlbench.data.feed import Dataset, Fetched, Request
from ddlbench.data.image_split import BadImage, ImageSplit, augmentation_seed, read_image
from ddlbench.data.images import ImageFolders
from ddlbench.data.replica_feed import Key, ReplicaFeed
from ddlbench.errors import Unsupported, UserError
from ddlbench.job import Model


@dataclass
class Dali:
    """device: cpu | gpu (decodes on the CPU) | mixed (decodes on the GPU too); None: mixed on a GPU, else cpu
    threads: of a pipeline, one a rank and split; prefetch: batches it keeps ready
    fused_crop: decode no more of a training image than its crop
    """

    library: ClassVar[str] = "nvidia.dali"

    name: str
    device: str | None = None
    threads: int = 2
    prefetch: int = 2
    fused_crop: bool = True

    def __post_init__(self) -> None:
        if self.device not in (None, *DEVICES):
            raise UserError(f"loader.device={self.device} is unknown: choose null or one of {', '.join(DEVICES)}")
        for key in ("threads", "prefetch"):
            if (value := getattr(self, key)) < 1:
                raise UserError(f"loader.{key}={value} must be 1 or more")

    def check(self, dataset: Dataset, model: Model) -> None:
        if not isinstance(dataset, ImageFolders):
            raise Unsupported(f"loader=dali reads folders of images, data={dataset.name} is none: choose loader=native")
        if dataset.on_bad_sample == "skip":
            raise Unsupported(
                "loader=dali cannot skip bad images, one ends its pipeline: mend them with data.on_bad_sample=fatal, "
                "or choose loader=native"
            )
        if dataset.decode != "pil":
            raise Unsupported(f"loader=dali has a decoder of its own: leave out data.decode={dataset.decode}")
        if self.device in ("gpu", "mixed") and not torch.cuda.is_available():
            raise Unsupported(
                f"loader.device={self.device} needs an NVIDIA GPU, none is here: choose loader.device=cpu"
            )
        library()

    def open(self, dataset: Dataset, request: Request) -> ReplicaFeed:
        assert isinstance(dataset, ImageFolders)
        device = self.device or ("mixed" if request.device.type == "cuda" else "cpu")
        train, validation = (self._reader(dataset, request, train, device) for train in (True, False))
        return ReplicaFeed(train, validation, request, {**self.facts(), "device": device})

    def facts(self) -> dict[str, Any]:
        return {"threads": self.threads, "prefetch": self.prefetch, "fused_crop": self.fused_crop}

    def _reader(self, dataset: ImageFolders, request: Request, train: bool, device: str) -> DaliReader:
        split = dataset.split(train, request.model, request.seed)
        on_gpu = request.device.type == "cuda"
        graph = Graph(dataset, split.size, device, self.fused_crop, request.channels_last, to_gpu=on_gpu)
        settings = {"num_threads": self.threads, "device_id": (request.device.index or 0) if on_gpu else None}
        build = partial(
            pipeline, graph, train=train, batch_size=request.replica_batch, prefetch_queue_depth=self.prefetch,
            seed=pipeline_seed(request), **settings,
        )  # fmt: skip
        return DaliReader(split, build, partial(first_bad, graph, **settings), request.channels_last)


def pipeline_seed(request: Request) -> int:
    """Replicas draw other crops, ranks of one replica the same. A signed number: DALI's -1 is a random seed."""
    return augmentation_seed(request.seed, 0, request.place.data_rank) >> 1


class DaliReader:
    """One split behind one pipeline, which is built at the first `read` and stays for the next epochs.

    build: the pipeline over names to come; first_bad: which of some files DALI cannot decode
    """

    def __init__(
        self,
        split: ImageSplit,
        build: Callable[[Names], Any],
        first_bad: Callable[[Iterable[Any]], int | None],
        channels_last: bool,
    ) -> None:
        self.split = split
        self._build, self._first_bad, self._channels_last = build, first_bad, channels_last
        self._names, self._pipeline = Names(split), None

    def read(self, batches: Iterable[list[Key]]) -> Iterator[Fetched]:
        """The batches in their order; for an empty list of keys, no samples of the right shape.

        Raises UserError for a file that cannot be decoded. `fused_crop` does not look at what lies below a crop.
        """
        self._names.begin(batches)
        pipeline, self._pipeline = self._pipeline or self._build(self._names), None
        while (images := self._next(pipeline)) is not None:
            yield self._fetched(images)
        while self._names.under_way:  # an empty batch, which DALI has not seen
            yield self._fetched(torch.zeros(0, 3, *self.split.size))
        pipeline.reset()
        self._pipeline = pipeline  # not kept where an epoch was left in the middle

    def close(self) -> None:
        self._pipeline = None

    def _next(self, pipeline: Any) -> Tensor | None:
        try:
            (images,) = pipeline.run()
        except StopIteration:
            return None
        except RuntimeError as error:
            raise self._explained(error) from error
        # No copy: DALI's buffer lives as long as the tensor, which DALI's own iterator for PyTorch relies on too.
        tensor = torch.from_dlpack(images.as_tensor())
        return tensor.permute(0, 3, 1, 2) if self._channels_last else tensor

    def _fetched(self, images: Tensor) -> Fetched:
        labels = [self.split.label(position) for position in self._names.under_way.popleft()]
        return Fetched(images, torch.tensor(labels, dtype=torch.int64), torch.ones(len(labels), dtype=torch.bool))

    def _explained(self, error: RuntimeError) -> Exception:
        """DALI does not say which of the files under way it could not decode."""
        paths = [self.split.path(position) for batch in self._names.under_way for position in batch]
        bad = self._first_bad(map(encoded, paths))
        return error if bad is None else complaint(paths[bad])


class Names:
    """What a pipeline draws file names from, a list a batch. It is ahead of the batches that come out."""

    def __init__(self, split: ImageSplit) -> None:
        self._split = split
        self._batches: Iterable[list[Key]] = ()
        self.under_way: deque[list[int]] = deque()  # positions in the split, batch by batch

    def begin(self, batches: Iterable[list[Key]]) -> None:
        self._batches = batches
        self.under_way.clear()

    def __iter__(self) -> Iterator[list[NDArray[np.uint8]]]:
        for keys in self._batches:
            positions = [index for _, index in keys]
            self.under_way.append(positions)
            if positions:
                yield [encoded(self._split.path(position)) for position in positions]


def encoded(path: Path) -> NDArray[np.uint8]:
    return np.frombuffer(os.fsencode(path), np.uint8)


def complaint(path: Path) -> UserError:
    """In Pillow's words, for DALI has none that say more than that."""
    try:
        read_image(path, "pil")
    except BadImage as error:
        return UserError(f"{path} cannot be decoded ({error}): mend or remove the file")
    except UserError as error:
        return error
    return UserError(f"{path} cannot be decoded by DALI, only by Pillow: convert the file, or choose loader=native")
