"""A live pipeline of torch.distributed.pipelining: this rank's stages and the schedule that runs them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddlbench.checkpoint.live import Live
from ddlbench.frameworks.pipeline.blocks import Blocks, own_edges
from ddlbench.frameworks.pipeline.clock import BusyClock
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.schedules import LOOPED, SCHEDULES
from ddlbench.frameworks.pipeline.stages import Plan
from ddlbench.frameworks.shared.step import Update, autocast
from ddlbench.frameworks.tensor.collectives import share
from ddlbench.frameworks.tensor.loss import loss_of_parts, whole_logits
from ddlbench.job import Batch, Job, Place
from ddlbench.measure.profiling.spans import BACKWARD, COMMUNICATE, FORWARD, span, spanned


class PipelineTrainer:
    """One rank's live stages: a `Trainer` (ddlbench/job.py).

    model: this rank's blocks
    runner: torch's schedule
    losses: of the micro batches of the last step, on the last stage
    """

    job: Job
    groups: Groups
    place: Place
    blocks: Blocks
    model: nn.Module
    clock: BusyClock
    losses: list[Tensor]
    micro_batches: int  # in one update
    runner: Any
    parameters: Mapping[str, nn.Parameter]  # that the optimizer has: FSDP swaps the module's own for whole ones
    optimizer: Optimizer
    update: Update
    knobs: Mapping[str, Any]  # the facts that are known before the first step

    def __init__(
        self,
        job: Job,
        groups: Groups,
        plan: Plan,
        blocks: Blocks,
        schedule: str,
        micro_batches: int,
        knobs: Mapping[str, Any],
    ) -> None:
        self.job = replace(job, loss=loss_of_parts(job, groups.part, parallel=True))
        self.groups, self.blocks, self.model, self.knobs = groups, blocks, blocks.model, knobs
        self.place = groups.place()
        self.clock, self.losses = BusyClock(job.device), []
        self.micro_batches = micro_batches
        self.runner = self._runner(plan, schedule)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = job.optimizer(self.parameters.items())
        self.update = Update(self.optimizer, job, groups.norm_group)

    def _runner(self, plan: Plan, schedule: str) -> Any:
        """torch's schedule over this rank's stages. Shapes are given, so that it need not run the model to find out."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        edges, count = own_edges(plan, self.job, self.groups.part), len(plan.sizes)
        stages: list[PipelineStage] = []
        for index, stage in self.blocks.stages.items():
            if self.job.compile:
                stage.blocks.compile()
            before, after = edges[index : index + 2]
            runs = PipelineStage(stage, index, count, self.job.device, before, after, group=self.groups.pp_group)
            stages.append(self._timed(runs))
        make: Any = get_schedule_class(SCHEDULES[schedule])
        one_or_more = stages if schedule in LOOPED else stages[0]
        return make(one_or_more, self.micro_batches, loss_fn=self.clock.computing()(self._loss), scale_grads=False)

    def _timed(self, stage: Any) -> Any:
        """A PipelineStage whose passes count as computing, and whose backward passes have a span."""
        computing = self.clock.computing()
        stage.forward_one_chunk = computing(stage.forward_one_chunk)
        stage.backward_one_chunk = computing(spanned(BACKWARD, stage.backward_one_chunk))
        stage.backward_weight_one_chunk = computing(spanned(BACKWARD, stage.backward_weight_one_chunk))
        return stage

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The loss of one micro batch, as its share of the replica's."""
        with span(FORWARD), autocast(self.job):
            loss = self.job.loss(output, targets) / self.micro_batches
        self.losses.append(loss.detach())
        return self.update.scale(loss)

    @property
    def updates(self) -> int:
        return self.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        self.losses.clear()
        layout = self.groups.layout
        if layout.tp > 1:  # ranks that share layers draw the same, whatever a rank drew in between (its loader, say)
            torch.manual_seed(torch.initial_seed() + layout.dp * layout.pp)
        inputs, targets = self._ends_of(batch)
        with as_raised(), self.clock.schedule():
            self.runner.step(*inputs, target=targets, return_outputs=False)
        with span(COMMUNICATE):
            self.blocks.reduce()
        self.update.apply(self.model.parameters(), self.blocks.clip)
        return torch.stack(self.losses).sum() if batch is not None and self.losses else None

    def _ends_of(self, batch: Batch | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What torch's schedule takes: inputs on the first stage's ranks, targets on the last one's."""
        first, last = self.groups.first, self.groups.last
        if not (first or last):
            return (), None
        shared = share(batch, self.job, self.job.replica_batch(self.place.data_size), self.groups.part)
        return (shared.inputs,) if first else (), shared.targets if last else None

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        self.blocks.statistics.synchronize()
        inputs, targets = self._ends_of(batch)
        self.model.eval()
        with as_raised(), torch.no_grad():
            output = self.runner.eval(*inputs, target=targets)
        self.model.train()
        self.blocks.fold()
        if not self.groups.last:
            return None
        logits = whole_logits(output, self.job, self.groups.part)
        return logits if batch is not None else None

    def flush(self) -> None:
        """The schedules end with an empty pipeline: only its clock is read."""
        self.clock.add_up()

    def state(self) -> dict[str, Tensor] | None:
        return self.blocks.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.blocks.load(state)

    def live(self) -> Live:
        part = f"tensor{self.groups.part.rank}"  # names differ between stages
        return Live(self.parameters, self.optimizer, dict(self.model.named_buffers()), part)

    def numbers(self) -> dict[str, Any]:
        return {**self.update.numbers(), "synchronised": self.blocks.statistics.synchronized}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        self.update.restore(numbers)
        self.blocks.statistics.synchronized = numbers["synchronised"]

    def facts(self) -> dict[str, Any]:
        return {**self.knobs, "bubble": self.clock.bubble()}

    def close(self) -> None:
        vars(self).clear()


@contextmanager
def as_raised() -> Generator[None]:
    """torch wraps what a stage raises; the record must distinguish out of memory from other errors."""
    try:
        yield
    except RuntimeError as error:
        raise (error.__cause__ or error) from None
