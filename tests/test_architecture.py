"""Imports go one way: no circle of files, of folders, or of a folder and a file beside it (docs/adr/0021)."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

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


def circles(package: Path) -> list[str]:
    """In each folder: entries, files or folders, that import each other in a circle."""
    files = sorted(package.rglob("*.py"))
    imports = [(file, target) for file in files for target in imported_files(file, package)]
    folders = sorted({package, *(file.parent for file in files)})
    return [circle for folder in folders if (circle := circle_of(graph_of(folder, imports)))]


def graph_of(folder: Path, imports: list[tuple[Path, Path]]) -> Mapping[str, set[str]]:
    """For each entry of a folder the other entries that it imports."""
    graph = defaultdict[str, set[str]](set)
    for file, target in imports:
        if file.is_relative_to(folder) and target.is_relative_to(folder):
            importing, imported = file.relative_to(folder).parts[0], target.relative_to(folder).parts[0]
            if importing != imported:
                graph[importing].add(imported)
    return graph


def circle_of(graph: Mapping[str, set[str]]) -> str:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return ""


def test_no_folders_and_no_files_import_each_other_in_a_circle() -> None:
    assert circles(SOURCES) == []


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
    (circle,) = circles(tmp_path / "house")
    assert set(circle.split(" imports ")) == {"low", "high"}
