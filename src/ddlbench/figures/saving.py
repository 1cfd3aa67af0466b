"""Figures as files: PNG for the screen, SVG and PDF for documents."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.figure import Figure
from PIL import Image

from ddlbench.figures.plotting import STYLE

COLOURS = 256  # of a PNG: a third of the bytes, and no difference that is seen in lines and letters
# What the other kinds of file say of their making, without the time: the same records give the same bytes.
METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "Producer": None}}


def save(folder: Path, name: str, figure: Figure) -> None:
    """NAME.png, NAME.svg and NAME.pdf of a figure."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(cast(Any, STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in another script: boxes, no crash
        _save_png(figure, folder / f"{name}.png")
        for kind, metadata in METADATA.items():
            figure.savefig(folder / f"{name}.{kind}", metadata=metadata)


def _save_png(figure: Figure, path: Path) -> None:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", pil_kwargs={"compress_level": 0})
    with Image.open(stream) as image:
        few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(path, dpi=image.info["dpi"])
