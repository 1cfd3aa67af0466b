"""Imports go one way: no circle of files, of folders, or of a folder and a file beside it (docs/adr/0021)."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ddlbench

SOURCES = Path(ddlbench.__file__).parent


def imported_files(file: Path, package: Path) -> set[Path]:
    """The files of a package that a file imports, also in functions."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {package.parent / f"{name.replace('.', '/')}.py" for name in names}
    return {path for path in files if path.is_relative_to(package) and path.is_file()}


def check(package: Path) -> None:
    """Raise CycleError where entries of a folder, files or folders, import each other in a circle."""
    graphs = defaultdict[Path, defaultdict[str, set[str]]](lambda: defaultdict(set))
    for file in package.rglob("*.py"):
        for target in imported_files(file, package):
            folder = next(parent for parent in file.parents if target.is_relative_to(parent))
            graphs[folder][file.relative_to(folder).parts[0]].add(target.relative_to(folder).parts[0])
    for graph in graphs.values():
        TopologicalSorter(graph).prepare()


def test_no_folders_and_no_files_import_each_other_in_a_circle() -> None:
    check(SOURCES)


def test_a_circle_of_folders_that_no_two_files_make_is_noticed(tmp_path: Path) -> None:
    texts = {
        "low/counts.py": "",
        "low/job.py": "def make():\n    from house.high.predictor import predict",
        "high/predictor.py": "from house.low import counts",
        "high/more.py": "import house.low.job",
    }
    for name, text in texts.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.raises(CycleError) as raised:
        check(tmp_path / "house")
    assert set(raised.value.args[1]) == {"low", "high"}
