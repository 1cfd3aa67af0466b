from __future__ import annotations

import pytest

from tests.slurm.cluster import COMMANDS, Slurm, obstacle
from tests.support.processes import need


@pytest.fixture(scope="session")
def slurm():
    """Two nodes of eight cores and four (fake) GPUs each."""
    reason = obstacle()
    if reason:
        pytest.skip(reason)
    need(COMMANDS)
    with Slurm() as cluster:
        yield cluster
