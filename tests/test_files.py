"""Files that are replaced as a unit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddlbench.files import replacing, write_json


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5]}


def fail_while_writing(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half")
        raise OSError("no space")


def test_a_failure_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    with pytest.raises(OSError, match="no space"):
        fail_while_writing(path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
