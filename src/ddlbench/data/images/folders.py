"""Folders of JPEG files, one a class, with torchvision's reference recipe: random crops and flips for training,
resize and center crop for validation (github.com/pytorch/vision, references/classification). Images are read by random
access: decoded, and augmented by (seed, epoch, index) alone."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from ddlbench.data.feed import Fetched
from ddlbench.data.home import SPLITS
from ddlbench.data.images.decoding import DECODERS, BadImage, decode_image
from ddlbench.data.images.index import Files, FolderLayout, open_index, prepare_index
from ddlbench.data.staging import StagedFiles, node_folder
from ddlbench.errors import UserError, check_values, reporting
from ddlbench.job import Model
from ddlbench.texts import bytes_text, first_line

BAD_SAMPLE = ("fatal", "skip")


@dataclass(frozen=True)
class FolderSource:
    """The images of one split by their position in the order of classes and names, where/<class>/<file>; picklable.

    original: the user's folder; where: the folder that is read, the same one or this node's copy of it
    hash: of the data set (Index.hash)
    """

    original: Path
    where: Path
    classes: tuple[str, ...]
    files: Files
    hash: str

    def within(self, i: int) -> str:
        """<class>/<file>"""
        return f"{self.classes[self.files.labels[i]]}/{self.files.name(i)}"

    def content(self, i: int) -> bytes | memoryview:
        """An image as its file has it. Raises UserError where it cannot be read."""
        path, moved = self.where / self.within(i), "check whether it was moved after the data set was indexed"
        other = "check that data.stage_to is the same folder for all ranks of a node"
        with reporting(f"cannot read {path}", moved if self.where == self.original else other):
            return path.read_bytes()

    def place(self, i: int) -> str:
        """For error messages: where the image is."""
        return self.named(self.within(i))

    def named(self, file: str) -> str:
        """A file of the user, with this node's copy where that is read: either may be the damaged one."""
        copy = "" if self.where == self.original else f" (read from its copy {self.where / file})"
        return f"{self.original / file}{copy}"

    def files_to_stage(self) -> StagedFiles:
        """All files of the split, to be copied from `original` to `where`."""
        names = map(self.within, range(len(self.files)))
        return StagedFiles(self.original, self.where, names, len(self.files), int(self.files.sizes.sum()))


@dataclass(frozen=True)
class ImageSplit:
    """Images as [B, 3, H, W] uint8, read and augmented one by one.

    chosen: the images that count as samples, in their order; size: (H, W)
    transform: of a decoded image to its pixels [3, H, W] uint8
    """

    source: FolderSource
    chosen: NDArray[np.int64]
    size: tuple[int, int]
    train: bool
    seed: int
    decode: str
    skip: bool
    transform: Callable[[Any], Tensor]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitems__(self, keys: list[tuple[int, int]]) -> Fetched:
        """Raises UserError for a file that cannot be read, and for one that cannot be decoded unless `skip`."""
        bad: list[str] = []
        inputs = batch_memory(torch.uint8, len(keys), 3, *self.size)
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            samples = [self._sample(*key, image, bad) for key, image in zip(keys, inputs, strict=True)]
        labels, valid = zip(*samples, strict=True)
        return Fetched(inputs, torch.tensor(labels), torch.tensor(valid), tuple(bad))

    def _sample(self, epoch: int, index: int, out: Tensor, bad: list[str]) -> tuple[int, bool]:
        """Label and validity of a sample, whose image goes to `out`. Bad files are added to `bad`; in training the next
        good file replaces a bad one."""
        for offset in range(len(self) if self.train else 1):
            position = (index + offset) % len(self)
            image = int(self.chosen[position])
            if self.train:
                torch.default_generator.manual_seed(augmentation_seed(self.seed, epoch, position))
            try:
                out.copy_(self.transform(decode_image(self.source.content(image), self.decode)))
            except BadImage as error:
                if not self.skip:
                    raise UserError(
                        f"{self.source.place(image)} cannot be decoded ({error}): replace or remove the file, "
                        f"or leave such samples out with data.on_bad_sample=skip"
                    ) from error
                bad.append(f"{SPLITS[self.train]}/{self.source.within(image)}")
            else:
                return int(self.source.files.labels[image]), True
        if self.train:
            raise UserError(
                f"none of the {len(bad)} images tried in {self.source.where} could be decoded: check the data set"
            )
        out.zero_()
        return 0, False


