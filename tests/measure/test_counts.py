from __future__ import annotations

import pytest

from ddlbench.errors import RunError
from ddlbench.measure.rows import require_samples, require_val_samples
from tests.support.ranks import run_ranks


def test_training_samples_of_the_reporting_ranks() -> None:
    require_samples([24, None, 24, None], 48)  # two pipelines of two stages
    for counted, held in (([24, 24, 24, 24], 96), ([24, None, 23, None], 47), ([24, None], 24), ([None, None], 0)):
        with pytest.raises(RunError, match=rf"held {held} training samples in an epoch whose steps have 48"):
            require_samples(counted, 48)


def test_a_validation_set_is_counted_whole() -> None:
    require_val_samples(5, 5, 0)
    require_val_samples(4, 5, unread_here=1)
    for counted, unread in ((6, 0), (4, 0), (5, 1), (3, 1)):
        if counted == 5:  # nothing is missing: what could not be read is not asked
            require_val_samples(counted, 5, unread)
            continue
        with pytest.raises(RunError, match=rf"{counted} validation samples were counted and {unread} could not be"):
            require_val_samples(counted, 5, unread)


def unread_on_two_ranks() -> str:
    """Both ranks of a pipeline read the one bad sample of 5; only the second one reports."""
    import torch.distributed as dist

    unread = 1 if dist.get_rank() == 1 else 0
    require_val_samples(4, 5, unread)
    with pytest.raises(RunError) as caught:
        require_val_samples(3, 5, unread)
    return str(caught.value)


def test_each_rank_reads_but_one_of_a_replica_counts() -> None:
    (message,) = set(run_ranks(2, unread_on_two_ranks))
    assert message.startswith("3 validation samples were counted and 1 could not be read, of 5: ")
