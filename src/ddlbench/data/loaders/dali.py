"""NVIDIA DALI over images: its own threads read, decode and augment, on the CPU or the GPU.

replica_feed.py decides the order, the samples of each rank and the last batch, as for every loader. DALI draws the
crops and flips of data/images/folders.py, from the same distribution as the native loader, with another random stream
(docs/adr/0011).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddlbench.cores import default_workers
from ddlbench.data.feed import Dataset, Fetched, Loader, Request
from ddlbench.data.images.decoding import BadImage, decode_image
from ddlbench.data.images.folders import ImageFolders, ImageSplit, augmentation_seed
from ddlbench.data.images.packed import PackedSource
from ddlbench.data.loaders.replica_feed import MEAN, STD, Indices, ReplicaFeed
from ddlbench.errors import OUT_OF_MEMORY, Unsupported, UserError, check_values, importing, refuse
from ddlbench.job import Model

DEVICES = ("cpu", "gpu", "mixed")
CUDA_ERRORS = ("cuda runtime api error", "cuda driver api error")  # in lower case
ATTEMPTS = 10  # at a crop that fits, as torchvision


def import_dali() -> Any:
    """The module; Unavailable where it cannot be imported."""
    with importing("dali", "pip install 'ddlbench[dali]' (CUDA 13: 'ddlbench[dali13]')"):
        for module in ("fn", "math", "types"):
            import_module(f"nvidia.dali.{module}")
        return import_module("nvidia.dali")


@dataclass
class Dali(Loader):
    """device: cpu | gpu (decodes on the CPU, the rest on the GPU) | mixed (all on the GPU); None: mixed on a GPU, else
        cpu
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

    def check(self, dataset: Dataset, model: Model, device: torch.device) -> None:
        if not isinstance(dataset, ImageFolders):
            raise Unsupported(
                f"loader=dali reads image folders and packed images, and data={dataset.name} is neither: "
                "choose loader=native"
            )
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
        device = self.device or ("mixed" if request.device.type == "cuda" else "cpu")
        threads = self.threads or default_workers(request.cores, request.device.type, torch.get_num_threads())
        fused_crop = device != "mixed" if self.fused_crop is None else self.fused_crop
        chosen = replace(self, device=device, threads=threads, fused_crop=fused_crop)
        splits = (dataset.split(train, request.model, request.seed) for train in (True, False))
        train, validation = (DaliReader(dataset, split, chosen, request) for split in splits)
        return ReplicaFeed(train, validation, request, chosen, ahead=self.prefetch)


