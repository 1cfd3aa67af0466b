"""PipeDream: a pipeline that is never emptied within an epoch, at the price of gradients of older weights.

PipeDream (Narayanan et al. 2019) and PipeDream-2BW (Narayanan et al. 2021). Each rank holds one stage of p and takes
one micro batch forward, one backward in turn. Stage s (from 0) is p - 1 - s micro batches behind the last stage with
its backward passes, so minibatches stay in flight between two calls of `step`. The last stage has nothing in flight:
`step` returns there the loss of the minibatch it was called with, and no loss is left over for `flush`.

With t counting the minibatches of an epoch, W(t) the weights after t updates, f the loss, every update is
    pipedream:     W(t+1) = W(t) - lr(t) df/dW [W_s(t - n_s) on each stage s],  n_s = ceil((p - 1 - s) / micro batches)
    pipedream_2bw: W(t+1) = W(t) - lr(t) df/dW [W(t - 1) on all stages]
(no version before the epoch's first), where the forward and the backward pass of a minibatch see the same weights.
pipedream_trainer.py has the step, tick by tick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddlbench.errors import Unsupported, check_values
from ddlbench.frameworks.pipeline.blocks import Blocks
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.pipedream_trainer import PipeDreamTrainer
from ddlbench.frameworks.pipeline.schedules import check_stages, micro_batch_count, pipeline_ranks
from ddlbench.frameworks.pipeline.stages import Plan, tied_names
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.frameworks.shared.meta import on_meta
from ddlbench.frameworks.shared.refusals import check_alike
from ddlbench.job import Job


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
        check_values("framework.", self, least={"dp": 1, "pp": 1, "flops_per_byte": 0})

    def check(self, job: Job) -> None:
        ranks = pipeline_ranks(job.world_size, self.dp, self.pp)
        self._micro_batches(job, ranks)
        check_stages(ranks, 1, len(on_meta(job)), self.balance)
        # What does not go with stages that make the same update at different times.
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
        check_alike(job, self.dp)

    def _micro_batches(self, job: Job, ranks: int) -> int:
        """Two versions of the weights suffice only if a minibatch fills the pipeline (Narayanan et al. 2021)."""
        return micro_batch_count(self.name, job, ranks, self.dp) if self.double_buffered else job.micro_batches(self.dp)

    def setup(self, job: Job) -> PipeDreamTrainer:
        layout = Layout(self.dp, pp=pipeline_ranks(job.world_size, self.dp, self.pp))
        count = self._micro_batches(job, layout.pp)
        groups = Groups.connect(job, layout)
        samples = job.replica_batch(self.dp) // count
        plan = Plan.of(job, layout.pp, samples, self.balance, self.flops_per_byte)
        blocks = Blocks(job, groups, plan, sharded=False)
        facts = self._facts(job, layout.pp, plan, count)
        return PipeDreamTrainer(job, groups, blocks, plan.between, count, self.double_buffered, facts)

    def _facts(self, job: Job, ranks: int, plan: Plan, count: int) -> dict[str, Any]:
        rule = "4 a rank" if self.double_buffered else "the whole minibatch"
        behind = [-(-(ranks - 1 - stage) // count) for stage in range(ranks)]  # minibatches in flight
        return {
            "staleness_theoretical": [1] * ranks if self.double_buffered else behind,  # in updates, by stage
            "weight_versions": [number + 1 for number in behind],
            "schedule": "1f1b without flush",
            "pp": ranks,
            **plan.facts(),
            "micro_batches": count,
            "micro_batches_rule": rule if job.micro_batch is None else "train.micro_batch",
            "bubble_theoretical": 0.0,  # but for filling and emptying it once an epoch
            "reduce_dtype": "fp32",
        }
