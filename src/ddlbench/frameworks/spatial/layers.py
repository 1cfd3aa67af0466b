"""Layers of which every rank computes some rows: convolution and pooling with halos, BatchNorm over all parts.

Dryden et al. 2019, "Improving strong-scaling of CNN training by exploiting finer-grained parallelism"; Kahira et al.
2021. Before a layer with a window, ranks send each other the rows at the borders of their parts (the halo) that the
windows of others reach; the backward pass returns the gradients of these rows to their owners, which add them. The
classifier needs complete images: an all-gather precedes it, and all ranks compute it in the same way.

The rows of every layer's input and output are cut in the same way, as `Part.span` says: parts differ by one row at
most. Heights need not divide, so with strides a part may need rows from one neighbour only, or not all of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from ddlbench.errors import Unsupported
from ddlbench.frameworks.tensor.collectives import (
    Part,
    all_gather,
    dense,
    gather_from,
    in_autocast_type,
    layout_of,
    total,
)
from ddlbench.job import Model

ROWS = 2  # dimension of [B, C, H, W]
PIXELS = (0, 2, 3)  # all dimensions but the channels
aten: Any = torch.ops.aten
_windows: dict[tuple[type, str], dict[str, Window]] = {}


@dataclass(frozen=True)
class Window:
    """A layer that computes a row of its output from `kernel` rows of its input, `stride` rows further for each row.

    height: rows of its input; kernel: with dilation; padding: rows above and below the image
    """

    height: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0

    @property
    def output(self) -> int:
        """Rows of its output."""
        return (self.height + 2 * self.padding - self.kernel) // self.stride + 1

    def needed(self, part: Part, rank: int) -> tuple[int, int]:
        """First row and end of what a part needs for its output; rows outside of the image are padding."""
        first, count = part.span(self.output, rank)
        first = first * self.stride - self.padding
        return first, first + (count - 1) * self.stride + self.kernel

    def shared(self, part: Part, owner: int, user: int) -> slice:
        """The rows that one part has and another one needs, as rows of the owner; empty if there are none."""
        begin, count = part.span(self.height, owner)
        first, end = self.needed(part, user)
        first, end = max(first - begin, 0), min(end - begin, count)
        return slice(first, max(first, end))

    def taken(self, part: Part) -> list[int]:
        """How many rows this part needs of each part's, itself included."""
        shared = (self.shared(part, owner, part.rank) for owner in range(part.size))
        return [rows.stop - rows.start for rows in shared]


def windows(model: Model) -> dict[str, Window]:
    """The layers that ranks share by rows, by name, and last the pooling before which the rows are gathered.
    Unsupported if it is not known which rows a layer needs."""
    key = type(model), repr(model)
    if key in _windows:
        return _windows[key]
    by_name: dict[str, Window] = {}
    gathered = False

    def before(name: str, layer: Any, given: tuple[Tensor, ...]) -> None:
        nonlocal gathered
        if not gathered and not isinstance(layer, nn.ReLU):
            window = window_of(layer, given[0].shape[ROWS])
            if window is None:
                raise Unsupported(f"spatial: it is not known which rows {name} needs: {layer}")
            by_name[name], gathered = window, isinstance(layer, nn.AdaptiveAvgPool2d)

    with unset_fake_temporarily(), torch.device("meta"), torch.no_grad():
        built = model.build().eval()
        for name, layer in built.named_modules():
            if not any(layer.children()):
                layer.register_forward_pre_hook(partial(before, name))
        built(torch.empty(1, *model.input_shape()))
    _windows[key] = by_name
    return by_name


def window_of(layer: Any, height: int) -> Window | None:
    """The rows that a layer needs; None: not known. height: rows of its input"""
    if isinstance(layer, nn.BatchNorm2d | nn.AdaptiveAvgPool2d):
        return Window(height)
    zeros = isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if not zeros and not (isinstance(layer, nn.MaxPool2d) and not layer.ceil_mode):
        return None
    options: Any = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    kernel, stride, padding, dilation = (_pair(by)[0] for by in options)
    return Window(height, dilation * (kernel - 1) + 1, stride, padding)


def _pair(by: int | Sequence[int]) -> Sequence[int]:
    """Along height and width, of what torch takes for both or for each."""
    return (by, by) if isinstance(by, int) else by


