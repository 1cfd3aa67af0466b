"""The link between two neighbouring stages of a pipeline that stays full."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Link:
    """The link to a neighbouring stage: both exchange activations for gradients, and no ranks wait in a circle.

    In each turn an end starts its send and its receive together, and both ends take the same turns. So a send may end
    at once (gloo), or only when its receiver is ready and all that was started before has ended (NCCL): if rank r and
    rank r + 1 exchange in turn k, every rank takes its turns in the order of (k, r), and an order has no circles.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup | None, border: Tensor, device: torch.device) -> None:
        """peer: global rank; border: has the shape and the type of what is sent in both directions"""
        self.peer, self.group, self.border, self.device = peer, group, border, device
        self.sending: tuple[Tensor | None, list[dist.Work]] = None, []

    def exchange(self, outgoing: Tensor | None, receive: bool) -> Tensor | None:
        """Start to send `outgoing`, if any; with `receive` wait for what the peer sends, and return it."""
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
            works.pop().wait()  # the receive is the last; NCCL has one work for all operations
        self.sending = outgoing, works
        return incoming

    def wait_for_send(self) -> None:
        """Wait until the last send has ended: its memory is needed until then."""
        for work in self.sending[1]:
            work.wait()
        self.sending = None, []
