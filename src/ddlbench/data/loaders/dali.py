"""NVIDIA DALI over images: its own threads read, decode and augment, on the CPU or the GPU.

replica_feed.py decides the order, the samples of each rank and the last batch, as for every loader. DALI draws crops
and flips, from the same distribution as the native loader, with another random stream (docs/adr/0011).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddlbench.cores import default_workers
from ddlbench.data.feed import Dataset, Fetched, Loader, Request
from ddlbench.data.images.decoding import BadImage, decode_image
from ddlbench.data.images.folders import FolderSource, ImageFolders
from ddlbench.data.images.split import ImageSplit, Source, augmentation_seed
from ddlbench.data.loaders.dali_graph import DEVICES, Graph, import_dali
from ddlbench.data.loaders.replica_feed import ReplicaFeed
from ddlbench.data.sampler import Indices
from ddlbench.errors import Unsupported, UserError, check_values, refuse
from ddlbench.job import Model


@dataclass
class Dali(Loader):
    """device: cpu | gpu (decodes on the CPU) | mixed (decodes on the GPU too); None: mixed on a GPU, else cpu
    threads: of a pipeline, one per rank and split; None: as in cores.py; prefetch: batches it keeps ready
    fused_crop: decode no more of a training image than its crop; None: only where the CPU decodes, because a GPU's
        hardware decoder decodes complete images only
    """

    library: ClassVar[str] = "nvidia.dali"
    counts_reads: ClassVar[bool] = False  # it maps what it opens
    parallel_key: ClassVar[str | None] = "threads"

    name: str
    device: str | None = None
    threads: int | None = None
    prefetch: int = 2
    fused_crop: bool | None = None

    def __post_init__(self) -> None:
        check_values("loader.", self, least={"threads": 1, "prefetch": 1}, choices={"device": DEVICES})

    @property
    def ahead(self) -> int:
        return self.prefetch

    def check(self, dataset: Dataset, model: Model, device: torch.device) -> None:
        if not isinstance(dataset, ImageFolders):
            raise Unsupported(f"loader=dali reads only images, and data={dataset.name} has none: choose loader=native")
        reasons = {
            "it cannot skip images that cannot be decoded (data.on_bad_sample=skip): repair the data set and set "
            "data.on_bad_sample=fatal, or choose loader=native":
                dataset.on_bad_sample == "skip",
            f"it uses its own decoder: remove data.decode={dataset.decode}": dataset.decode != "pil",
            f"loader.device={self.device} needs an NVIDIA GPU, and the run is on {device}: choose loader.device=cpu":
                self.device in ("gpu", "mixed") and device.type != "cuda",
        }  # fmt: skip
        refuse("loader=dali", reasons)
        import_dali()

    def open(self, dataset: Dataset, request: Request) -> ReplicaFeed:
        assert isinstance(dataset, ImageFolders)
        on_gpu = request.device.type == "cuda"
        device = self.device or ("mixed" if on_gpu else "cpu")
        threads = self.threads or default_workers(request.cores, request.device.type, torch.get_num_threads())
        fused_crop = device != "mixed" if self.fused_crop is None else self.fused_crop
        settings = {
            "batch_size": request.replica_batch,
            "num_threads": threads,
            "device_id": (request.device.index or 0) if on_gpu else None,
            "prefetch_queue_depth": self.prefetch,
        }

        def reader(train: bool) -> DaliReader:
            split = dataset.split(train, request.model, request.seed)
            named = isinstance(split.source, FolderSource)
            graph = Graph(dataset, split.size, device, fused_crop, request.channels_last, to_gpu=on_gpu, named=named)
            return DaliReader(split, graph, request, settings)

        chosen = replace(self, device=device, threads=threads, fused_crop=fused_crop)
        return ReplicaFeed(reader(True), reader(False), request, chosen)


@dataclass
class DaliReader:
    """One split and its pipeline. A pipeline has one seed, so each epoch of training has a new one: then its crops
    follow from seed and epoch, also where a run continues another one. The pipeline of validation stays.

    settings: of nvidia.dali.Pipeline, without the seed
    """

    split: ImageSplit
    graph: Graph
    request: Request
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._pipeline, self._epoch = None, 0
        self._batches: Iterable[Indices] = ()
        self._in_flight = deque[list[int]]()  # positions in the split, batch by batch

    def read(self, epoch: int, batches: Iterable[Indices]) -> Iterator[Fetched]:
        """Raises UserError where an image cannot be decoded; with `fused_crop` damage below a crop is not seen."""
        self._batches = batches
        self._in_flight.clear()
        if epoch != self._epoch:
            self._pipeline = None  # its memory is free before the next one takes some
        pipeline, self._pipeline, self._epoch = self._pipeline or self._built(epoch), None, epoch
        while (images := self._next(pipeline)) is not None:
            yield self._fetched(images)
        while self._in_flight:  # an empty batch, which DALI has not seen
            yield self._fetched(torch.zeros(0, 3, *self.split.size))
        pipeline.reset()
        self._pipeline = pipeline  # not kept where an epoch was left in the middle

    def __iter__(self) -> Iterator[list[NDArray[np.uint8]]]:
        """The images that the pipeline reads, one list per batch, ahead of the batches that it returns."""
        for batch in self._batches:
            positions = batch.tolist()
            self._in_flight.append(positions)
            if positions:
                yield [external_input(self.split.source, int(self.split.chosen[position])) for position in positions]

    def close(self) -> None:
        self._pipeline = None

    def _built(self, epoch: int) -> Any:
        """Replicas draw other crops, ranks of one replica the same. A signed number: DALI's -1 is a random seed."""
        seed = augmentation_seed(self.request.seed, epoch, self.request.place.data_rank) >> 1
        return self.graph.pipeline(self, train=self.split.train, seed=seed, **self.settings)

    def _next(self, pipeline: Any) -> Tensor | None:
        """On a GPU torch's current stream waits for the batch, not the host."""
        try:
            (images,) = pipeline.run(torch.cuda.current_stream() if self.graph.to_gpu else None)
        except StopIteration:
            return None
        except RuntimeError as error:
            raise self._explained(error) from error
        # No copy: DALI's buffer lives as long as the tensor, which DALI's own iterator for PyTorch relies on too; on a
        # GPU until all work is done that was queued before the tensor went, whatever the stream.
        tensor = torch.from_dlpack(images.as_tensor())
        return tensor.permute(0, 3, 1, 2) if self.request.channels_last else tensor

    def _fetched(self, images: Tensor) -> Fetched:
        labels = [self.split.label(position) for position in self._in_flight.popleft()]
        return Fetched(images, torch.tensor(labels, dtype=torch.int64), torch.ones(len(labels), dtype=torch.bool))

    def _explained(self, error: RuntimeError) -> Exception:
        """DALI says neither which of the files in its queue it could not decode nor what is wrong: Pillow says that."""
        source, in_flight = self.split.source, chain.from_iterable(self._in_flight)
        images = [int(self.split.chosen[position]) for position in in_flight]
        bad = self.graph.first_bad((external_input(source, image) for image in images), **self.settings)
        if bad is None:
            return error
        place = source.place(images[bad])
        try:
            decode_image(source.content(images[bad]), "pil")
        except BadImage as reason:
            return UserError(f"{place} cannot be decoded ({reason}): replace or remove the file")
        except UserError as reason:
            return reason
        return UserError(
            f"{place} cannot be decoded by DALI, only by Pillow: convert the file, or choose loader=native"
        )


def external_input(source: Source, i: int) -> NDArray[np.uint8]:
    """A file's name or a view into a packed set: in both cases DALI's threads are the first that wait for the disk."""
    content = os.fsencode(source.path(i)) if isinstance(source, FolderSource) else source.content(i)
    return np.frombuffer(content, np.uint8)
