"""Neighbours send and receive in one order; messages are larger than a socket's buffer."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddlbench.frameworks.pipeline.link import Link
from tests.support.ranks import run_ranks

NUMBERS = 1_000_000


def turns() -> list[float | None]:
    rank = dist.get_rank()
    border = torch.empty(NUMBERS, dtype=torch.float64, device="meta")
    link = Link(1 - rank, None, border, torch.device("cpu"))
    sends = [True, True, False] if rank == 0 else [False, True, True]
    receives = sends[::-1]  # only to rank 1, both ways, only to rank 0
    got: list[float | None] = []
    for turn, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        outgoing = torch.full((2, NUMBERS // 2), 10.0 * rank + turn, dtype=torch.float64).t() if send else None
        came = link.exchange(outgoing.reshape(NUMBERS) if outgoing is not None else None, receive)
        got.append(None if came is None else came.unique().item())
    assert link.exchange(None, receive=False) is None
    link.wait_for_send()
    return got


def test_both_ends_send_and_receive_in_the_same_order() -> None:
    assert run_ranks(2, turns) == [[None, 11.0, 12.0], [0.0, 1.0, None]]
