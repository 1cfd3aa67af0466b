"""A live pipeline of torch.distributed.pipelining: this rank's stages and the schedule that runs them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddlbench.frameworks.pipeline.blocks import Blocks, StagedTrainer
from ddlbench.frameworks.pipeline.schedules import SCHEDULES, STAGES_OF_A_RANK
from ddlbench.frameworks.shared.step import Update, autocast
from ddlbench.frameworks.tensor.collectives import share
from ddlbench.frameworks.tensor.loss import full_logits, loss_of_parts
from ddlbench.job import Batch, Job
from ddlbench.measure.profiling.spans import BACKWARD, COMMUNICATE, FORWARD, span, spanned


class PipelineTrainer(StagedTrainer):
    """One rank's live stages: a `Trainer` (ddlbench/job.py).

    schedule: torch's, over this rank's stages
    losses: of the micro batches of the last step, on the last stage
    """

    def __init__(self, job: Job, blocks: Blocks, schedule: str, micro_batches: int, facts: Mapping[str, Any]) -> None:
        groups = blocks.groups
        job = replace(job, loss=loss_of_parts(job, groups.part, parallel=True))
        update = Update(job.optimizer(blocks.model.named_parameters()), job, groups.norm_group, blocks.clip)
        part = f"tensor{groups.part.rank}"  # names differ between stages
        super().__init__(job, blocks, update, micro_batches, facts, part)
        self.losses = list[Tensor]()

        from torch.distributed.pipelining import PipelineStage  # half a second to import
        from torch.distributed.pipelining.schedules import get_schedule_class

        edges, count, group = blocks.edges(job), len(blocks.plan.sizes), groups.pp_group
        stages: list[Any] = []
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
        computing = self.clock.computing()
        stage.forward_one_chunk = computing(stage.forward_one_chunk)
        stage.backward_one_chunk = computing(spanned(BACKWARD, stage.backward_one_chunk))
        stage.backward_weight_one_chunk = computing(spanned(BACKWARD, stage.backward_weight_one_chunk))
        only_in_training(stage)
        return stage

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The loss of one micro batch, as its share of the replica's. torch's schedules ask for it in evaluations too,
        which need none."""
        if not torch.is_grad_enabled():
            return torch.zeros((), device=output.device)
        with span(FORWARD), autocast(self.job):
            loss = self.job.loss(output, targets) / self.micro_batches
        self.losses.append(loss.detach())
        return self.update.scale(loss)

    def step(self, batch: Batch | None) -> Tensor | None:
        self.losses.clear()
        layout = self.groups.layout
        if layout.tp > 1:  # ranks that share layers draw the same, also if one has drawn in between (its loader)
            torch.manual_seed(torch.initial_seed() + layout.dp * layout.pp)
        inputs, targets = self._ends_of(batch)
        with as_raised(), self.clock.schedule():
            self.schedule.step(*inputs, target=targets, return_outputs=False)
        with span(COMMUNICATE):
            self.blocks.reduce()
        self.update.apply(self.model.parameters())
        return torch.stack(self.losses).sum() if batch is not None and self.losses else None

    def _ends_of(self, batch: Batch | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What torch's schedule takes: inputs on the first stage's ranks, targets on the last one's."""
        first, last = self.groups.first, self.groups.last
        if not (first or last):
            return (), None
        shared = share(batch, self.job, self.job.replica_batch(self.place.data_size), self.groups.part)
        return (shared.inputs,) if first else (), shared.targets if last else None

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        self.statistics.synchronize()
        inputs, targets = self._ends_of(batch)
        self.model.eval()
        with as_raised(), torch.no_grad():
            output = self.schedule.eval(*inputs, target=targets)
        self.model.train()
        if not self.groups.last:
            return None
        logits = full_logits(output, self.job, self.groups.part)
        return logits if batch is not None else None

    def flush(self) -> None:
        """The schedules end with an empty pipeline: only its clock is read."""
        self.clock.add_up()


def only_in_training(stage: Any) -> None:
    """Between two stages of one rank torch 2.14 asks for the gradient in an evaluation too, and raises that there is
    none."""
    get, put = stage.get_local_bwd_output, stage.set_local_bwd_input
    stage.get_local_bwd_output = lambda micro: get(micro) if stage.has_backward else ()
    stage.set_local_bwd_input = lambda gradients, micro: put(gradients, micro) if stage.has_backward else None


@contextmanager
def as_raised() -> Generator[None]:
    """torch wraps what a stage raises; the record must distinguish out of memory from other errors."""
    try:
        yield
    except RuntimeError as error:
        raise (error.__cause__ or error) from None
