"""A short text in a folder, before and after it is tokenized."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddlbench.data.text.dataset import TokenText
from tests.support.text import write_text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_text(tmp_path)
    return tmp_path


@pytest.fixture
def text(root: Path) -> TokenText:
    text = TokenText("text", root=str(root))
    text.prepare()
    return text
