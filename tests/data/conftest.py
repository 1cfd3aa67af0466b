"""A few images in folders and packed, and the packing done in this process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddlbench.data.images.index import FolderLayout
from tests.support.packs import pack_here
from tests.support.pictures import write_folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> FolderLayout:
    """Two classes of two training images and one validation image."""
    return write_folders(tmp_path_factory.mktemp("folders"), train=2, val=1, classes=2).layout()


@pytest.fixture(scope="session")
def made(folders: FolderLayout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_here(folders, tmp_path_factory.mktemp("packed") / "set")


@pytest.fixture
def packed(made: Path, tmp_path: Path) -> Path:
    """A packed set to damage."""
    return shutil.copytree(made, tmp_path / "set")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting processes takes longer than the work."""
    monkeypatch.setattr("ddlbench.data.tools.in_processes", lambda work, jobs, _: map(work, jobs))
