"""DALI operators from image files to batches: the crops and flips of data/images/folders.py, on CPU, GPU or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.images.split import MEAN, STD
from ddlbench.errors import importing

DEVICES = ("cpu", "gpu", "mixed")
ATTEMPTS = 10  # at a crop that fits, as torchvision


def import_dali() -> Any:
    """The module; Unavailable where it cannot be imported."""
    with importing("dali", "pip install 'ddlbench[dali]' (CUDA 13: 'ddlbench[dali13]')"):
        for module in ("fn", "math", "types"):
            import_module(f"nvidia.dali.{module}")
        return import_module("nvidia.dali")


@dataclass(frozen=True)
class Graph:
    """Pipelines from files (uint8 arrays) to images.

    size: (H, W) of a model's input; device: cpu | gpu (decoded on the CPU, the rest on the GPU) | mixed (all on the
    GPU); fused_crop: decode no more of a training image than its crop; named: an array is a file's name, not its
    content
    """

    data: ImageFolders
    size: tuple[int, int]
    device: str
    fused_crop: bool
    channels_last: bool
    to_gpu: bool
    named: bool

    @cached_property
    def dali(self) -> Any:
        return import_dali()

    def pipeline(self, files: Iterable[Any], train: bool, **settings: Any) -> Any:
        """A pipeline that makes a batch of each list of files, [B, 3, H, W] float32, or [B, H, W, 3] for channels last.
        It stops where `files` ends. settings: of nvidia.dali.Pipeline."""
        return self._pipeline(files, self._train if train else self._validation, settings)

    def first_bad(self, files: Iterable[Any], **settings: Any) -> int | None:
        """Which of the files is the first that DALI cannot decode, None where it decodes all."""
        settings |= {"batch_size": 1, "prefetch_queue_depth": 1}
        pipeline, good = self._pipeline([[file] for file in files], self._decoded, settings), 0
        try:
            while True:
                pipeline.run()
                good += 1
        except StopIteration:
            return None
        except RuntimeError:
            return good

    def _pipeline(self, files: Iterable[Any], output: Callable[[Any], Any], settings: dict[str, Any]) -> Any:
        pipeline, fn = self.dali.Pipeline(**settings), self.dali.fn
        # Names no longer exist when DALI reads them, so they are copied. The pages of a packed set stay, and a copy
        # would read them.
        how = {"batch": True, "cycle": "raise", "ndim": 1, "dtype": self.dali.types.UINT8, "no_copy": not self.named}
        with pipeline:
            source = fn.external_source(source=files, **how)
            pipeline.set_outputs(output(fn.io.file.read(source) if self.named else source))
        return pipeline

    def _decoded(self, encoded: Any, **window: Any) -> Any:
        """Complete images of any size, or a window of them. Pillow neither turns images by their EXIF tag nor decodes
        with a coarse upsampling of colors."""
        decoders, device = self.dali.fn.decoders, "mixed" if self.device == "mixed" else "cpu"
        how = {"output_type": self.dali.types.RGB, "adjust_orientation": False, "jpeg_fancy_upsampling": True, **window}
        images = (decoders.image_slice if window else decoders.image)(encoded, device=device, **how)
        return images.gpu() if self.device == "gpu" else images

    def _train(self, encoded: Any) -> Any:
        fn = self.dali.fn
        start, shape = self._crop(fn.peek_image_shape(encoded, adjust_orientation=False))
        window = {"start": start, "shape": shape, "axes": (0, 1)}
        crops = self._decoded(encoded, **window) if self.fused_crop else fn.slice(self._decoded(encoded), **window)
        return self._normalized(self._resized(crops, self.size), mirror=fn.random.coin_flip(probability=self.data.flip))

    def _crop(self, image: Any) -> tuple[Any, Any]:
        """Start and shape (H, W) of a random crop of an image of shape [H, W, 3].

        Where no attempt fits, DALI takes the largest crop with the smallest or largest aspect ratio at a random place,
        torchvision takes it in the center. A crop that fits by chance and is as large is moved to the center, too.
        """
        dali = self.dali
        low, high = self.data.crop_ratio
        start, shape = dali.fn.random_crop_generator(
            image, random_area=self.data.crop_scale, random_aspect_ratio=[low, high], num_attempts=ATTEMPTS
        )
        wide = (shape[0] == image[0]) & (dali.math.abs(shape[1] - high * image[0]) < 1)
        tall = (shape[1] == image[1]) & (dali.math.abs(shape[0] - image[1] / low) < 1)
        center = (image[:2] - shape) // 2
        start = start + (wide | tall) * (center - start)
        return dali.fn.cast(start, dtype=dali.types.INT32), shape

    def _validation(self, encoded: Any) -> Any:
        """Sizes are rounded as torchvision rounds them: half a pixel is most of what a comparison would find."""
        dali, shorter = self.dali, self.data.shorter_side(self.size)
        fn, shape = dali.fn, dali.fn.peek_image_shape(encoded, adjust_orientation=False)
        sides = [shape[axis] * shorter // dali.math.min(shape[0], shape[1]) for axis in (0, 1)]
        starts = [half_even(side - crop) for side, crop in zip(sides, self.size, strict=True)]
        resized = self._resized(self._decoded(encoded), fn.cast(fn.stack(*sides), dtype=dali.types.FLOAT))
        start = fn.cast(fn.stack(*starts), dtype=dali.types.INT32)
        return self._normalized(fn.slice(resized, start=start, shape=self.size, axes=(0, 1)), mirror=0)

    def _resized(self, images: Any, size: Any) -> Any:
        """Antialiased where it shrinks: Pillow's and torchvision's "bilinear"."""
        return self.dali.fn.resize(images, size=size, interp_type=self.dali.types.INTERP_TRIANGULAR)

    def _normalized(self, images: Any, mirror: Any) -> Any:
        """On the GPU where the images are wanted there: as uint8 they take a quarter of the copying."""
        return self.dali.fn.crop_mirror_normalize(
            images.gpu() if self.to_gpu else images,
            dtype=self.dali.types.FLOAT,
            output_layout="HWC" if self.channels_last else "CHW",
            mirror=mirror,
            mean=[255 * mean for mean in MEAN],
            std=[255 * std for std in STD],
        )


def half_even(number: Any) -> Any:
    """round(number / 2) as Python does it, of whole numbers or of DALI's: 2.5 is 2, 3.5 is 4."""
    return number // 2 + ((number & 3) == 3)
