"""Feeds of DALI and of the native loader over the same small data sets, for the tests that compare them."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from ddlbench.data.feed import Request
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.loaders.dali import Dali
from ddlbench.data.loaders.native import Native
from ddlbench.data.loaders.replica_feed import MEAN, STD
from ddlbench.job import Place
from tests.support.pictures import Shape

CPU = torch.device("cpu")


def request(rank=0, size=1, replica_batch=4, pixels=32, seed=0, **fields):
    return Request(Shape(pixels), Place(rank, size), CPU, seed=seed, replica_batch=replica_batch, **fields)


def dali(data, *args, fused_crop=None, **fields):
    return Dali("dali", fused_crop=fused_crop).open(data, request(*args, **fields))


def native(data, *args, **fields):
    return Native("native", workers=0).open(data, request(*args, **fields))


def levels(inputs):
    """Normalized inputs as the 0 ... 255 they were."""
    return (inputs * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255


def picture(pixels, **how):
    stream = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels.astype(np.uint8))).save(
        stream, how.pop("format", "JPEG"), **how
    )
    return stream.getvalue()


def write(root, train, val):
    """root/train/a/0000.JPEG ... of the bytes in `train`, likewise of `val`."""
    for split, contents in (("train", train), ("val", val)):
        (root / split / "a").mkdir(parents=True)
        for index, content in enumerate(contents):
            (root / split / "a" / f"{index:04d}.JPEG").write_bytes(content)
    return ImageFolders("written", root=str(root))
