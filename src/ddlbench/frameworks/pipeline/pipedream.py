"""PipeDream: a pipeline that is never emptied within an epoch, at the price of gradients of older weights.

PipeDream (Narayanan et al. 2019) and PipeDream-2BW (Narayanan et al. 2021). Each rank holds one stage of p and takes
one micro batch forward, one backward in turn. Stage s (from 0) is p - 1 - s micro batches behind the last stage with
its backward passes, so minibatches stay in flight between two calls of `step`. The last stage has nothing in flight:
`step` returns there the loss of the minibatch it was called with, and no loss is left over for `flush`.

With t counting the minibatches of an epoch, W(t) the weights after t updates, f the loss, every update is
    pipedream:     W(t+1) = W(t) - lr(t) df/dW [W_s(t - n_s) on each stage s],  n_s = ceil((p - 1 - s) / micro batches)
    pipedream_2bw: W(t+1) = W(t) - lr(t) df/dW [W(t - 1) on all stages]
(no version before the epoch's first), where the forward and the backward pass of a minibatch see the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.pipeline.blocks import Blocks
from ddlbench.frameworks.pipeline.flight import Flight
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.schedules import check_stages, micro_batch_count, pipeline_ranks
from ddlbench.frameworks.pipeline.stages import Plan, block_count, tied_names
from ddlbench.frameworks.shared.common import (
    check_alike,
    drop,
    on_meta,
)
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
                f"{self.name}: a compiled stage would be compiled anew for each version of its weights: "
                "set train.compile=false"
            )
        if job.precision == "fp16":
            raise Unsupported(
                f"{self.name}: gradients in flight have several loss scales, and the last stage makes its update "
                "before the first knows of an overflow: use train.precision=bf16, or framework=1f1b"
            )
        if job.clip_norm is not None and ranks > 1:
            raise Unsupported(
                f"{self.name}: the norm of the whole gradient is known {ranks - 1} micro batches after the last of "
                f"{ranks} stages has made its update: set train.clip_norm=null, or use framework=1f1b"
            )
        if ranks > 1 and not self.double_buffered and tied_names(on_meta(job)):
            raise Unsupported(
                f"{self.name}: the tied embedding would be {ranks - 1} updates older on the first stage than on the "
                "last: set model.tie_weights=false, or use framework=pipedream_2bw (the same staleness everywhere)"
            )

    def setup(self, job: Job) -> Place:
        self.job = job
        self.ranks = pipeline_ranks(job.world_size, self.dp, self.pp)
        self.count = self._micro_batches(job, self.ranks)
        self.groups = Groups.connect(job, self.dp, self.ranks)
        self.bubble: float | None = None
        samples = job.replica_batch(self.dp) // self.count
        self.plan = Plan.of(job, self.ranks, samples, self.balance, self.flops_per_byte)
        self.blocks = Blocks(job, self.groups, self.plan, sharded=False)
        self.model = self.blocks.model
        apart = {id(parameter) for parameter in self.blocks.shared}
        shared = [name for name, parameter in self.model.named_parameters() if id(parameter) in apart]
        self.flight = Flight(
            job, self.groups, self.model, self.plan.between, self.count, wait=self.double_buffered, shared=shared
        )
        return self.groups.place()

    @property
    def optimizer(self) -> Optimizer:
        return self.flight.optimizer

    @property
    def updates(self) -> int:
        return self.flight.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        self.blocks.statistics.moved()
        return self.flight.step(batch)

    def flush(self) -> None:
        self.flight.drain()
        self.bubble = self.flight.clock.bubble()

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        self._assert_empty()
        self.blocks.statistics.settle()
        return self.flight.evaluate(batch)

    def _assert_empty(self) -> None:
        assert not self.flight.micros, "flush first"

    def state(self) -> dict[str, Tensor] | None:
        self._assert_empty()
        return self.blocks.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._assert_empty()
        self.blocks.load(state)

    def facts(self) -> dict[str, Any]:
        behind = [-(-(self.ranks - 1 - stage) // self.count) for stage in range(self.ranks)]  # minibatches in flight
        return {
            "staleness": [1] * self.ranks if self.double_buffered else behind,  # in updates, by stage
            "weight_versions": [number + 1 for number in behind],
            "schedule": "1f1b without flush",
            "pp": self.ranks,
            **self.plan.facts(),
            "micro_batches": self.count,
            "micro_batches_rule": self._rule(),
            "bubble": self.bubble,
            "bubble_theoretical": 0.0,  # but for filling and emptying it once an epoch
            "reduce_dtype": "fp32",
        }

    def _rule(self) -> str:
        if self.job.micro_batch is not None:
            return "train.micro_batch"
        return "4 a rank" if self.double_buffered else "the whole minibatch"

    def close(self) -> None:
        drop(self, "flight", "blocks", "model")
