"""How neighbours in a pipeline exchange activations for gradients without ever waiting for each other in a circle."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Link:
    """The way to the rank before or behind.

    What one end sends and what it gets back in the same turn start together, and both ends take the same turns. So it
    does not matter whether a send ends at once (gloo) or only when its receiver is there, and all that was started
    before has ended (NCCL): let rank r and rank r + 1 exchange in turn k, then every rank takes its turns in the order
    of (k, r), and an order has no circles.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup | None, border: Tensor, device: torch.device) -> None:
        """peer: global rank; border: of the shape and type of what passes, there and back"""
        self.peer = peer
        self.group = group
        self.border = border
        self.device = device
        self.sending: tuple[Tensor | None, list[dist.Work]] = None, []

    def exchange(self, outgoing: Tensor | None, receive: bool) -> Tensor | None:
        """Start to send, where there is something; wait for what comes, where something does."""
        self.wait_for_send()
        operations: list[dist.P2POp] = []
        if outgoing is not None:
            outgoing = outgoing.contiguous()
            assert (outgoing.shape, outgoing.dtype) == (self.border.shape, self.border.dtype)
            operations.append(dist.P2POp(dist.isend, outgoing, self.peer, self.group))
        incoming = None
        if receive:
            incoming = torch.empty(self.border.shape, dtype=self.border.dtype, device=self.device)
            operations.append(dist.P2POp(dist.irecv, incoming, self.peer, self.group))
        works = dist.batch_isend_irecv(operations) if operations else []
        if receive:
            works.pop().wait()  # of one for each operation the receive; NCCL makes one of all
        self.sending = outgoing, works
        return incoming

    def wait_for_send(self) -> None:
        """Wait until what was sent has gone: its memory is needed until then."""
        for work in self.sending[1]:
            work.wait()
        self.sending = None, []