def share_rows(model: nn.Sequential, by_name: dict[str, Window], part: Part) -> list[nn.Parameter]:
    """Turn a model, in place, into one that computes this rank's rows of the images; the output is that of complete
    images on every rank. by_name: as `windows` returns them.

    Returns the parameters of the layers before the gathering: their gradients are those of this rank's rows, of which
    the replica's gradient is the sum over its ranks. The other gradients are complete on every rank.
    """
    shared = list[nn.Parameter]()
    for name, window in by_name.items():
        module: Any = model.get_submodule(name)
        kind = type(module)
        shared += module.parameters()
        if issubclass(kind, nn.BatchNorm2d):
            module.forward = partial(_sync_batch_norm, module, module.forward, part)
        elif issubclass(kind, nn.AdaptiveAvgPool2d):
            module.forward = partial(_gather_rows, module.forward, window.height, part)
        elif window.kernel > 1 or window.stride > 1 or window.padding:  # a row needs more than the same row
            module.forward = partial(_with_halo, module, Halo(window, part))
    return shared


def rows_of(images: Tensor, part: Part) -> Tensor:
    """This rank's rows, [B, C, H / size, W], in memory of their own."""
    rows = images.narrow(ROWS, *part.span(images.shape[ROWS]))
    return rows.contiguous(memory_format=layout_of(images))


def _gather_rows(inner: Any, height: int, part: Part, x: Tensor) -> Tensor:
    return inner(gather_from(x, ROWS, height, part))


def _with_halo(layer: Any, halo: Halo, x: Tensor) -> Tensor:
    if isinstance(layer, nn.MaxPool2d):
        return cast(Tensor, _WithHalo.apply(x, None, None, layer, halo))
    weight, bias = (None if tensor is None else in_autocast_type(tensor) for tensor in (layer.weight, layer.bias))
    return cast(Tensor, _WithHalo.apply(in_autocast_type(x), weight, bias, layer, halo))


def _sync_batch_norm(norm: Any, inner: Any, part: Part, x: Tensor) -> Tensor:
    """As _BatchNorm.forward of torch, with statistics over all parts."""
    if not norm.training:
        return inner(x)
    output, mean, variance, number = _SyncBatchNorm.apply(x, norm.weight, norm.bias, norm.eps, part)
    if norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * (number / (number - 1)), norm.momentum)
    return output


class Halo:
    """The exchange of rows before one layer, and of their gradients after it.

    lent: this part's rows that each part needs, itself included; taken: as `Window` has it
    above, below: rows of padding outside of the image
    """

    def __init__(self, window: Window, part: Part) -> None:
        self.part, self.taken = part, window.taken(part)
        self.lent = [window.shared(part, part.rank, user) for user in range(part.size)]
        first, end = window.needed(part, part.rank)
        self.above, self.below = max(0, -first), max(0, end - window.height)

    def give_back(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of this rank's rows x, from that of `joined` rows on all ranks."""
        _, *pieces, _ = gradient.split([self.above, *self.taken, self.below], ROWS)
        counts, result = [rows.stop - rows.start for rows in self.lent], torch.zeros_like(x)
        for rows, piece in zip(self.lent, self.swap(pieces, counts, x), strict=True):
            result[:, :, rows] += piece
        return result

    def joined(self, fetched: Sequence[Tensor], fill: float, like: Tensor) -> Tensor:
        """The rows of all ranks as one tensor, with padding rows of `fill`, in the memory format of `like`."""
        above, below = (_empty_rows(like, rows).fill_(fill) for rows in (self.above, self.below))
        pieces = [piece for piece in (above, *fetched, below) if piece.shape[ROWS]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, ROWS)

    def swap(self, pieces: Sequence[Tensor], counts: Sequence[int], like: Tensor) -> list[Tensor]:
        """Send each rank its piece, and receive `counts` rows from each: [B, C, n, W] of each rank in their order. This
        rank's piece stays."""
        received, group = list(pieces), self.part.group
        operations: list[dist.P2POp] = []
        for rank in range(self.part.size):
            if rank == self.part.rank:
                continue
            if pieces[rank].shape[ROWS]:
                rows = pieces[rank].contiguous(memory_format=layout_of(like))
                operations.append(dist.P2POp(dist.isend, dense(rows), group=group, group_peer=rank))
            received[rank] = _empty_rows(like, counts[rank])
            if counts[rank]:
                operations.append(dist.P2POp(dist.irecv, dense(received[rank]), group=group, group_peer=rank))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received


def _empty_rows(like: Tensor, rows: int) -> Tensor:
    """Memory for `rows` rows [B, C, rows, W] in the memory format of `like`: torch.cat of two formats would give
    contiguous rows on the ranks that add some, and other rows on the ranks that do not."""
    shape = (*like.shape[:ROWS], rows, like.shape[-1])
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout_of(like))


