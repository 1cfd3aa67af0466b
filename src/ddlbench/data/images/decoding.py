"""Decoding an image file, in training and by `ddlbench-data verify`. Only the decoder of torchvision imports torch."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ddlbench.texts import first_line

if TYPE_CHECKING:
    from torch import Tensor

DECODERS = ("pil", "torchvision")
PNG = b"\x89PNG"


class BadImage(Exception):
    """A file exists, but cannot be decoded to a complete image."""


def decode_image(content: bytes | memoryview, decoder: str) -> Image.Image | Tensor:
    """An RGB image: PIL's own, or [3, H, W] uint8; gray, CMYK, palette and 16-bit images are converted. Raises BadImage
    for content that cannot be decoded completely."""
    if decoder == "torchvision" and content[:4] == PNG:
        from torchvision.transforms.functional import pil_to_tensor

        # torchvision's decoder ends the process at a damaged one; both decode the same pixels.
        return pil_to_tensor(decode_image(content, "pil"))
    try:
        if decoder == "pil":
            with Image.open(io.BytesIO(content)) as image:
                if image.mode.startswith("I"):  # 16 bits, which `convert` would clip
                    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
                if image.mode != "RGB":
                    return image.convert("RGB")
                image.load()  # `convert` would copy the image
                return image
        import torch
        from torchvision import io as images

        with warnings.catch_warnings():  # deprecated since torchvision 0.29, still the decoder that many use
            warnings.simplefilter("ignore", DeprecationWarning)
            raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            image = images.decode_image(raw, images.ImageReadMode.RGB)
            image = image[0] if image.ndim == 4 else image  # an animation: its first frame, as Pillow reads it
            return image if image.dtype == torch.uint8 else (image.int() >> 8).byte()
    except (ImportError, MemoryError):  # the file is not the cause
        raise
    except Exception as error:  # decoders raise many kinds, OSError, SyntaxError and RuntimeError among them
        what = first_line(error).partition(" <_io")[0]  # without the address of a buffer
        raise BadImage(f"{type(error).__name__}: {what}") from error
