"""Files that are replaced as a unit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddlbench.files import replacing


def fail_while_writing(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half")
        raise OSError("no space")


def test_a_failure_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"a": 1}')
    with pytest.raises(OSError, match="no space"):
        fail_while_writing(path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
