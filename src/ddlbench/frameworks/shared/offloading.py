"""Saved activations of chosen blocks on the host between forward and backward pass (train.offload_activations).

Rhu et al. 2016, "vDNN". torch's saved_tensors_hooks are around the forward pass of each chosen block. On CUDA a stream
of its own copies in both directions, to and from pinned memory:

    compute:  forward 1 | forward 2, wait for out 1 | ... | backward 2 | wait for in 1, backward 1
    copies:   out 1 ----------------|                     | in 1 ------|

What a block saves stays on the device until the next block's forward pass ends: the compute stream waits for the copies
there, and only then is the memory used again, so that the peak does not depend on how far the host is ahead. It comes
back while the next block's backward pass runs, into memory that is freed as autograd frees what it saves. On the CPU
the same happens without streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALL = 1024  # bytes: means, scales and the states of random generators stay on the device
VIEWS_OF_WEIGHTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0")

Key: TypeAlias = tuple[int, int, torch.dtype]  # of the content of a storage
Packed: TypeAlias = tuple["Saved", Sequence[int], Sequence[int], int]  # a tensor as a view of a saved storage


class Host:
    """Buffers of the host and the stream of the copies, for all blocks of a model.

    free: buffers that no storage uses, by number of elements and type
    present: storages whose content is still on the device
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free = defaultdict[tuple[int, torch.dtype], list[Tensor]](list)
        self.present = dict[Key, Saved]()

    def copy(self, to: Tensor, content: Tensor) -> torch.cuda.Event | None:
        """Copy after all that the compute stream has so far; the event of its end."""
        if self.stream is None:
            to.copy_(content)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(content, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self.stream)
        return copied


class Saved:
    """A complete storage that autograd saves: all its views are copied at once.

    content: its elements on the device; None while they are on the host alone
    copied: the end of the last copy, if nothing has waited for it
    """

    def __init__(self, host: Host, key: Key, content: Tensor) -> None:
        self.host, self.key = host, key
        self.content: Tensor | None = content
        count, dtype = content.numel(), content.dtype
        if host.free[count, dtype]:
            # The order of the stream keeps its last copy to the device before its next content.
            self.buffer = host.free[count, dtype].pop()
        else:
            self.buffer = torch.empty(count, dtype=dtype, device="cpu", pin_memory=host.stream is not None)
        self.copied = host.copy(self.buffer, content)
        host.present[key] = self

    def leave(self) -> None:
        """Free the memory of the device."""
        if self.host.present.pop(self.key, None) is not None:
            self.wait()
            self.content = None

    def fetch(self) -> Tensor:
        if self.content is None:
            self.content = torch.empty_like(self.buffer, device=self.host.device, pin_memory=False)
            self.copied = self.host.copy(self.content, self.buffer)
        return self.content

    def wait(self) -> None:
        """Let the operations that are queued next wait for the last copy."""
        if self.copied is not None:
            torch.cuda.current_stream(self.host.device).wait_event(self.copied)
            self.copied = None

    def __del__(self) -> None:
        """Autograd has freed all tensors of this storage, even if it never asked for a copy in flight."""
        self.wait()
        self.host.free[self.buffer.numel(), self.buffer.dtype].append(self.buffer)


class OffloadedBlock:
    """The forward pass of a block with its saved tensors copied to the host.

    saved: of the last forward pass, until the next block takes them
    """

    def __init__(self, block: nn.Module, host: Host) -> None:
        self.block, self.host, self.forward = block, host, block.forward
        self.saved = list[Saved]()
        self.staying = set[int]()  # storages of what is no activation

    def __call__(self, value: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.forward(value)
        # This is known only now: FSDP gives a block its complete weights just before. A batch needs no gradient.
        staying = [*self.block.parameters(), *self.block.buffers(), *([] if value.requires_grad else [value])]
        # A storage has this number while it exists; that of a fake tensor has no address.
        self.staying, self.saved = {tensor.untyped_storage()._cdata for tensor in staying}, []  # pyright: ignore
        with saved_tensors_hooks(self._pack, _unpack):
            return self.forward(value)

    def _pack(self, tensor: Tensor) -> Tensor | Packed:
        storage = tensor.untyped_storage()
        number: int = storage._cdata  # pyright: ignore
        if (
            storage.nbytes() <= SMALL
            or tensor.device != self.host.device
            or number in self.staying
            or _is_weight(tensor)
        ):
            return tensor
        key = number, tensor._version, tensor.dtype
        saved = self.host.present.get(key)  # the input, if the block before has saved it: it comes back with that one
        if saved is None:
            content = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            saved = Saved(self.host, key, content)
            self.saved.append(saved)
        return saved, tensor.shape, tensor.stride(), int(tensor.storage_offset())

    def leave(self, output: Tensor) -> None:
        """After the forward pass of the next block, whose output this is."""
        saved, self.saved = self.saved, []
        for storage in saved:
            storage.leave()

        def come_back(_: Tensor) -> None:
            while saved:  # autograd alone refers to them then
                saved.pop().fetch()

        if output.requires_grad:
            output.register_hook(come_back)


def _unpack(packed: Tensor | Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    saved, shape, strides, offset = packed
    content = saved.fetch()
    saved.wait()
    return content.as_strided(shape, strides, offset)


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a weight that was cast (autocast keeps that until the forward pass ends) or transposed."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in VIEWS_OF_WEIGHTS:
        node = node.next_functions[0][0]
    return node is not None and hasattr(node, "variable")  # AccumulateGrad, of a leaf


def offload_blocks(model: nn.Sequential, names: Sequence[str], device: torch.device) -> Host:
    """Every named block but the last of a model can be offloaded."""
    host = Host(device)
    for (name, block), (_, following) in pairwise(list(model.named_children())):
        if name in names:
            # Inside of the block, so that hooks around it (FSDP's) gather its weights first.
            block.forward = cast(Callable[..., Tensor], wrapped := OffloadedBlock(block, host))
            following.register_forward_hook(lambda _, __, output, wrapped=wrapped: wrapped.leave(output))
    vars(model)["offloaded"] = list(names)
    return host
