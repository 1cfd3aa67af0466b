"""A breach: one wrong way to measure, as a change of the sources, and the tests that notice it.

The TOML files of this folder list them, one file a subject:

    [[breach]]
    name = "..."         # unique
    fear = "..."         # what a reviewer of a paper would fear, in words
    file = "measure/rows.py"  # below src/ddlbench
    old = '''...'''      # occurs exactly once in the file
    new = '''...'''
    tests = ["..."]      # node ids of pytest: each of them must fail
    quick = true         # part of `make test`; left out: of `make test-breaches` only
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ddlbench"
LISTS = tuple(sorted(Path(__file__).parent.glob("*.toml")))


class CannotApply(Exception):
    """The patch does not fit the sources: they have changed since it was written."""


@dataclass(frozen=True)
class Breach:
    name: str
    fear: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    quick: bool = False

    def apply(self, package: Path) -> None:
        """Change a copy of the package."""
        path = package / self.file
        path.write_text(self.patched(path.read_text() if path.exists() else ""))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # it may be of the same second and size

    def patched(self, source: str) -> str:
        """The file's text with the breach in it."""
        if (result := source.count(self.old)) != 1:
            times = f"{result} times" if result else "not"
            raise CannotApply(f"{self.name}: its old text is {times} in {self.file}: write the patch anew")
        return source.replace(self.old, self.new)


def load(lists: Sequence[Path] = LISTS) -> list[Breach]:
    """All breaches, in the order of the files."""
    result: list[Breach] = []
    for path in lists:
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["breach"]:
            result.append(Breach(**{**entry, "tests": tuple(entry["tests"])}))
    return result