def batch_memory(dtype: torch.dtype, *shape: int) -> Tensor:
    """Memory without values. A worker shares it with the rank, as in torch's own collation, so no batch is copied."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = torch.UntypedStorage._new_shared(size)  # pyright: ignore[reportPrivateUsage]
    except RuntimeError as error:
        raise UserError(
            f"no shared memory for a batch of {bytes_text(size)} ({first_line(error)}): lower loader.workers or "
            "loader.prefetch, or start the container with --shm-size=1g"
        ) from error
    return torch.empty(0, dtype=dtype).set_(memory, 0, shape)  # pyright: ignore[reportCallIssue]  # torch's own storage


def augmentation_seed(seed: int, epoch: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(struct.pack("<3q", seed, epoch, index), digest_size=8).digest(), "little")


@dataclass
class ImageFolders:
    """root/<train_dir>/<class>/*.JPEG and root/<val_dir>/<class>/*.JPEG.

    cache_dir: where the list of files is kept; None: in root, or with the program's files where root is read-only
    stage_to: folder of each node's own storage to copy the images to before the clock starts; None: read them in root
    val_limit: number of validation samples, evenly spaced over all classes; None: all
    decode: pil | torchvision; on_bad_sample: fatal | skip (training takes the next file in its place, validation
        leaves it out of the sums; either way it is named in the log and in the record)
    val_resize: shorter side before validation's center crop; None: 256/224 of the model's image size
    crop_scale, crop_ratio: area and aspect of training crops; flip: probability of a mirror image
    """

    name: str
    root: str | None = None
    train_dir: str = "train"
    val_dir: str = "val"
    cache_dir: str | None = None
    stage_to: str | None = None
    val_limit: int | None = None
    decode: str = "pil"
    on_bad_sample: str = "fatal"
    val_resize: int | None = None
    crop_scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    crop_ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    flip: float = 0.5

    kind = "images"
    mapped = False
    costly = True

    def __post_init__(self) -> None:
        pair, ranges = "[smallest, largest], both greater than 0", (self.crop_scale, self.crop_ratio)
        scale, ratio = (len(ends) == 2 and 0 < ends[0] <= ends[1] for ends in ranges)
        check_values(
            "data.", self,
            above={"val_limit": 0, "val_resize": 0},
            choices={"decode": DECODERS, "on_bad_sample": BAD_SAMPLE},
            rules={
                "flip": (0 <= self.flip <= 1, "a probability from 0 to 1"),
                "crop_scale": (scale and self.crop_scale[1] <= 1, f"{pair} and at most 1"),
                "crop_ratio": (ratio, pair),
            },
        )  # fmt: skip

    def layout(self) -> FolderLayout:
        if self.root is None:
            raise UserError(
                f"data={self.name} needs data.root=...: a folder with "
                f"{self.train_dir}/<class>/*.JPEG and {self.val_dir}/<class>/*.JPEG"
            )
        return FolderLayout(Path(self.root), self.train_dir, self.val_dir, val_optional=True)

    def check(self, model: Model, validate: bool = True) -> None:
        self.check_fits(len(replace(self.layout(), val_optional=not validate).classes()), model)

    def check_fits(self, classes: int, model: Model) -> None:
        """A head may be wider than the data needs (ImageNet's 1000 on a small set), never narrower."""
        if model.outputs() < classes:
            raise UserError(
                f"the data has {classes} classes, the model {model.outputs()}: set model.num_classes={classes}"
            )
        size = max(model.input_shape()[1:])
        if self.val_resize is not None and self.val_resize < size:
            raise UserError(f"data.val_resize={self.val_resize} is smaller than model.image_size={size}: raise it")

    def prepare(self) -> None:
        prepare_index(self.layout(), self.cache_dir)

    def split(self, train: bool, model: Model, seed: int) -> ImageSplit:
        from torchvision.transforms import v2

        source, size = self.source(train), model.input_shape()[1:]
        if train:
            scale, ratio = (self.crop_scale[0], self.crop_scale[1]), (self.crop_ratio[0], self.crop_ratio[1])
            crop = v2.RandomResizedCrop(size, scale, ratio, antialias=True)
            steps = [crop, v2.RandomHorizontalFlip(self.flip)]
        else:
            steps = [v2.Resize(self.shorter_side(size), antialias=True), v2.CenterCrop(size)]
        return ImageSplit(
            source=source,
            chosen=evenly_spaced(len(source.files), None if train else self.val_limit),
            size=(size[0], size[1]),
            train=train,
            seed=seed,
            decode=self.decode,
            skip=self.on_bad_sample == "skip",
            transform=v2.Compose([*steps, v2.PILToTensor()] if self.decode == "pil" else steps),
        )

    def source(self, train: bool) -> FolderSource:
        """The files that this node reads: its copies if the data are staged."""
        source = self.original(train)
        if self.stage_to is None:
            return source
        return replace(source, where=node_folder(self.stage_to, self.name, source.hash) / SPLITS[train])

    def files_to_stage(self) -> list[StagedFiles]:
        return [self.source(train).files_to_stage() for train in SPLITS]

    def files_read(self) -> Iterator[Path]:
        return (part.copy / name for part in self.files_to_stage() for name in part.names)

    def original(self, train: bool) -> FolderSource:
        """The user's files."""
        layout = self.layout()
        index, folder = open_index(layout, self.cache_dir), layout.splits[0 if train else 1]
        return FolderSource(folder, folder, index.classes, index.splits[SPLITS[train]], index.hash)

    def describe(self) -> dict[str, Any]:
        train, val = (self.original(part) for part in SPLITS)
        return {
            "hash": train.hash,
            "train_samples": len(train.files),
            "val_samples": len(evenly_spaced(len(val.files), self.val_limit)),
            "classes": len(train.classes),
        }

    def shorter_side(self, size: tuple[int, ...]) -> int:
        """Pixels to which a validation image is resized before a crop of `size` (H, W) is taken from its center."""
        return self.val_resize or round(min(size) * 256 / 224)


def evenly_spaced(samples: int, limit: int | None) -> NDArray[np.int64]:
    """`limit` of the samples at even distances; as files are ordered by class, every class keeps its share."""
    if limit is None or limit >= samples:
        return np.arange(samples)
    return np.arange(limit) * samples // limit
