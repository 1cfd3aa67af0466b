"""The files that the loaders read."""

from __future__ import annotations

import pytest

from ddlbench.data.images.folders import ImageFolders
from tests.support.pictures import write_folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ImageFolders:
    """15 training images and 9 of validation: 3 batches of 4 of each."""
    return write_folders(tmp_path_factory.mktemp("loaders"), train=5, val=3)
