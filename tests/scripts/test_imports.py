"""No test file is a library: what several test files use is in tests/support/ or in a module beside them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported_test_files(source: str) -> set[str]:
    """The modules named test_* that `source` imports, at its top or in a function."""
    names = (name for node in ast.walk(ast.parse(source)) for name in _imported(node))
    return {name for name in names if any(part.startswith("test_") for part in name.split("."))}


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def test_no_file_imports_a_test_file() -> None:
    files = [path for folder in ("tests", "benchmarks", "scripts", "src") for path in ROOT.glob(f"{folder}/**/*.py")]
    found = {str(path.relative_to(ROOT)): imported_test_files(path.read_text("utf-8")) for path in files}
    assert len(files) > 300
    assert not {path: names for path, names in found.items() if names}


def test_every_kind_of_import_is_found() -> None:
    assert imported_test_files("import tests.report.test_read") == {"tests.report.test_read"}
    assert imported_test_files("from tests.report.test_read import rows") == {"tests.report.test_read.rows"}
    assert imported_test_files("def f():\n    from tests.report import test_read") == {"tests.report.test_read"}
    assert imported_test_files("from . import test_read") == {".test_read"}
    assert not imported_test_files("from tests.support.records import write_run")
