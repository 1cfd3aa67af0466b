"""PipeDream: a pipeline that is never emptied within an epoch, at the price of gradients of older weights.

PipeDream (Narayanan et al. 2019) and PipeDream-2BW (Narayanan et al. 2021). Each rank holds one stage of p and takes
one micro batch forward, one backward in turn. Stage s (from 0) is p - 1 - s micro batches behind the last stage with
its backward passes, so minibatches stay in flight between two calls of `step`. The last stage has nothing in flight:
`step` returns there the loss of the minibatch it was called with, and no loss is left over for `flush`.

With t counting the minibatches of an epoch, W(t) the weights after t updates, f the loss, every update is
    pipedream:     W(t+1) = W(t) - lr(t) df/dW [W_s(t - n_s) on each stage s],  n_s = ceil((p - 1 - s) / micro batches)
    pipedream_2bw: W(t+1) = W(t) - lr(t) df/dW [W(t - 1) on all stages]
(no version before the epoch's first), where the forward and the backward pass of a minibatch see the same weights.

What each of p = 3 stages computes in each tick, with one micro batch in each minibatch and with a forward pass as long
as a backward pass. F3 is the forward pass of minibatch 3, B3 its backward pass. `pipedream` makes an update after each
B; once the pipeline is full, no stage waits.

    tick       0   1   2   3   4   5   6   7   8   9
    stage 0   F0  F1  F2   .   .  B0  F3  B1  F4  B2
    stage 1    .  F0  F1   .  B0  F2  B1  F3  B2  F4
    stage 2    .   .  F0  B0  F1  B1  F2  B2  F3  B3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddlbench.checkpoint.live import Live
from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.pipeline.blocks import Blocks
from ddlbench.frameworks.pipeline.flight import Flight
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.schedules import check_stages, micro_batch_count, pipeline_ranks
from ddlbench.frameworks.pipeline.stages import Plan, block_count, tied_names
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.frameworks.shared.meta import on_meta
from ddlbench.frameworks.shared.refusals import check_alike
from ddlbench.job import Batch, Job, Place


@dataclass
class PipeDream:
    """One pipeline over all ranks, or `dp` of them; conf/framework/pipedream.yaml says what each knob means."""

    name: str = "pipedream"
    double_buffered: bool = field(default=False, metadata={"defines": None})
    dp: int = 1
    pp: int | None = None
    balance: list[int] | None = None
    flops_per_byte: float = 1000.0

    def __post_init__(self) -> None:
        if min(self.dp, self.pp or 1) < 1:
            raise UserError(f"framework.dp={self.dp} and framework.pp={self.pp} must be 1 or more")
        if self.flops_per_byte < 0:
            raise UserError(f"framework.flops_per_byte={self.flops_per_byte:g} must be 0 or more")

    def check(self, job: Job) -> None:
        ranks = pipeline_ranks(job.world_size, self.dp, self.pp)
        self._micro_batches(job, ranks)
        check_stages(ranks, 1, block_count(job), self.balance)
        self._check_updates(job, ranks)
        check_alike(job, self.dp)

    def _micro_batches(self, job: Job, ranks: int) -> int:
        """Two versions of the weights suffice only if a minibatch fills the pipeline (Narayanan et al. 2021)."""
        return micro_batch_count(self.name, job, ranks, self.dp) if self.double_buffered else job.micro_batches(self.dp)

    def _check_updates(self, job: Job, ranks: int) -> None:
        """What does not go with stages that make the same update at different times."""
        if job.reduce_dtype != "fp32":
            raise Unsupported(
                f"{self.name}: gradients are averaged in fp32, not {job.reduce_dtype}: set train.reduce_dtype=fp32"
            )
        if job.compile:
            raise Unsupported(
                f"{self.name}: torch.compile would compile a stage again for each version of its weights: "
                "set train.compile=false"
            )
        if job.precision == "fp16":
            raise Unsupported(
                f"{self.name}: gradients in flight have several loss scales, and the last stage makes its update "
                "before the first stage can detect an overflow: use train.precision=bf16, or framework=1f1b"
            )
        if job.clip_norm is not None and ranks > 1:
            raise Unsupported(
                f"{self.name}: the norm of all gradients is known only {ranks - 1} micro batches after the last of "
                f"{ranks} stages has made its update: set train.clip_norm=null, or use framework=1f1b"
            )
        if ranks > 1 and not self.double_buffered and tied_names(on_meta(job)):
            raise Unsupported(
                f"{self.name}: the tied embedding would be {ranks - 1} updates older on the first stage than on the "
                "last: set model.tie_weights=false, or use framework=pipedream_2bw (the same staleness on all stages)"
            )

    def check_checkpoint(self, job: Job) -> None:
        """Nothing is refused: an epoch ends with an empty pipeline."""

    def setup(self, job: Job) -> PipeDreamTrainer:
        layout = Layout(self.dp, pp=pipeline_ranks(job.world_size, self.dp, self.pp))
        count = self._micro_batches(job, layout.pp)
        groups = Groups.connect(job, layout)
        samples = job.replica_batch(self.dp) // count
        plan = Plan.of(job, layout.pp, samples, self.balance, self.flops_per_byte)
        blocks = Blocks(job, groups, plan, sharded=False)
        apart = {id(parameter) for parameter in blocks.shared}
        shared = [name for name, parameter in blocks.model.named_parameters() if id(parameter) in apart]
        flight = Flight(job, groups, blocks.model, plan.between, count, wait=self.double_buffered, shared=shared)
        return PipeDreamTrainer(groups.place(), blocks, flight, self._facts(job, layout.pp, plan, count))

    def _facts(self, job: Job, ranks: int, plan: Plan, count: int) -> dict[str, Any]:
        behind = [-(-(ranks - 1 - stage) // count) for stage in range(ranks)]  # minibatches in flight
        return {
            "staleness_theoretical": [1] * ranks if self.double_buffered else behind,  # in updates, by stage
            "weight_versions": [number + 1 for number in behind],
            "schedule": "1f1b without flush",
            "pp": ranks,
            **plan.facts(),
            "micro_batches": count,
            "micro_batches_rule": self._rule(job),
            "bubble_theoretical": 0.0,  # but for filling and emptying it once an epoch
            "reduce_dtype": "fp32",
        }

    def _rule(self, job: Job) -> str:
        if job.micro_batch is not None:
            return "train.micro_batch"
        return "4 a rank" if self.double_buffered else "the whole minibatch"


class PipeDreamTrainer:
    """One rank's live stage: a `Trainer` (ddlbench/job.py)."""

    place: Place
    blocks: Blocks
    model: nn.Module
    flight: Flight
    optimizer: Optimizer
    knobs: Mapping[str, Any]  # the facts that are known before the first step

    def __init__(self, place: Place, blocks: Blocks, flight: Flight, knobs: Mapping[str, Any]) -> None:
        self.place, self.blocks, self.flight, self.knobs = place, blocks, flight, knobs
        self.model, self.optimizer = blocks.model, flight.updates.optimizer

    @property
    def updates(self) -> int:
        return self.flight.updates.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        self.blocks.statistics.mark_changed()
        return self.flight.step(batch)

    def flush(self) -> None:
        self.flight.drain()
        self.flight.clock.add_up()
        self.flight.updates.staleness.gather()

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        self._assert_empty()
        self.blocks.statistics.synchronize()
        return self.flight.evaluate(batch)

    def _assert_empty(self) -> None:
        assert not self.flight.micros, "flush first"

    def state(self) -> dict[str, Tensor] | None:
        self._assert_empty()
        return self.blocks.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._assert_empty()
        self.blocks.load(state)

    def live(self) -> Live:
        self._assert_empty()
        return Live(self.flight.updates.weights.newest, self.optimizer, dict(self.model.named_buffers()))

    def numbers(self) -> dict[str, Any]:
        return {**self.flight.updates.update.numbers(), "synchronised": self.blocks.statistics.synchronized}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        self.flight.updates.update.restore(numbers)
        self.blocks.statistics.synchronized = numbers["synchronised"]

    def facts(self) -> dict[str, Any]:
        counted = self.flight.updates.staleness.by_stage()
        return {**self.knobs, "staleness": counted, "bubble": self.flight.clock.bubble()}

    def close(self) -> None:
        vars(self).clear()
