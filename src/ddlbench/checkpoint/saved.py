"""One complete checkpoint: what is beside the tensors, and where a run's checkpoints are."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddlbench.checkpoint.storage import Files
from ddlbench.record.ending import write_json

FORMAT = 1
ABOUT = "checkpoint.json"
NAME = re.compile(r"epoch-(\d{6,})")


@dataclass(frozen=True)
class Saved:
    """One complete checkpoint. attempt: the one that saved it; epoch: the next; lineage: the attempts behind it."""

    folder: Path
    run_id: str
    attempt: int
    lineage: Sequence[int]
    epoch: int
    updates: int
    elapsed_s: float
    rates: Mapping[str, Any]
    numbers: Mapping[str, Any]
    epochs: Sequence[Mapping[str, Any]]  # lines of epochs.jsonl
    files: Files

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """ValueError for what is no checkpoint of this version."""
        content = json.loads((folder / ABOUT).read_text())
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:  # pyright: ignore
            raise ValueError(f"{ABOUT} is not of format {FORMAT}")
        try:
            return cls(folder, **content)  # pyright: ignore
        except TypeError as error:
            raise ValueError(f"{ABOUT} lacks keys or has others") from error

    def write(self) -> None:
        content = {name: value for name, value in vars(self).items() if name != "folder"}
        write_json(self.folder / ABOUT, {"format": FORMAT, **content})


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of one attempt, the newest first."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)
