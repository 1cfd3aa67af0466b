"""Pipelines of torch.distributed.pipelining: each rank holds some of the blocks, micro batches flow through all.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, with a flush), interleaved 1F1B (Narayanan et al. 2021), zero
bubble (Qi et al. 2023, ZB-1P), breadth-first (Lamy-Poirier 2023), ZBV (Qi et al. 2023, ZB-V) and DualPipeV (DeepSeek-AI
2024, Qi et al. 2025). With framework.dp > 1 there are several such pipelines: each stage averages its
gradients over its copies once, after the schedule has run. With framework.tp > 1 several ranks share the layers of each
stage: all together the hybrid of Narayanan et al. 2021 (docs/adr/0010).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.errors import check_values, refuse
from ddlbench.frameworks.pipeline.rank import Blocks, Groups, StagedTrainer
from ddlbench.frameworks.pipeline.schedules import (
    LOOPED,
    SCHEDULES,
    STAGES_OF_A_RANK,
    V_SHAPED,
    bubble,
    check_split_backward,
    check_stages,
    in_flight,
    micro_batch_count,
)
from ddlbench.frameworks.pipeline.stages import Staged, tied_names
from ddlbench.frameworks.shared.groups import average, clip_parts, gradient
from ddlbench.frameworks.shared.layout import Layout, fill
from ddlbench.frameworks.shared.refusals import check_alike, check_shards
from ddlbench.frameworks.shared.replica import Update, autocast, micro_batches
from ddlbench.frameworks.tensor.adapter import NO_COMPILE, check_parts
from ddlbench.frameworks.tensor.collectives import full_logits, loss_of_parts, score_complete, share
from ddlbench.job import Batch, Job, Score, on_meta
from ddlbench.measure.profiling.spans import BACKWARD, COMMUNICATE, FORWARD, span, spanned


@dataclass
class Pipeline(Staged):
    """One pipeline over all ranks, or `dp` of them; conf/framework/gpipe.yaml says what each knob means."""

    name: str = "gpipe"
    schedule: str = field(default="gpipe", metadata={"defines": "hybrid"})
    tp: int = 1
    sharded: bool = False
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        looped = self.schedule in LOOPED
        stages = 2 if self.schedule in ("looped_bfs", *V_SHAPED) else 1  # looped_bfs with one is gpipe
        others = "" if looped else f", or choose framework.schedule={' or '.join(LOOPED)}"
        valid = f"{stages}{' or more' * looped} with framework.schedule={self.schedule}{others}"
        fits = self.virtual_stages >= stages if looped else self.virtual_stages == stages
        check_values("framework.", self, least={"tp": 1, "virtual_stages": 1}, choices={"schedule": SCHEDULES})
        check_values("framework.", self, rules={"virtual_stages": (fits, valid)})

    def layout(self, world_size: int) -> Layout:
        shared = {"tp": self.tp} if self.tp > 1 else {}
        return Layout(**fill(world_size, dp=self.dp, **shared, pp=self.pp))

    def check(self, job: Job) -> None:
        layout = self.layout(job.world_size)
        ranks, sharded = layout.pp, self.sharded and layout.dp > 1
        count = micro_batch_count(self.schedule, job, ranks, layout.dp)
        check_stages(ranks, self.virtual_stages, len(on_meta(job)), self.balance)
        reasons = {
            f"gradients are averaged in fp32, not {job.reduce_dtype}: set train.reduce_dtype=fp32":
                job.reduce_dtype != "fp32",
            f"{self.schedule} needs 2 ranks or more in a pipeline: use framework=gpipe":
                ranks == 1 and self.schedule in STAGES_OF_A_RANK,
            "shards cannot hold a weight that is tied between two stages of one rank: "
            "set framework.sharded=false or model.tie_weights=false":
                sharded and self.schedule in V_SHAPED and bool(tied_names(on_meta(job))),
        }  # fmt: skip
        refuse(self.name, reasons)
        check_split_backward(self.schedule, job)
        if self.tp > 1:
            check_parts(self.name, job, self.tp, ranks)
            refuse(self.name, {NO_COMPILE: job.compile})
        if sharded:
            check_shards(self.name, job)
        check_alike(job, layout.dp, stages=True)
        self.check_budget(job, layout, count)

    def in_flight(self, layout: Layout, count: int) -> list[int]:
        virtual = self.virtual_stages
        return virtual * [in_flight(self.schedule, rank, layout.pp, count, virtual) for rank in range(layout.pp)]

    def setup(self, job: Job) -> PipelineTrainer:
        layout = self.layout(job.world_size)
        count = micro_batch_count(self.schedule, job, layout.pp, layout.dp)
        groups = Groups(job, layout, self.sharded, self.schedule in V_SHAPED)
        groups.open_links(job.device, looped=self.virtual_stages > 1 and not groups.v_shaped)
        plan = self.plan(job, layout, count)
        blocks = Blocks(job, groups, plan, self.sharded)
        facts = {
            "schedule": self.schedule,
            **asdict(layout),
            "shards": layout.dp if self.sharded else 1,
            "virtual_stages": self.virtual_stages,
            **plan.facts(),
            "micro_batches": count,
            "micro_batches_rule": "4 a rank" if job.micro_batch is None else "train.micro_batch",
            "bubble_theoretical": bubble(self.schedule, count, layout.pp, self.virtual_stages),
            "reduce_dtype": "fp32",
        }
        return PipelineTrainer(job, blocks, self.schedule, count, facts)


class PipelineTrainer(StagedTrainer):
    """One rank's live stages: a `Trainer` (ddlbench/job.py).

    stages, schedule: torch's, of this rank and over them
    losses: of the micro batches of the last step, on the last stage
    """

    def __init__(self, job: Job, blocks: Blocks, schedule: str, micro_batches: int, facts: dict[str, Any]) -> None:
        groups = blocks.groups
        job = replace(job, loss=loss_of_parts(job, groups.part, parallel=True))
        named = dict(blocks.model.named_parameters())
        # The norm for clipping counts each number once: tied parameters on the first stage, unsplit ones on part 0.
        elsewhere = set[int]() if groups.first else {id(parameter) for parameter in blocks.shared}
        counted = [
            parameter
            for name, parameter in named.items()
            if id(parameter) not in elsewhere and (name in blocks.splits or groups.part.rank == 0)
        ]
        clip = partial(clip_parts, counted=counted, group=groups.norm_group)
        update = Update(job.optimizer(named.items()), job, groups.norm_group, clip)
        part = f"tensor{groups.part.rank}"  # names differ between stages
        super().__init__(job, blocks, update, micro_batches, facts, part)
        self.losses = list[Tensor]()
        self.score: Callable[[Tensor], None] | None = None  # outputs, during an evaluation

        from torch.distributed.pipelining import PipelineStage  # half a second to import
        from torch.distributed.pipelining.schedules import get_schedule_class

        edges, count, group = blocks.edges(job), len(blocks.plan.sizes), groups.pp_group
        self.stages = stages = list[Any]()
        for index, module in blocks.stages.items():
            if job.compile:
                module.blocks.compile()
            before, after = edges[index : index + 2]  # without them torch would run the model to find the shapes
            stages.append(self._timed(PipelineStage(module, index, count, job.device, before, after, group=group)))
        schedule_class: Any = get_schedule_class(SCHEDULES[schedule])
        one_or_more = stages if schedule in STAGES_OF_A_RANK else stages[0]
        loss = self.clock.computing()(self._loss)
        self.schedule = schedule_class(one_or_more, micro_batches, loss_fn=loss, scale_grads=False)

    def _timed(self, stage: Any) -> Any:
        """A stage of torch's whose passes count as computing, and whose backward passes have a span."""
        computing, forward = self.clock.computing(), stage.forward_one_chunk

        def forward_one_chunk(*args: Any, **options: Any) -> Any:
            """Evaluations keep all outputs until the next step; those of the last stage are logits, which it sends to
            no other stage."""
            if stage.is_last and not stage.has_backward:
                stage.fwd_cache.clear()
            return forward(*args, **options)

        stage.forward_one_chunk = computing(forward_one_chunk)
        stage.backward_one_chunk = computing(spanned(BACKWARD, stage.backward_one_chunk))
        stage.backward_weight_one_chunk = computing(spanned(BACKWARD, stage.backward_weight_one_chunk))
        # Between two stages of one rank torch 2.14 asks for the gradient in an evaluation too, and raises that there is
        # none.
        get, put = stage.get_local_bwd_output, stage.set_local_bwd_input
        stage.get_local_bwd_output = lambda micro: get(micro) if stage.has_backward else ()
        stage.set_local_bwd_input = lambda gradients, micro: put(gradients, micro) if stage.has_backward else None
        return stage

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """A micro batch's share of the replica's loss. torch's schedules ask for it in evaluations, too, in the order
        of the micro batches."""
        if self.score is not None:
            self.score(output)
            return torch.zeros((), device=output.device)
        with span(FORWARD), autocast(self.job):
            loss = self.job.loss(output, targets) / self.micro_batches
        self.losses.append(loss.detach())
        return self.update.scaler.scale(loss)

    def step(self, batch: Batch | None) -> Tensor | None:
        self.losses.clear()
        layout = self.groups.layout
        if layout.tp > 1:  # ranks that share layers draw the same, also if one has drawn in between (its loader)
            torch.manual_seed(torch.initial_seed() + layout.dp * layout.pp)
        inputs, targets = self._ends_of(batch)
        with as_raised(), self.clock.schedule():
            self.schedule.step(*inputs, target=targets, return_outputs=False)
        with span(COMMUNICATE):
            if self.dp_group is not None and not self.blocks.sharded:  # torch's schedule has averaged sharded gradients
                average([gradient(parameter) for parameter in self.model.parameters()], self.dp_group)
            for parameter in self.blocks.shared:  # two numbers add up to the same on both ends: copies stay equal
                dist.all_reduce(gradient(parameter), group=self.groups.embedding_group)
        self.update.apply(self.model.parameters())
        self.synchronized = False
        return torch.stack(self.losses).sum() if batch is not None and self.losses else None

    def _ends_of(self, batch: Batch | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What torch's schedule takes: inputs on the first stage's ranks, targets on the last one's."""
        first, last = self.groups.first, self.groups.last
        if not (first or last):
            return (), None
        shared = share(batch, self.job, self.job.replica_batch(self.place.data_size), self.groups.part)
        return (shared.inputs,) if first else (), shared.targets if last else None

    def evaluate(self, batch: Batch | None, score: Score) -> None:
        self.synchronize()
        inputs, targets = self._ends_of(batch)
        micros = repeat(None) if batch is None else micro_batches(batch, self.micro_batches)
        part = self.groups.part
        complete = partial(full_logits, job=self.job, part=part)
        self.score = lambda output: score_complete(output, next(micros), score, complete, part)
        self.model.eval()
        with as_raised(), torch.no_grad():
            self.schedule.eval(*inputs, target=targets, return_outputs=False)
        self.model.train()
        for stage in self.stages:
            stage.clear_runtime_states()
        self.score = None  # which keeps the batch

    def flush(self) -> None:
        """The schedules end with an empty pipeline: only its clock is read."""
        self.clock.add_up()


@contextmanager
def as_raised() -> Generator[None]:
    """torch wraps what a stage raises; the record must distinguish out of memory from other errors."""
    try:
        yield
    except RuntimeError as error:
        raise (error.__cause__ or error) from None
