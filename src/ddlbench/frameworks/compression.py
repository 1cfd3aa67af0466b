"""Hooks of DDP that send compressed gradients, and keep what was not sent for the next step (error feedback).

torch calls a hook with each full bucket of gradients, in the same order on all ranks. The buckets of the first step of
a process are not those of later ones, so each tensor is compressed by itself, and what a hook keeps is kept by
parameter: neither the result nor a checkpoint depends on the buckets.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.futures import Future

from ddlbench.checkpoint import Kept

Parameters = Mapping[str, nn.Parameter]
Message = tuple[Tensor, Tensor]  # numbers in fp32, and codes of any type


# A compressor says what is sent for the gradients of a bucket. It has two methods:
# compress: returns the message. gradients: those of each tensor, flat
# add: adds what a message stands for to `total`, the gradients of a bucket one after the other. sizes: their lengths


@dataclass(frozen=True)
class TopK:
    """The `ratio` of each tensor's numbers that are largest, and where they are (Lin et al. 2018; Stich et al. 2018):
    8 bytes for each, and at least one number of a tensor."""

    ratio: float

    def compress(self, gradients: Sequence[Tensor]) -> Message:
        values, places, start = list[Tensor](), list[Tensor](), 0
        for gradient in gradients:
            largest = gradient.abs().topk(ceil(self.ratio * gradient.numel()), sorted=False).indices
            values.append(gradient[largest])
            places.append(largest + start)
            start += gradient.numel()
        return torch.cat(values), torch.cat(places).int()

    def add(self, message: Message, total: Tensor, sizes: Sequence[int]) -> None:
        values, places = message
        total.index_add_(0, places, values)  # each place once, so the order of the sum is that of the messages


class Sign:
    """The sign of each number, and the mean magnitude of each tensor (1-bit SGD, Seide et al. 2014; scaled as in
    EF-SignSGD, Karimireddy et al. 2019): 1/8 byte for each number, and 4 for each tensor."""

    def compress(self, gradients: Sequence[Tensor]) -> Message:
        scales = torch.stack([gradient.abs().mean() for gradient in gradients])
        positive = torch.cat([gradient >= 0 for gradient in gradients])
        octets = nn.functional.pad(positive.byte(), (0, -len(positive) % 8)).view(-1, 8)
        return scales, (octets << _bits(octets)).sum(1, dtype=torch.uint8)

    def add(self, message: Message, total: Tensor, sizes: Sequence[int]) -> None:
        scales, octets = message
        positive = (octets[:, None] >> _bits(octets) & 1).flatten()[: len(total)]
        total.add_((2.0 * positive - 1.0) * _repeated(scales, sizes))


class Int8:
    """Each number as one of 255 multiples of the tensor's largest magnitude / 127: a byte for each number, and 4 for
    each tensor. torch's quantization hooks fail on gloo, and have one scale for all tensors of a bucket."""

    def compress(self, gradients: Sequence[Tensor]) -> Message:
        largest = torch.stack([gradient.abs().amax() for gradient in gradients])
        scales = (largest / 127).clamp(min=torch.finfo(largest.dtype).tiny)  # a tensor may be all 0
        codes = [(part / scale).round().to(torch.int8) for part, scale in zip(gradients, scales.unbind(), strict=True)]
        return scales, torch.cat(codes)

    def add(self, message: Message, total: Tensor, sizes: Sequence[int]) -> None:
        scales, codes = message
        total.add_(codes * _repeated(scales, sizes))


Compressor = TopK | Sign | Int8


