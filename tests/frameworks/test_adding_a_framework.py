"""docs/adding-a-framework.md shows local_sgd.py and its YAML whole and as they are, and leads to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddlbench.job import Framework

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


def test_every_method_of_the_protocol_is_shown() -> None:
    methods = {name for name, value in vars(Framework).items() if callable(value) and not name.startswith("_")}
    assert {"check", "setup", "step", "flush"} <= methods
    missing = {name for name in methods if not any(f"def {name}(" in block for block in blocks("python"))}
    assert not missing


def test_the_links_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", TEXT) if not target.startswith("http")]
    assert targets
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []
