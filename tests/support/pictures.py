"""A small data set of real image files, and files that are no images, for the tests of images and loaders."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ddlbench.data.images.folders import ImageFolders


@dataclass
class Shape:
    """The attributes of a model that a data set reads."""

    size: int = 32
    classes: int = 10
    name: str = "shape"
    kind: str = "images"

    def build(self):
        raise AssertionError("no model is needed")

    def input_shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

    def outputs(self):
        return self.classes

    def tensor_plan(self) -> dict[str, str]:
        return {}


def write_folders(root: Path, train: int, val: int, classes: int = 3) -> ImageFolders:
    """root/{train,val}/<a, b, ...>/<index>.JPEG, `train` and `val` files a class, all of them different."""
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            for index in range(count):
                file = root / split / chr(ord("a") + label) / f"{index:03d}.JPEG"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(jpeg([len(split), label, index]))
    return ImageFolders("pictures", root=str(root))


def jpeg(seed: list[int], size: tuple[int, int] = (48, 40)) -> bytes:
    """Random patches of 8 x 8 pixels. size: width, height"""
    patches = np.random.RandomState(seed).randint(0, 256, (-(-size[1] // 8), -(-size[0] // 8), 3)).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(patches.repeat(8, 0).repeat(8, 1)[: size[1], : size[0]]).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])


def no_image(file: Path) -> None:
    file.write_text("<html>404</html>")


def empty(file: Path) -> None:
    file.write_bytes(b"")
