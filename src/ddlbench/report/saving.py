"""Figures as files: PNG for the screen, SVG and PDF for documents."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.figure import Figure

from ddlbench.report.cores import over_cores
from ddlbench.report.plotting import STYLE

# What each kind of file says of its making, without the time: the same records give the same bytes.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Producer": None},
}


def save(figures: Mapping[str, Figure], folder: Path, processes: int = 1) -> None:
    """NAME.png, NAME.svg and NAME.pdf of every figure."""
    folder.mkdir(parents=True, exist_ok=True)
    over_cores(partial(_save, folder), list(figures.items()), processes, few=1)


def _save(folder: Path, figures: Sequence[tuple[str, Figure]]) -> None:
    with mpl.rc_context(cast(Any, STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in another script: boxes, no crash
        for name, figure in figures:
            for kind, metadata in METADATA.items():
                figure.savefig(folder / f"{name}.{kind}", metadata=metadata)
