"""The options of a group are listed once a process, and what is returned is the caller's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddlbench.config import choices as module
from ddlbench.config.choices import choices
from ddlbench.config.options import check
from ddlbench.models.resnet import ResNet


def test_a_group_is_listed_once_for_any_number_of_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed, own = list[str](), Path.glob

    def glob(folder: Path, pattern: str) -> Iterator[Path]:
        listed.append(folder.name)
        return own(folder, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    module._listed.cache_clear()  # pyright: ignore[reportPrivateUsage]
    for _ in range(100):
        check("model", "mine.Model", ResNet("mine", layers=[1, 1, 1, 1]))
    assert listed == ["model"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "b.yaml").touch()
    (tmp_path / "model" / "a.yaml").touch()
    monkeypatch.setattr(module, "conf_dir", lambda: tmp_path)  # another folder is listed anew
    assert choices("model") == ["a", "b"]


def test_a_caller_cannot_change_the_list_of_the_others() -> None:
    choices("loader").clear()
    assert choices("loader") == ["dali", "native", "synthetic"]
