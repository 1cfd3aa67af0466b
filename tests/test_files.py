"""Files that are replaced as a unit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddlbench.files import remove_leftovers, replacing, unfinished_path
from tests.support.disk import no_space


def test_a_failure_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"a": 1}')
    with pytest.raises(OSError, match="No space"), replacing(path) as file:
        no_space(file.write(b"half"))
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "x" * 200], ids=["ascii", "two bytes a letter", "fits"])
def test_a_name_may_be_as_long_as_a_file_system_allows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with replacing(path) as file:
        file.write(b"complete")
    assert path.read_bytes() == b"complete"
    unfinished = unfinished_path(path, tmp_path)
    left = unfinished.with_name(unfinished.name.replace(f"~{os.getpid()}~", "~2147483646~"))  # of a process that ended
    for file in (left, unfinished):
        file.touch()
    remove_leftovers(path.parent, path.name)
    assert sorted(tmp_path.iterdir()) == sorted([path, unfinished])
