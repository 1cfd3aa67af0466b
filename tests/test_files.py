"""Files that are replaced as a unit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddlbench.files import replacing
from tests.support.disk import no_space


def test_a_failure_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"a": 1}')
    with pytest.raises(OSError, match="No space"), replacing(path) as file:
        no_space(file.write(b"half"))
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
