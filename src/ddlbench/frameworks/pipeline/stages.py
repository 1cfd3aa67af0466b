"""How a sequence of blocks is cut into pipeline stages, and what one stage is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddlbench.checkpoint import OFF
from ddlbench.data.feed import Request
from ddlbench.data.loaders.synthetic import random_batch
from ddlbench.errors import Unsupported, added, check_values, refuse
from ddlbench.frameworks.shared.checkpointing import blocks_plan, keep_costly_outputs_of, segment_facts, selective_names
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.frameworks.shared.replica import autocast
from ddlbench.job import Job, Place, example_batch, on_meta
from ddlbench.measure.block_seconds import block_seconds
from ddlbench.measure.formulas.flops import forward_flops_per_block
from ddlbench.measure.profiling.spans import FORWARD, span
from ddlbench.ranks.control import from_rank_0
from ddlbench.ranks.launch import is_fake
from ddlbench.recomputation import KEY, SELECTIVE, budgeted, named, plan_of, repeats


@cache
def balanced(costs: tuple[float, ...], stages: int, sending: tuple[float, ...] = ()) -> tuple[int, ...]:
    """Blocks in each of `stages` contiguous stages such that the slowest stage is as fast as it can be.

    A stage is as slow as the slower one of its computing and its sending, because they overlap (Narayanan et al.
    2019, section 3.1). costs: of computing each block; sending: of sending each block's output, empty: costs nothing.
    An exact dynamic program over the last cut. If several divisions are equally good, it takes the one with the fewest
    blocks in the first stages.
    """
    assert 1 <= stages <= len(costs)
    prefix = [0.0, *accumulate(costs)]
    sending = sending or (0.0,) * len(costs)

    @cache
    def best(blocks: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The best division of the first `blocks` blocks: cost of the slowest stage, sizes of the stages."""
        if stages == 1:
            return prefix[blocks], (blocks,)
        options: list[tuple[float, tuple[int, ...]]] = []
        for cut in range(stages - 1, blocks):
            slowest, sizes = best(cut, stages - 1)
            options.append((max(slowest, sending[cut - 1], prefix[blocks] - prefix[cut]), (*sizes, blocks - cut)))
        return min(options)

    return best(len(costs), stages)[1]


BALANCES = ("flops", "seconds")


