"""Layers of which every rank computes a part. A model's `tensor_plan()` names them, `split_model` makes them in place.

    column     matrix split by output features: full input, this rank's features out (Shoeybi et al. 2019, section 3)
    qkv        column, for a matrix that makes queries, keys and values at once: each of the three is split
    row        matrix split by input features: this rank's features in, the sum over ranks out
    heads      transformers' GPT2Attention with this rank's heads
    vocab      embedding split by rows: the sum over ranks of what each has
    logits     column, for the last layer: as many classes as there are, evenly divided or not
    filter     convolution split by output channels: full input, this rank's channels out (ParaDL: Kahira et al. 2021)
    channel    convolution split by input channels: full input, the sum over ranks out (ParaDL)
    norm       BatchNorm of this rank's channels, all ranks' channels out
    channels   any block that ends with this rank's channels: all ranks' channels out
    dropout    of this rank's units
    token_dropout, positions   of this rank's tokens: they change with sequence parallelism only

Full activations are the same on every rank, and so are the gradients of parameters that are not split; with sequence
parallelism (Korthikanti et al. 2022) each rank has the gradient of its tokens, and these must be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddlbench.frameworks.tensor.collectives import (
    Part,
    copy_to,
    gather_from,
    gather_from_sequence,
    in_autocast_type,
    rank_random,
    reduce_from,
    reduce_scatter_to_sequence,
    scatter_to,
)
from ddlbench.measure.formulas.memory_formula import SPLIT

TOKENS = 1  # dimension of [B, T, E]
CHANNELS = 1  # dimension of [B, C, H, W]


@dataclass(frozen=True)
class Split:
    """A tensor cut over ranks along `dim`: every one of `pieces` equal pieces into slices, as Part.span says."""

    dim: int
    pieces: int = 1

    def of(self, full: Tensor, part: Part) -> Tensor:
        pieces = full.chunk(self.pieces, self.dim)
        return torch.cat([piece.narrow(self.dim, *part.span(piece.shape[self.dim])) for piece in pieces], self.dim)

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """The full tensor, of all ranks' slices."""
        pieces = zip(*(slice_.chunk(self.pieces, self.dim) for slice_ in slices), strict=True)
        return torch.cat([torch.cat(piece, self.dim) for piece in pieces], self.dim)


Splits = dict[str, Split]
Forward = Callable[[Tensor], Any]


def split_model(model: nn.Sequential, plan: Mapping[str, str], part: Part) -> Splits:
    """Turn a full model, or some of its blocks, into this rank's part, in place: tensors cut, forwards wrapped, names
    kept. Returns the splits of parameters and buffers by name; every rank has all of the others.

    The last layer gives this rank's classes: take `loss_of_parts`, or `gather_from` first.
    """
    if part.size == 1:
        return {}
    modules: dict[str, Any] = dict(model.named_modules())
    cut: dict[Tensor, Tensor] = {}  # a tied parameter is cut once and stays tied
    splits: Splits = {}
    for name, style in plan.items():
        if (module := modules.get(name)) is None or (style in OF_TOKENS and not part.sequence):
            continue
        for attribute, split in _splits(module, style).items():
            full: Tensor = getattr(module, attribute)
            if full not in cut:
                slice_ = split.of(full.detach(), part)
                cut[full] = nn.Parameter(slice_) if isinstance(full, nn.Parameter) else slice_
            setattr(module, attribute, cut[full])
            splits[f"{name}.{attribute}"] = split
        if style == "heads":  # what a layer keeps beside its tensors
            module.num_heads //= part.size
            module.split_size //= part.size
            module.dropped_after = module.resid_dropout.p
            if not part.sequence:
                module.resid_dropout = nn.Identity()
        elif is_transposed(module):
            module.nf = module.weight.shape[1]
        module.forward = partial(STYLES[style], module, module.forward, part)
    return splits


def _splits(module: nn.Module, style: str) -> Splits:
    """How the style cuts the module's tensors, without those of its submodules."""
    transposed = is_transposed(module)
    features = {"row": int(not transposed), "channel": 1} | dict.fromkeys(("column", "qkv", "logits"), int(transposed))
    names = (*SPLIT.get(style, ()), *(("running_mean", "running_var") if style == "norm" else ()))
    pieces = 3 if style == "qkv" else 1
    splits = {name: Split(features.get(style, 0) if name == "weight" else 0, pieces) for name in names}
    return {name: split for name, split in splits.items() if isinstance(getattr(module, name, None), Tensor)}


