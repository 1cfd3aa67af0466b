"""PipeDream: a pipeline that is never emptied within an epoch, at the price of gradients of older weights.

PipeDream (Narayanan et al. 2019) and PipeDream-2BW (Narayanan et al. 2021). Each rank holds one stage of p, and
minibatches stay in flight between two calls of `step` (pipedream_trainer.py shows the step, tick by tick). The last
stage has nothing in flight: `step` returns there the loss of the minibatch that it was called with.

With t counting the minibatches of an epoch, W(t) the weights after t updates, f the loss, every update is
    pipedream:     W(t+1) = W(t) - lr(t) df/dW [W_s(t - n_s) on each stage s],  n_s = ceil((p - 1 - s) / micro batches)
    pipedream_2bw: W(t+1) = W(t) - lr(t) df/dW [W(t - 1) on all stages]
(no version before the epoch's first), where the forward and the backward pass of a minibatch see the same weights.
weights.py says what `framework.correction` changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddlbench.errors import added, check_values, refuse
from ddlbench.frameworks.pipeline.pipedream_trainer import PipeDreamTrainer
from ddlbench.frameworks.pipeline.rank import Blocks, Groups
from ddlbench.frameworks.pipeline.schedules import check_stages, in_flight, micro_batch_count
from ddlbench.frameworks.pipeline.stages import Staged, tied_names
from ddlbench.frameworks.pipeline.weights import CORRECTIONS, PredictedWeights, UnstashedWeights, Weights
from ddlbench.frameworks.shared.layout import Layout, fill
from ddlbench.frameworks.shared.refusals import check_alike, layerwise, optimizer_of
from ddlbench.job import Job, on_meta
from ddlbench.texts import counted


@dataclass
class PipeDream(Staged):
    """One pipeline over all ranks, or `dp` of them; conf/framework/pipedream.yaml says what each knob means."""

    name: str = "pipedream"
    double_buffered: bool = field(default=False, metadata={"defines": None})
    correction: str = added("none")
    discrepancy_decay: float = added(0.135)
    reschedule_updates: int = added(1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        decays = 0 < self.discrepancy_decay < 1
        check_values(
            "framework.", self, least={"reschedule_updates": 0}, choices={"correction": CORRECTIONS},
            rules={"discrepancy_decay": (decays, "greater than 0 and less than 1")},
        )  # fmt: skip

    def layout(self, world_size: int) -> Layout:
        return Layout(**fill(world_size, dp=self.dp, pp=self.pp))

    def check(self, job: Job) -> None:
        layout = self.layout(job.world_size)
        ranks, count = layout.pp, self.micro_batches(job, layout)
        check_stages(ranks, 1, len(on_meta(job)), self.balance)
        # What does not go with stages that make the same update at different times.
        reasons = {
            f"gradients are averaged in fp32, not {job.reduce_dtype}: set train.reduce_dtype=fp32":
                job.reduce_dtype != "fp32",
            "torch.compile would compile a stage again for each version of its weights: set train.compile=false":
                job.compile,
            "gradients in flight have several loss scales, and the last stage makes its update before the first stage "
            "can detect an overflow: use train.precision=bf16, or framework=1f1b":
                job.precision == "fp16",
            f"the norm of all gradients is known only {ranks - 1} micro batches after the last of {ranks} stages has "
            "made its update: set train.clip_norm=null, or use framework=1f1b":
                job.clip_norm is not None and ranks > 1,
            f"the tied embedding would be {counted(ranks - 1, 'update')} older on the first stage than on the last: "
            "set model.tie_weights=false, or use framework=pipedream_2bw (the same staleness on all stages)":
                ranks > 1 and not self.double_buffered and tied_names(on_meta(job)),
        }  # fmt: skip
        refuse(self.name, reasons)
        if self.correction != "none":
            refuse(f"framework.correction={self.correction}", self._against_correction(job, count))
        check_alike(job, layout.dp, stages=True)
        self.check_budget(job, layout, count)

    def _against_correction(self, job: Job, count: int) -> dict[str, object]:
        if self.correction == "prediction":
            (name, needs, _), choose = layerwise(job), "choose sgd with momentum, adam or adamw (recipe.optimizer.name)"
            return {
                f"there is no rule for {name}: {choose}": needs,
                f"without momentum there is no mean gradient to predict with: {choose}":
                    not optimizer_of(job).defaults.get("momentum", True),
            }  # fmt: skip
        return {
            "PipeDream-2BW keeps the weights of the forward pass for the backward pass: use framework=pipedream":
                self.double_buffered,
            "the micro batches of a minibatch would see weights of several ages: set train.micro_batch=null":
                count > 1,
            f"in {job.precision} the forward pass saves casts of its weights, and the backward pass would not see the "
            "corrected ones: set train.precision=fp32": job.precision != "fp32",
            "recomputed activations would be those of the corrected weights: set train.checkpoint_activations=false":
                job.checkpoint_activations,
        }  # fmt: skip

    def micro_batches(self, job: Job, layout: Layout) -> int:
        """The count in a minibatch. In 2BW they fill the pipeline, else two versions of the weights are not enough."""
        if self.double_buffered:
            return micro_batch_count(self.name, job, layout.pp, layout.dp)
        return job.micro_batches(layout.dp)

    def in_flight(self, layout: Layout, count: int) -> list[int]:
        return [in_flight("pipedream", rank, layout.pp, 1, 1) for rank in range(layout.pp)]

    def setup(self, job: Job) -> PipeDreamTrainer:
        layout = self.layout(job.world_size)
        count = self.micro_batches(job, layout)
        plan = self.plan(job, layout, count)
        blocks = Blocks(job, Groups(job, layout, stays_full=True), plan, sharded=False)
        behind = [-(-(layout.pp - 1 - stage) // count) for stage in range(layout.pp)]  # minibatches in flight
        staleness = [1] * layout.pp if self.double_buffered else behind  # in updates, by stage
        delay = staleness[blocks.groups.stage_rank]
        weights = PredictedWeights(blocks.model) if self.correction == "prediction" else Weights(blocks.model)
        if self.correction == "pipemare" and delay:
            weights = UnstashedWeights(blocks.model, delay, self.discrepancy_decay, self.reschedule_updates)
        rule = "4 a rank" if self.double_buffered else "the whole minibatch"
        facts = {
            "staleness_theoretical": staleness,
            "weight_versions": [1 if self.correction == "pipemare" else number + 1 for number in behind],
            "correction": self.correction,
            "schedule": "1f1b without flush",
            "pp": layout.pp,
            **plan.facts(),
            "micro_batches": count,
            "micro_batches_rule": rule if job.micro_batch is None else "train.micro_batch",
            "bubble_theoretical": 0.0,  # except when it fills and empties, once an epoch
            "reduce_dtype": "fp32",
        }
        return PipeDreamTrainer(job, blocks, weights, count, self.double_buffered, facts)
