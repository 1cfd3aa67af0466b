"""Figures as files: PNG for the screen, SVG and PDF for documents."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from ddlbench.figures.plotting import style

COLOURS = 256  # of a PNG: a third of the bytes, and no difference that is seen in lines and letters
# What the other kinds of file say of their making, without the time: the same records give the same bytes.
METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "Producer": None}}


def save(folder: Path, name: str, figure: Figure, pdf: bool = False) -> None:
    """NAME.png and NAME.svg of a figure. pdf: NAME.pdf too, which takes as long as both, because it embeds fonts"""
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        stream = io.BytesIO()
        figure.savefig(stream, format="png", pil_kwargs={"compress_level": 0})
        with Image.open(stream) as image:
            few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            few.save(folder / f"{name}.png", dpi=image.info["dpi"])
        for kind in ("svg", "pdf") if pdf else ("svg",):
            figure.savefig(folder / f"{name}.{kind}", metadata=METADATA[kind])
