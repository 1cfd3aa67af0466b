"""Process groups of some of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ddlbench.job import Job
from ddlbench.ranks.launch import first_operation, group_timeout


def subgroup(lists: Sequence[Sequence[int]], job: Job, separate: bool = False) -> dist.ProcessGroup | None:
    """This rank's group of those listed (disjoint lists of ranks), None where it is in none. Called on every rank with
    the same lists. separate: a new one also where the list is the whole world, so that what is sent in it keeps no
    order with what others send.

    The group's communicator exists when this returns: NCCL makes it at the group's first operation, which stops the
    host until every member is there, and that belongs to the start and not to a step."""
    if not separate and len(lists) == 1 and len(lists[0]) == job.world_size:
        return dist.group.WORLD
    timeout = group_timeout(job.device, job.timeout_s)
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists], timeout=timeout)
    if not isinstance(group, dist.ProcessGroup):
        return None
    first_operation(job.device, group)
    return group