class Hook(Kept):
    """A hook that DDP calls with each full bucket. errors: by parameter, the numbers that were not sent yet, flat"""

    def __init__(self, parameters: Parameters) -> None:
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self.errors: dict[str, Tensor] = {
            name: torch.zeros_like(parameter.detach()).flatten() for name, parameter in parameters.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        return {f"hook/{name}": error for name, error in self.errors.items()}


class ErrorFeedback(Hook):
    """A step sends its gradient g and the error e that the earlier steps left, as far as the compressor C can:
    s = C(g + e), e = g + e - s. Every rank gets all messages and averages them in the order of the ranks, so all ranks
    have the same result (for C = identity and two ranks it is that of an all-reduce, bit for bit)."""

    def __init__(self, compressor: Compressor, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.compressor = compressor
        self.stream = torch.cuda.Stream() if next(iter(parameters.values())).is_cuda else None

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        total = bucket.buffer()
        sizes = [parameter.numel() for parameter in bucket.parameters()]
        errors = [self.errors[self.names[parameter]] for parameter in bucket.parameters()]
        gradients = list(total.split(sizes))
        torch._foreach_add_(errors, gradients)  # pyright: ignore
        first, second = self.compressor.compress(errors)
        sent = torch.zeros_like(total)
        self.compressor.add((first, second), sent, sizes)
        torch._foreach_sub_(errors, list(sent.split(sizes)))  # pyright: ignore

        message = torch.cat([first.view(torch.uint8), second.view(torch.uint8)])
        ranks = dist.get_world_size()
        messages = [torch.empty_like(message) for _ in range(ranks)]
        work = dist.all_gather(messages, message, async_op=True)
        assert work is not None

        def averaged(_: object) -> Tensor:
            with _on(self.stream):
                total.zero_()
                for received in messages:
                    if self.stream is not None:
                        received.record_stream(self.stream)
                    parts = received.split([first.nbytes, second.nbytes])
                    self.compressor.add((parts[0].view(first.dtype), parts[1].view(second.dtype)), total, sizes)
                return total.div_(ranks)

        return work.get_future().then(averaged)


class PowerSGD(Hook):
    """torch's PowerSGD (Vogels et al. 2019), which keeps errors and the factors Q of the last step by bucket. Here they
    are kept by parameter until a bucket is first used, and again before buckets change and before they are saved. The
    first Q are drawn here, because torch would draw them by bucket."""

    def __init__(self, parameters: Parameters, rank: int, start_step: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        super().__init__(parameters)
        self.state = PowerSGDState(None, rank, start_step)
        self.factors: dict[str, Tensor] = {}
        self.lengths: dict[str, tuple[int, int]] = {}  # of the factors P and Q of what is compressed
        generator = torch.Generator().manual_seed(0)  # the same on all ranks
        for name, parameter in parameters.items():
            rows, columns = len(parameter), parameter.numel() // len(parameter)
            least = min(rows, columns, rank)
            if (rows + columns) * least * self.state.min_compression_rate < rows * columns:  # as torch's hook decides
                self.lengths[name] = rows * least, columns * least
                self.factors[name] = torch.randn(columns * least, generator=generator).to(parameter.device)
        # The errors and factors that torch's state has now: all names of a bucket, and those that are compressed.
        self.buckets: dict[int, tuple[list[str], list[str]]] = {}
        self.steps = 0  # of this process

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        index, state = bucket.index(), self.state
        if index == 0:
            self.steps += 1
            if self.steps == 2:  # the buckets have changed
                self._return()
        if state.iter >= state.start_powerSGD_iter and index not in self.buckets:
            names = [self.names[parameter] for parameter in bucket.parameters()]
            compressed = [name for name in names if name in self.lengths]
            shapes = [self.lengths[name] for name in compressed]
            # The factors in torch's state have this order: tensors of the same shape are side by side.
            low_rank = sorted(compressed, key=lambda name: shapes.index(self.lengths[name]))
            self.buckets[index], none = (names, low_rank), bucket.buffer().new_empty(0)
            state.error_dict[index] = torch.cat([self.errors.pop(name) for name in names])
            state.p_memory_dict[index] = none.new_empty(sum(self.lengths[name][0] for name in low_rank))
            state.q_memory_dict[index] = torch.cat([none, *(self.factors.pop(name) for name in low_rank)])
        future = powerSGD_hook(state, bucket)
        if bucket.buffer().device.type == "cpu":  # gloo's threads start the later all-reduces: keep their order
            future.wait()
        return future

    def _return(self) -> None:
        """Take errors and factors out of torch's state, as views of its tensors."""
        sizes = {name: parameter.numel() for parameter, name in self.names.items()}
        for index, (names, low_rank) in self.buckets.items():
            errors = self.state.error_dict[index].split([sizes[name] for name in names])
            self.errors |= zip(names, errors, strict=True)
            factors = self.state.q_memory_dict[index].split([self.lengths[name][1] for name in low_rank])
            self.factors |= zip(low_rank, factors, strict=True)
        self.buckets.clear()

    def tensors(self) -> dict[str, Tensor]:
        self._return()
        return super().tensors() | {f"hook/{name}/factor": factor for name, factor in self.factors.items()}

    def numbers(self) -> dict[str, Any]:
        return {"powersgd_steps": self.state.iter}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        self.state.iter = numbers["powersgd_steps"]


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Generator[None]:
    """Work on this stream in the place of the current one; None: on the CPU. torch calls what follows a collective on
    the next of 32 streams, and the allocator would keep memory for each of them: 22 GiB for signs of GPT-2 small."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def _bits(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _repeated(scales: Tensor, sizes: Sequence[int]) -> Tensor:
    """The scale of each number of a bucket."""
    return torch.cat([scale.expand(size) for scale, size in zip(scales.unbind(), sizes, strict=True)])
