"""What is beside the tensors of a checkpoint, and which folders are complete."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddlbench.checkpoint.storage import ABOUT, Saved, complete


def saved(folder: Path) -> Saved:
    return Saved(
        folder, "run", 2, [1, 2], 4, 12, 1.5, {"step": 12, "first": 0.1, "last": 0.30000000000000004},
        {"updates": 12, "scaler": {}}, [{"epoch": 0}], {"__0_0.distcp": (7, "abc")},
    )  # fmt: skip


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    saved(tmp_path).write()
    result = Saved.read(tmp_path)
    assert vars(result) == vars(saved(tmp_path)) | {"files": {"__0_0.distcp": [7, "abc"]}}  # floats to the last bit


def test_numbers_that_have_another_name_since_are_read(tmp_path: Path) -> None:
    replace(saved(tmp_path), numbers={"synchronised": True, "steps": 3}).write()
    assert Saved.read(tmp_path).numbers == {"synchronized": True, "steps": 3}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", r"is not JSON \(Expecting value"),
        ("[]", "has format None, this version reads 1"),
        ("[" * 100_000, "is not JSON"),
        ('{"format": 2}', "has format 2, this version reads 1"),
        ('{"format": 1, "attempt": 3}', "lacks keys or has others"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / ABOUT).write_text(content)
    with pytest.raises(ValueError, match=reason):
        Saved.read(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lineage": ["../../../home"]}, {"lineage": [-1]}, {"lineage": "12"}, {"lineage": [True]}, {"attempt": "1/.."},
        {"epoch": 1.5}, {"updates": None}, {"elapsed_s": "1"}, {"run_id": 3},
        {"rates": {"of_step": 1}}, {"rates": {"step": 1}}, {"rates": []},
        {"numbers": 1}, {"epochs": [1]}, {"epochs": {}}, {"files": {"../other": [1, "a"]}},
        {"files": {"/dev/zero": [1, "a"]}}, {"files": {"a": "b"}}, {"files": {"a": [1]}}, {"files": ["a"]},
    ],
)  # fmt: skip
def test_values_that_no_run_writes_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """A run that ends well removes the folders of its lineage: a name with .. would be another folder."""
    saved(tmp_path).write()
    content = json.loads((tmp_path / ABOUT).read_text())
    (tmp_path / ABOUT).write_text(json.dumps(content | wrong))
    with pytest.raises(ValueError, match="has values that no run writes"):
        Saved.read(tmp_path)


def test_it_has_no_more_than_its_keys(tmp_path: Path) -> None:
    saved(tmp_path).write()
    assert set(json.loads((tmp_path / ABOUT).read_text())) == {
        "format", "run_id", "attempt", "lineage", "epoch", "updates", "elapsed_s", "rates", "numbers", "epochs",
        "files",
    }  # fmt: skip


def test_folders_that_are_being_written_do_not_count(tmp_path: Path) -> None:
    for name in ("epoch-000002", "epoch-000010", ".epoch-000011", "epoch-1", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in complete(tmp_path)] == ["epoch-000010", "epoch-000002"]
    assert complete(tmp_path / "absent") == []
