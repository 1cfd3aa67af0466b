"""Figures as files, PNG for the screen, SVG and PDF for documents, and as images inside the page within its bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from ddlbench.figures.plotting import style

COLORS = 256  # of a PNG: a third of the bytes, and no difference that is seen in lines and letters
# What the other kinds of file say of their making, without the time: the same records give the same bytes.
METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "Producer": None}}
LARGEST_SVG = 300_000  # bytes; a figure beyond it is faster and smaller as PNG
ALL_SVG = 3_000_000
ALL_BYTES = 8_000_000  # of images; base64 adds a third


def save(folder: Path, name: str, figure: Figure, pdf: bool = False) -> None:
    """NAME.png and NAME.svg of a figure. pdf: NAME.pdf too, which takes as long as both, because it embeds fonts"""
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        stream = io.BytesIO()
        figure.savefig(stream, format="png", pil_kwargs={"compress_level": 0})
        with Image.open(stream) as image:
            # The default method gives most of the colors to what is drawn most, and none to a few green marks.
            method, dither = Image.Quantize.FASTOCTREE, Image.Dither.NONE
            few = image.convert("RGB").quantize(COLORS, method, dither=dither)
            few.save(folder / f"{name}.png", dpi=image.info["dpi"])
        for kind in ("svg", "pdf") if pdf else ("svg",):
            figure.savefig(folder / f"{name}.{kind}", metadata=METADATA[kind])


@dataclass(frozen=True)
class Picture:
    """A figure in the page. source: a data URL, or None where the page has no room for it; width: inches."""

    name: str
    source: str | None
    width: float


def pictures(figures: Mapping[str, Figure], folder: Path) -> list[Picture]:
    """The saved figures in `folder` as data URLs: SVG while they are small, then PNG."""
    left, left_svg = ALL_BYTES, ALL_SVG
    images: list[Picture] = []
    for name, figure in figures.items():
        kind, content = "svg+xml", (folder / f"{name}.svg").read_bytes()
        if len(content) > min(LARGEST_SVG, left_svg):
            kind, content = "png", (folder / f"{name}.png").read_bytes()
        source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}" if len(content) <= left else None
        left -= len(content) if source else 0
        left_svg -= len(content) if kind != "png" else 0
        images.append(Picture(name, source, figure.get_figwidth()))
    return images
