"""One complete checkpoint: what is beside the tensors, and where a run's checkpoints are."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from ddlbench.checkpoint.storage import Files
from ddlbench.files import replacing
from ddlbench.foreign import read_bytes

FORMAT = 1
ABOUT = "checkpoint.json"
RATES = {"step", "first", "last"}  # what is kept of recipe.schedules.Rates
RENAMED = {"synchronised": "synchronized"}  # of `numbers`, as earlier versions of this format wrote them
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
        try:
            content = json.loads(read_bytes(folder / ABOUT))
        except RecursionError as error:
            raise ValueError(f"{ABOUT} is nested too deep") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:  # pyright: ignore
            raise ValueError(f"{ABOUT} is not of format {FORMAT}")
        content = cast(dict[str, Any], content)
        if set(content) != {field.name for field in fields(cls)} - {"folder"}:
            raise ValueError(f"{ABOUT} lacks keys or has others")
        if not _sound(content):
            raise ValueError(f"{ABOUT} has values that no run writes")
        content["numbers"] = {RENAMED.get(name, name): value for name, value in content["numbers"].items()}
        return cls(folder, **content)

    def write(self) -> None:
        content = {name: value for name, value in vars(self).items() if name != "folder"}
        with replacing(self.folder / ABOUT) as file:
            file.write(json.dumps({"format": FORMAT, **content}, indent=1).encode())


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of one attempt, the newest first."""
    with contextlib.suppress(OSError):
        return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), reverse=True)
    return []


def _sound(content: Mapping[str, Any]) -> bool:
    """Whether the values have their types. Attempts become names of folders that a run removes, and files are read:
    they must lie beside this one."""
    lineage, epochs, files = content["lineage"], content["epochs"], content["files"]
    if not (isinstance(lineage, list) and isinstance(epochs, list) and isinstance(files, dict)):
        return False
    counts = (content["attempt"], content["epoch"], content["updates"], *lineage)
    numbers = all(type(count) is int and count >= 0 for count in counts) and type(content["elapsed_s"]) in (int, float)
    plain = all(isinstance(section, dict) for section in (content["rates"], content["numbers"], *epochs))
    named = isinstance(content["run_id"], str) and all(Path(name).name == name for name in files)
    sized = all(isinstance(file, list) and len(cast(list[Any], file)) == 2 for file in files.values())
    return numbers and plain and named and sized and set(content["rates"]) == RATES