@dataclass
class DaliReader:
    """One split and its pipeline. A pipeline has one seed, so each epoch of training has a new one: then its crops
    follow from seed and epoch, also where a run continues another one. The pipeline of validation stays.

    loader: with its settings chosen
    """

    data: ImageFolders
    split: ImageSplit
    loader: Dali
    request: Request

    def __post_init__(self) -> None:
        self.dali = import_dali()
        self.to_gpu = self.request.device.type == "cuda"
        self.named = not isinstance(self.split.source, PackedSource)  # DALI gets the files' names, else their content
        self._pipeline, self._epoch = None, 0
        self._batches: Iterable[Indices] = ()
        self._in_flight = deque[list[int]]()  # positions in the split, batch by batch

    def read(self, epoch: int, batches: Iterable[Indices]) -> Iterator[Fetched]:
        """The pipeline of the epoch is built at once. Its batches raise UserError where an image cannot be decoded;
        with `fused_crop` damage below a crop is not seen."""
        self._batches = batches
        self._in_flight.clear()
        if epoch != self._epoch:
            self._pipeline = None  # its memory is free before the next one takes some
        pipeline, self._pipeline, self._epoch = self._pipeline or self.pipeline(epoch), None, epoch
        pipeline.build()  # else the first batch would wait for it
        return self._read(pipeline)

    def _read(self, pipeline: Any) -> Iterator[Fetched]:
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
                yield [self._file(int(self.split.chosen[position])) for position in positions]

    def close(self) -> None:
        self._pipeline = None

    def _file(self, i: int) -> NDArray[np.uint8]:
        """A file's name or a view into a packed set: DALI's threads are the first that wait for the disk."""
        source = self.split.source
        content = os.fsencode(source.where / source.within(i)) if self.named else source.content(i)
        return np.frombuffer(content, np.uint8)

    def _next(self, pipeline: Any) -> Tensor | None:
        """On a GPU torch's current stream waits for the batch, not the host."""
        try:
            (images,) = pipeline.run(torch.cuda.current_stream() if self.to_gpu else None)
        except StopIteration:
            return None
        except RuntimeError as error:
            raise self._explained(error) from error
        # A view: DALI keeps its buffer as long as the tensor, as its iterator for PyTorch expects too. On a GPU it also
        # waits for all work that any stream was given before the tensor was deleted.
        tensor = torch.from_dlpack(images.as_tensor())
        return tensor.permute(0, 3, 1, 2) if self.request.channels_last else tensor

    def _fetched(self, images: Tensor) -> Fetched:
        labels = self.split.source.files.labels[self.split.chosen[self._in_flight.popleft()]]
        return Fetched(images, torch.from_numpy(labels).long(), torch.ones(len(labels), dtype=torch.bool))

    def _explained(self, error: RuntimeError) -> Exception:
        """DALI says neither which of the files in its queue it could not decode nor what is wrong: a pipeline that
        decodes one by one says the first, Pillow the second. An error of the GPU or its memory is no file's."""
        if any(word in str(error).lower() for word in (*OUT_OF_MEMORY, *CUDA_ERRORS)):
            return error
        images = [int(self.split.chosen[position]) for position in chain.from_iterable(self._in_flight)]
        files = [[self._file(image)] for image in images]
        pipeline = self._built(files, self._decoded, batch_size=1, prefetch_queue_depth=1)
        source, good = self.split.source, 0
        try:
            while good < len(images):
                pipeline.run()
                good += 1
            return error
        except RuntimeError:
            place = source.place(images[good])
        try:
            decode_image(source.content(images[good]), "pil")
        except BadImage as reason:
            return UserError(f"{place} cannot be decoded ({reason}): replace or remove the file")
        except UserError as reason:
            return reason
        return UserError(
            f"{place} cannot be decoded by DALI, only by Pillow: convert the file, or choose loader=native"
        )

    def pipeline(self, epoch: int) -> Any:
        """A pipeline that makes a batch of each list of files, [B, 3, H, W] float32, or [B, H, W, 3] for channels last.
        Replicas draw different crops, ranks of one replica the same. DALI takes a signed seed, and -1 as a random one:
        so it gets 63 bits."""
        seed = augmentation_seed(self.request.seed, epoch, self.request.place.data_rank) >> 1
        return self._built(self, self._train if self.split.train else self._validation, seed=seed)

    def _built(self, files: Iterable[Any], output: Callable[[Any], Any], **settings: Any) -> Any:
        """It stops where `files` ends. settings: of nvidia.dali.Pipeline, in place of the loader's"""
        dali, device = self.dali, self.request.device
        usual = {
            "batch_size": self.request.replica_batch,
            "num_threads": self.loader.threads,
            "device_id": (device.index or 0) if device.type == "cuda" else None,
            "prefetch_queue_depth": self.loader.prefetch,
        }
        pipeline = dali.Pipeline(**{**usual, **settings})
        # Names no longer exist when DALI reads them, so they are copied. The pages of a packed set stay, and a copy
        # would read them.
        how = {"batch": True, "cycle": "raise", "ndim": 1, "dtype": dali.types.UINT8, "no_copy": not self.named}
        with pipeline:
            source = dali.fn.external_source(source=files, **how)
            pipeline.set_outputs(output(dali.fn.io.file.read(source) if self.named else source))
        return pipeline

    def _decoded(self, encoded: Any, **window: Any) -> Any:
        """Complete images of any size, or a window of them. Pillow neither turns images by their EXIF tag nor decodes
        with a coarse upsampling of colors."""
        dali, device = self.dali, "mixed" if self.loader.device == "mixed" else "cpu"
        decode = dali.fn.decoders.image_slice if window else dali.fn.decoders.image
        how = {"output_type": dali.types.RGB, "adjust_orientation": False, "jpeg_fancy_upsampling": True, **window}
        images = decode(encoded, device=device, **how)
        return images.gpu() if self.loader.device == "gpu" else images

    def _train(self, encoded: Any) -> Any:
        """Random crops and mirrors. Where no attempt fits, DALI takes the largest crop with the smallest or largest
        aspect ratio at a random place and rounds its other side down, torchvision takes it in the center and rounds to
        the nearest number. A crop that fits by chance and is as large is moved to the center, too."""
        dali, fn, (low, high) = self.dali, self.dali.fn, self.data.crop_ratio
        image = fn.peek_image_shape(encoded, adjust_orientation=False)
        start, shape = fn.random_crop_generator(
            image, random_area=self.data.crop_scale, random_aspect_ratio=[low, high], num_attempts=ATTEMPTS
        )
        wide = (shape[0] == image[0]) & (dali.math.abs(shape[1] - high * image[0]) < 1)
        tall = (shape[1] == image[1]) & (dali.math.abs(shape[0] - image[1] / low) < 1)
        height = dali.math.min(image[0], dali.math.floor(image[1] / low + 0.5))
        width = dali.math.min(image[1], dali.math.floor(high * image[0] + 0.5))
        shape += fn.cast(fn.stack(tall * (height - shape[0]), wide * (width - shape[1])), dtype=dali.types.INT32)
        center = (image[:2] - shape) // 2
        start = start + (wide | tall) * (center - start)
        window = {"start": fn.cast(start, dtype=dali.types.INT32), "shape": shape, "axes": (0, 1)}
        fused = self.loader.fused_crop
        crops = self._decoded(encoded, **window) if fused else fn.slice(self._decoded(encoded), **window)
        mirror = fn.random.coin_flip(probability=self.data.flip)
        # Antialiased where it shrinks: Pillow's and torchvision's "bilinear".
        resized = fn.resize(crops, size=self.split.size, interp_type=dali.types.INTERP_TRIANGULAR)
        return self._normalized(resized, mirror)

    def _validation(self, encoded: Any) -> Any:
        """Sizes are rounded as torchvision rounds them: half a pixel is most of what a comparison would find."""
        dali, fn, size = self.dali, self.dali.fn, self.split.size
        shape = fn.peek_image_shape(encoded, adjust_orientation=False)
        shorter = self.data.shorter_side(size)
        sides = [shape[axis] * shorter // dali.math.min(shape[0], shape[1]) for axis in (0, 1)]
        spare = [side - crop for side, crop in zip(sides, size, strict=True)]
        starts = [number // 2 + ((number & 3) == 3) for number in spare]  # round(number / 2): 2.5 is 2, 3.5 is 4
        wanted = fn.cast(fn.stack(*sides), dtype=dali.types.FLOAT)
        resized = fn.resize(self._decoded(encoded), size=wanted, interp_type=dali.types.INTERP_TRIANGULAR)
        start = fn.cast(fn.stack(*starts), dtype=dali.types.INT32)
        return self._normalized(fn.slice(resized, start=start, shape=size, axes=(0, 1)), mirror=0)

    def _normalized(self, images: Any, mirror: Any) -> Any:
        """Done on the GPU if the images must be there: uint8 images take a quarter of the copying."""
        return self.dali.fn.crop_mirror_normalize(
            images.gpu() if self.to_gpu else images,
            dtype=self.dali.types.FLOAT,
            output_layout="HWC" if self.request.channels_last else "CHW",
            mirror=mirror,
            mean=[255 * mean for mean in MEAN],
            std=[255 * std for std in STD],
        )