def is_transposed(module: nn.Module) -> bool:
    """Whether a matrix is [in, out], as in transformers' Conv1D, and not [out, in]."""
    return hasattr(module, "nf")


# The forward pass of each style. module: with this rank's tensors; inner: its own forward pass


def leave(partial_sum: Tensor, part: Part) -> Tensor:
    """The output of a layer split by inputs."""
    return reduce_scatter_to_sequence(partial_sum, TOKENS, part) if part.sequence else reduce_from(partial_sum, part)


def column(module: Any, inner: Forward, part: Part, x: Tensor) -> Tensor:
    x = in_autocast_type(x)
    return inner(gather_from_sequence(x, TOKENS, part) if part.sequence else copy_to(x, part))


def row(module: Any, inner: Forward, part: Part, x: Tensor) -> Tensor:
    """The bias is added once, after the sum."""
    output = leave(x @ module.weight if is_transposed(module) else F.linear(x, module.weight), part)
    return output + module.bias.to(output.dtype)


def heads(module: Any, inner: Forward, part: Part, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Each rank drops attention weights of its heads. The dropout after the attention sees full activations, of which
    all ranks must drop the same elements; with sequence parallelism it sees this rank's tokens."""
    drops = module.training and max(module.attn_dropout.p, module.dropped_after) > 0
    with rank_random(part, x.device) if drops else nullcontext():
        output, weights = inner(x)
    return output if part.sequence else F.dropout(output, module.dropped_after, module.training), weights


def vocab(module: Any, inner: Forward, part: Part, tokens: Tensor) -> Tensor:
    first, count = part.span(module.num_embeddings)
    rows = tokens - first
    elsewhere = (rows < 0) | (rows >= count)
    embedded = F.embedding(rows.masked_fill(elsewhere, 0), module.weight)
    return leave(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0), part)


def channel(module: Any, inner: Forward, part: Part, x: Tensor) -> Tensor:
    """The bias is added once, after the sum."""
    output = leave(module._conv_forward(scatter_to(in_autocast_type(x), CHANNELS, part), module.weight, None), part)
    return output if module.bias is None else output + module.bias.to(output.dtype)[:, None, None]


def channels(module: Any, inner: Forward, part: Part, x: Tensor) -> Tensor:
    output = inner(x)
    return gather_from(output, CHANNELS, output.shape[CHANNELS] * part.size, part)


def dropout(module: Any, inner: Forward, part: Part, x: Tensor) -> Tensor:
    with rank_random(part, x.device) if module.training and module.p > 0 else nullcontext():
        return inner(x)


def positions(module: Any, inner: Forward, part: Part, indices: Tensor) -> Tensor:
    return inner(indices.narrow(-1, *part.span(indices.shape[-1])))


STYLES: dict[str, Callable[[Any, Forward, Part, Tensor], Any]] = {
    "column": column,
    "qkv": column,
    "logits": column,
    "row": row,
    "heads": heads,
    "vocab": vocab,
    "filter": column,
    "channel": channel,
    "norm": channels,
    "channels": channels,
    "dropout": dropout,
    "token_dropout": dropout,
    "positions": positions,
}
OF_TOKENS = ("token_dropout", "positions")  # change nothing without sequence parallelism


def splits_output(block: str, plan: Mapping[str, str]) -> bool:
    """Whether what leaves a named block is this rank's slice of the features, the last dimension."""
    styles = [style for name, style in plan.items() if name.split(".")[0] == block and "dropout" not in style]
    return bool(styles) and styles[-1] in ("column", "logits")


def full_state(state: Mapping[str, Tensor], splits: Splits, part: Part) -> dict[str, Tensor] | None:
    """The full model's state on the first of the ranks that share it, None on the others; called on all of them."""
    if part.size == 1:
        return dict(state)
    parts: list[Any] | None = [None] * part.size if part.rank == 0 else None
    dist.gather_object(state, parts, group=part.group, group_dst=0)
    if parts is None:
        return None
    return {
        name: splits[name].join([of_rank[name] for of_rank in parts]) if name in splits else tensor
        for name, tensor in parts[0].items()
    }


def local_state(state: Mapping[str, Tensor], splits: Splits, part: Part) -> dict[str, Tensor]:
    """This rank's part of the full model's state."""
    return {name: splits[name].of(tensor, part) if name in splits else tensor for name, tensor in state.items()}