@dataclass(kw_only=True)
class Staged:
    """The keys of every pipeline: its replicas, its stages, and how the blocks are divided among them
    (conf/framework/gpipe.yaml says what each means)."""

    dp: int | None = 1
    pp: int | None = None
    balance: list[int] | None = None
    balance_by: str = added("flops")
    flops_per_byte: float = 1000.0

    def __post_init__(self) -> None:
        least = {"dp": 1, "pp": 1, "flops_per_byte": 0}
        check_values("framework.", self, least=least, choices={"balance_by": BALANCES})

    @property
    def by_seconds(self) -> bool:
        return self.balance is None and self.balance_by == "seconds"

    def sizes(
        self, stages: int, flops: Sequence[float], sent: Sequence[float], seconds: Sequence[float] | None
    ) -> list[int]:
        """The number of blocks of each stage.

        flops, sent: of each block for one sample, forward, and bytes of its output
        seconds: of each block, forward and backward, where `by_seconds`: the model's FLOPs are divided in proportion
        """
        if self.balance is not None:
            return self.balance
        costs = flops if seconds is None else [sum(flops) / sum(seconds) * block_s for block_s in seconds]
        return [*balanced(tuple(costs), stages, tuple(self.flops_per_byte * bytes_ for bytes_ in sent))]

    def in_flight(self, layout: Layout, count: int) -> list[int]:
        """Micro batches in memory on the rank of each stage, of `count` in an update."""
        raise NotImplementedError

    def plan(self, job: Job, layout: Layout, count: int) -> Plan:
        return Plan(job, self.in_flight(layout, count), job.replica_batch(layout.dp) // count, self)

    def check_budget(self, job: Job, layout: Layout, count: int) -> None:
        """Raise Unsupported for a budget of activations that a stage exceeds, or whose stages are not known yet."""
        if budgeted(job.checkpoint_activations):
            reason = f"{KEY}={job.checkpoint_activations} needs stages that are known before: set framework.balance"
            refuse("framework.balance_by=seconds", {reason: self.by_seconds})
            self.plan(job, layout, count)

    def check_checkpoint(self, _: Job) -> None:
        """Raise Unsupported if a run that continues could have other blocks on a rank than the run that saved them."""
        reason = "another measurement may divide the blocks in another way: set framework.balance, or {}"
        refuse("framework.balance_by=seconds", {reason.format(OFF): self.by_seconds})


def cut(model: nn.Sequential, sizes: Sequence[int]) -> list[nn.Sequential]:
    """The stages' blocks by their names in the full model, so that a stage's state is a part of the model's."""
    named = list(model.named_children())
    return [nn.Sequential(OrderedDict(named[start:end])) for start, end in pairwise([0, *accumulate(sizes)])]


class Plan:
    """Which blocks make a stage, and what passes between stages: the same on every rank.

    sizes, costs: blocks and FLOPs of each stage
    balanced_by: balance (given by hand) | flops | seconds
    seconds: measured, of each block, where it is balanced by them
    segments: the blocks of each stage, those that run again in lists
    selective: the blocks of all stages that keep their costly outputs only
    edges: what goes into the first stage, from each to the next, and out of the last
    between: what one stage sends to the next
    """

    def __init__(self, job: Job, in_flight: Sequence[int], samples: int, given: Staged) -> None:
        """in_flight: micro batches in memory on the rank of each stage; samples: of a micro batch. Collective where the
        blocks are measured."""
        flops = list(forward_flops_per_block(job.model).values())
        tensors = boundary_tensors(job, samples)
        sent = [tensor.nbytes / samples for tensor in tensors[1:]]
        self.balanced_by = given.balance_by if given.balance is None else "balance"
        self.seconds = seconds_of_blocks(job, samples) if given.by_seconds else None
        self.sizes = given.sizes(len(in_flight), flops, sent, self.seconds)
        ends = [0, *accumulate(self.sizes)]
        spans = list(pairwise(ends))
        self.costs = [sum(flops[first:end]) for first, end in spans]
        self.edges = [tensors[end] for end in ends]
        self.between = self.edges[1:-1]
        plans = [blocks_plan(job, samples, *span, number) for span, number in zip(spans, in_flight, strict=True)]
        self.segments = [named(plan, names) for names, plan in plans]
        self.selective = selective_names(on_meta(job)) if job.checkpoint_activations == SELECTIVE else []

    def facts(self) -> dict[str, Any]:
        return {
            "blocks_per_stage": self.sizes,
            **segment_facts([item for segments in self.segments for item in segments]),
            **({"selective": self.selective} if self.selective else {}),
            "balanced_by": self.balanced_by,
            "block_seconds": self.seconds,
            "flops_largest_over_mean_stage": max(self.costs) * len(self.costs) / sum(self.costs),
            "activation_dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in self.between],
            "activation_bytes": [tensor.nbytes for tensor in self.between],
        }


def seconds_of_blocks(job: Job, samples: int) -> list[float]:
    """Seconds of each block for a micro batch of `samples`, with recomputation and without torch.compile: measured
    before training (Narayanan et al. 2019, 3.1) on rank 0's device while the others wait, the same on every rank.
    Blocks have all their layers, also where ranks will share them. Collective. Unsupported in a rehearsal."""
    if is_fake():
        raise Unsupported(
            "framework.balance_by=seconds: a rehearsal computes nothing that could be measured: set framework.balance "
            "to the blocks_per_stage of a run, or framework.balance_by=flops"
        )
    if job.rank > 0:
        return from_rank_0(None)
    model = replace(job, device=torch.device("cpu")).build()
    request = Request(job.model, Place(0, 1), job.device, job.seed, samples, channels_last=job.channels_last)
    prepare = [keep_costly_outputs_of] if job.checkpoint_activations == SELECTIVE else []
    passes = block_seconds(model, random_batch(request, samples), job.loss, job.precision, *prepare)
    if job.device.type == "cuda":
        torch.cuda.empty_cache()  # rank 0 trains with as much reserved memory as the others
    again = repeats(plan_of(job.checkpoint_activations, [name for name, _ in model.named_children()], list))
    return from_rank_0(
        [forward * (1 + times) + backward for (forward, backward), times in zip(passes, again, strict=True)]
    )


class Stage(nn.Module):
    """Consecutive blocks as one module. [B, ...] -> [B, ...].

    Autocast is entered for each micro batch, as everywhere. The output is contiguous, because nothing else can be
    sent, and has the type that the last block gives: under bf16 the residual stream of GPT-2 stays fp32, as it does
    within one process.
    """

    def __init__(self, blocks: nn.Sequential, job: Job) -> None:
        super().__init__()
        self.blocks = blocks
        self.job = job

    def forward(self, value: Tensor) -> Tensor:
        if self.job.channels_last and value.dim() == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        with span(FORWARD), autocast(self.job):
            return self.blocks(value).contiguous()


def boundary_tensors(job: Job, samples: int) -> list[Tensor]:
    """What goes into the first block, from each block to the next, and out of the last, for a micro batch of `samples`:
    tensors without data that have the shape and the type. Fake tensors: nothing is computed."""
    with FakeTensorMode(), torch.no_grad(), job.device:
        model = job.model.build().eval()
        values = [example_batch(job.model, samples).inputs]
        for block in model.children():
            values.append(Stage(nn.Sequential(block), job)(values[-1]))
    return [
        torch.empty(tuple(value.shape), dtype=value.dtype, device="meta", requires_grad=index > 0)
        for index, value in enumerate(values)
    ]


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same: GPT-2's token embedding and its head."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
