"""docs/adding-a-framework.md shows local_sgd.py and its YAML whole and as they are, parts of replica.py as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddlbench.job import Framework, Trainer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-framework.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("language", "file"),
    [("python", "src/ddlbench/frameworks/local_sgd.py"), ("yaml", "conf/framework/local_sgd.yaml")],
)
def test_the_page_shows_the_file(language: str, file: str) -> None:
    shown = [line for block in blocks(language) for line in lines(block)]
    assert shown == lines((ROOT / file).read_text())


def test_the_page_shows_parts_of_the_replica() -> None:
    whole = lines((ROOT / "src/ddlbench/frameworks/shared/replica.py").read_text())
    parts = [lines(block) for block in blocks("py")]
    assert parts
    for part in parts:
        assert any(whole[start : start + len(part)] == part for start in range(len(whole))), part


def test_every_method_of_the_protocols_is_shown() -> None:
    members = {**vars(Framework), **vars(Trainer)}
    methods = {
        name
        for name, value in members.items()
        if (callable(value) or isinstance(value, property)) and not name.startswith("_")
    }
    assert {"check", "setup", "step", "flush", "updates"} <= methods
    shown = [*blocks("python"), *blocks("py")]
    assert not {name for name in methods if not any(f"def {name}(" in block for block in shown)}
