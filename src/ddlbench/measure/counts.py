"""Samples are counted where they are used, and compared with what the steps and the data set should give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ddlbench.errors import RunError
from ddlbench.ranks.control import all_gather


class ValidationSet(Protocol):
    """How many samples it has over all replicas, and how many this rank could not read."""

    @property
    def val_samples(self) -> int: ...

    @property
    def val_unread(self) -> int: ...


def require_samples(counted: Sequence[int | None], asked: int) -> None:
    """Raise RunError, on every rank alike, unless an epoch's batches held what its steps ask for.

    counted: samples of the batches of each rank; None on a rank that does not report
    """
    known = [count for count in counted if count is not None]
    if sum(known) != asked:
        raise RunError(
            f"the batches of the {len(known)} reporting ranks held {sum(known)} training samples in an epoch whose "
            f"steps have {asked}: report this as a bug of the loader or of the framework's layout"
        )


def require_val_samples(counted: int, feed: ValidationSet, reports: bool) -> None:
    """Raise RunError, on every rank alike, unless every validation sample was counted once, but for those that could
    not be read (data.on_bad_sample=skip).

    counted: over all ranks; reports: whether this rank reports for its replica
    """
    if counted == feed.val_samples:
        return
    unread = sum(all_gather(feed.val_unread if reports else 0))
    if counted + unread != feed.val_samples:
        raise RunError(
            f"{counted} validation samples were counted and {unread} could not be read, of {feed.val_samples}: "
            "report this as a bug of the loader or of the framework's layout"
        )
