from __future__ import annotations

import pytest

from tests.slurm.cluster import started


@pytest.fixture(scope="session")
def slurm():
    """Two nodes of eight cores and four (fake) GPUs each."""
    with started() as cluster:
        yield cluster