class _WithHalo(torch.autograd.Function):
    """A convolution (with a weight) or max pooling. Between the passes it keeps this rank's rows, which other layers
    keep too, and its halo, not their copy side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: Any, halo: Halo) -> Tensor:
        fetched = halo.swap([x[:, :, rows] for rows in halo.lent], halo.taken, x)  # what this rank's output needs
        padding = (0, _pair(layer.padding)[1])
        if weight is None:
            rows = halo.joined(fetched, -torch.inf, x)
            options = layer.kernel_size, layer.stride, padding, layer.dilation
            output, kept = F.max_pool2d(rows, *options, return_indices=True)
        else:
            rows, options = halo.joined(fetched, 0.0, x), (layer.stride, padding, layer.dilation, layer.groups)
            output, kept = F.conv2d(rows, weight, bias, *options), weight
        ctx.save_for_backward(x, kept, *fetched)
        ctx.layer, ctx.halo, ctx.padding, ctx.bias = layer, halo, padding, None if bias is None else bias.shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (gradient,), (x, kept, *fetched) = gradients, ctx.saved_tensors
        layer, halo, rows = ctx.layer, ctx.halo, ctx.halo.joined(fetched, 0.0, x)
        of_weight = of_bias = None
        if isinstance(layer, nn.MaxPool2d):
            options = map(_pair, (layer.kernel_size, layer.stride, ctx.padding, layer.dilation))
            of_rows = aten.max_pool2d_with_indices_backward(gradient, rows, *options, False, kept)
        else:
            wanted = [ctx.needs_input_grad[0], True, ctx.bias is not None]  # images need none
            of_rows, of_weight, of_bias = aten.convolution_backward(
                gradient, rows, kept, ctx.bias, layer.stride, ctx.padding, layer.dilation, False, [0, 0],
                layer.groups, wanted,
            )  # fmt: skip
        return halo.give_back(of_rows, x) if ctx.needs_input_grad[0] else None, of_weight, of_bias, None, None


class _SyncBatchNorm(torch.autograd.Function):
    """BatchNorm (Ioffe & Szegedy 2015) over all parts. With z = (x - mean) / std over N pixels of a channel,

    y = w z + b,   d loss / dx = w / std (dy - sum(dy) / N - z sum(dy z) / N)
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, part: Part
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        variance, mean = torch.var_mean(x.float(), PIXELS, correction=0)
        here = torch.cat([mean, variance, mean.new_full((1,), x.numel() / len(mean))])
        gathered = here.new_empty(part.size * len(here))
        all_gather(gathered, here, group=part.group)
        means, variances, numbers = gathered.view(part.size, -1).split([len(mean), len(mean), 1], 1)
        number = numbers.sum()
        mean = (means * numbers).sum(0) / number
        variance = ((variances + (means - mean).square()) * numbers).sum(0) / number
        ctx.save_for_backward(x, weight, mean, variance, number)
        ctx.eps, ctx.part = eps, part
        ctx.mark_non_differentiable(mean, variance, number)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps), mean, variance, number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mean, variance, number = ctx.saved_tensors
        # As if the statistics were constants: w / std dy, sum(dy z), sum(dy).
        # CUDA's kernel for channels_last asserts that it is given the saved statistics, which it does not read here.
        deviation = (variance + ctx.eps).rsqrt()
        of_x, of_weight, of_bias = aten.native_batch_norm_backward(
            gradients[0], x, weight, mean, variance, mean, deviation, False, ctx.eps, [True] * 3
        )
        both = total(torch.stack([of_weight, of_bias]), ctx.part) / number
        slope = weight * deviation * both
        by_z, constant = (row[:, None, None] for row in slope)
        z = (x - mean[:, None, None]).mul_(deviation[:, None, None])
        return (of_x - z.mul_(by_z).add_(constant)).to(x.dtype), of_weight, of_bias, None, None
