"""Samples are counted where they are used, and compared with what the steps and the data set should give."""

from __future__ import annotations

from collections.abc import Sequence

from ddlbench.errors import RunError
from ddlbench.ranks.control import all_gather


def require_samples(counted: Sequence[int | None], asked: int) -> None:
    """Raise RunError, on every rank alike, unless an epoch's batches held what its steps ask for.

    counted: samples of the batches of each rank; None on a rank that does not report
    """
    reported = [count for count in counted if count is not None]
    if sum(reported) != asked:
        raise RunError(
            f"the batches of the {len(reported)} reporting ranks held {sum(reported)} training samples in an epoch "
            f"whose steps have {asked}: report this as a bug of the loader or of the framework's layout"
        )


def require_val_samples(counted: int, expected: int, unread_here: int) -> None:
    """Raise RunError, on every rank alike, unless every validation sample was counted once, but for those that could
    not be read (data.on_bad_sample=skip).

    counted, expected: over all ranks
    unread_here: that this rank could not read; 0 where another rank reports for its replica
    """
    if counted == expected:
        return
    unread = sum(all_gather(unread_here))
    if counted + unread != expected:
        raise RunError(
            f"{counted} validation samples were counted and {unread} could not be read, of {expected}: "
            "report this as a bug of the loader or of the framework's layout"
        )
