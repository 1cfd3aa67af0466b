"""ZeRO's own knobs and refusals; that it trains what one process trains is tests/test_equal_training.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.errors import Unavailable, Unsupported, UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed import DeepSpeed
from ddlbench.frameworks.deepspeed_config import library
from ddlbench.job import Batch, Framework, Job
from ddlbench.models.gpt2 import GPT2
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.equal import make_job, train_cases
from tests.processes import PYTHON, run
from tests.ranks import run_ranks
from tests.reference import Case, reference
from tests.test_common import job
from tests.test_equal_training import MODELS, TOLERANCES, distance, norm

MODEL = GPT2("gpt2", n_layer=1, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)
CASE = Case("gpt2", MODEL, lr=0.02)
STAGES = (0, 1, 2, 3)
TOLERANCE = TOLERANCES["gpt2", "fp32"].weights

# name -> framework, how far its weights may be from those of plain training, as a share of the way they went
KNOBS = {
    "small buckets 2": (DeepSpeed(zero_stage=2, reduce_bucket_mb=0.01, gather_bucket_mb=0.01), TOLERANCE),
    "small buckets 3": (
        DeepSpeed(zero_stage=3, reduce_bucket_mb=0.01, gather_bucket_mb=0.01, persistence_threshold=0),
        TOLERANCE,
    ),
    "overlap 1": (DeepSpeed(zero_stage=1, overlap_comm=True), TOLERANCE),
    "overlap 2": (DeepSpeed(zero_stage=2, overlap_comm=True, reduce_bucket_mb=0.01), TOLERANCE),
    "no overlap 3": (DeepSpeed(zero_stage=3, overlap_comm=False), TOLERANCE),
    "persistent 3": (DeepSpeed(zero_stage=3, persistence_threshold=1000), TOLERANCE),
    "offloaded optimizer 1": (DeepSpeed(zero_stage=1, offload_optimizer=True), TOLERANCE),
    "offloaded optimizer 2": (DeepSpeed(zero_stage=2, offload_optimizer=True), TOLERANCE),
    "offloaded optimizer 3": (DeepSpeed(zero_stage=3, offload_optimizer=True), TOLERANCE),
    "all offloaded 3": (
        DeepSpeed(zero_stage=3, offload_optimizer=True, offload_parameters=True, persistence_threshold=0),
        TOLERANCE,
    ),
}


def test_knobs_train_the_same() -> None:
    micro = replace(CASE, micro_batch=3)
    ranks = run_ranks(2, train_cases, [(micro, framework) for framework, _ in KNOBS.values()])
    expected = reference(micro, 2)
    found = {name: distance(outcome.weights, expected) for name, outcome in zip(KNOBS, ranks[0], strict=True)}
    for name, (_, tolerance) in KNOBS.items():
        assert found[name] <= tolerance, found


@dataclass
class Clipping(DeepSpeed):
    """Gradients clipped though nobody asked, as DeepSpeed does by default."""

    def config(self, job: Job) -> dict[str, Any]:
        return super().config(job) | {"gradient_clipping": 0.1}


@dataclass
class Dropping(DeepSpeed):
    """The last micro batch is a copy of the one before."""

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        size = len(batch.inputs) // self.count
        inputs, targets = batch.inputs.clone(), batch.targets.clone()
        inputs[-size:], targets[-size:] = inputs[-2 * size : -size], targets[-2 * size : -size]
        return super().step(replace(batch, inputs=inputs, targets=targets))


def test_the_central_test_notices_a_planted_fault() -> None:
    case = replace(CASE, micro_batch=2)
    faults = [cls(zero_stage=stage) for stage in (1, 3) for cls in (Clipping, Dropping)]
    ranks = run_ranks(2, train_cases, [(case, framework) for framework in faults])
    expected = reference(case, 2)
    found = [distance(outcome.weights, expected) for outcome in ranks[0]]
    assert all(off > 100 * TOLERANCE for off in found), found


def adamw_job() -> Job:
    """Two parameter groups: without weight decay and with it."""
    config = OptimizerConfig("adamw", lr=0.01, weight_decay=0.1, decay_norm_and_bias=False)
    return replace(make_job(CASE), optimizer=partial(make_optimizer, config))


def samples(job: Job, seed: int = 0) -> Batch:
    """This rank's slice of a global batch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(61, (job.global_batch, 17), generator=generator).chunk(job.world_size)[job.rank]
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(len(tokens), dtype=torch.bool))


def weights_of(framework: Framework) -> Tensor:
    """On rank 0; empty elsewhere."""
    state = framework.state() or {}
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(state.items())] or [torch.empty(0)])


def train_each(frameworks: Sequence[Framework], reduce_dtypes: Sequence[str]) -> list[Tensor]:
    """Weights after a few updates with AdamW at falling learning rates."""
    found: list[Tensor] = []
    for framework, reduce_dtype in zip(frameworks, reduce_dtypes, strict=True):
        job = replace(adamw_job(), reduce_dtype=reduce_dtype)
        framework.check(job)
        framework.setup(job)
        for step in range(4):
            for group in framework.optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
            framework.step(samples(job, step))
        found.append(weights_of(framework))
        dist.barrier()
        framework.close()
    return found


def test_adamw_with_two_groups_and_a_schedule_is_ddps() -> None:
    zero = [DeepSpeed(zero_stage=stage, persistence_threshold=0) for stage in STAGES]
    types = ["fp32"] * 5 + ["fp16"] * 4
    expected, *found = run_ranks(2, train_each, [DDP(), *zero, *zero], types)[0]
    off = [norm([weights - expected]) / norm([expected]) for weights in found]
    assert max(off[:4]) <= 1e-5, off
    assert max(off[4:]) <= 1e-2, off  # gradients travelled in fp16
    assert min(off[4:]) > max(off[:4]), off


def own_loop(job: Job, stage: int) -> Tensor:
    """The loop of DeepSpeed's "Getting Started" (deepspeed.ai/getting-started): its engine, its configuration file's
    optimizer by name, a model that returns its loss. The weights after a few updates, in their names' order."""
    deepspeed = library(job.device)

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.build()

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    model = WithLoss()
    adamw = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}
    config = {
        "train_batch_size": job.global_batch,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(4):
        batch = samples(job, step)
        for inputs, targets in zip(batch.inputs.chunk(2), batch.targets.chunk(2), strict=True):
            engine.backward(engine(inputs, targets))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = torch.cat([tensor.double().flatten() for _, tensor in sorted(model.model.state_dict().items())])
    engine.destroy()
    return weights


def both_loops() -> list[tuple[Tensor, Tensor]]:
    adamw = partial(make_optimizer, OptimizerConfig("adamw", lr=0.01, weight_decay=0.1))
    job = replace(make_job(replace(CASE, micro_batch=3, clip_norm=0.5)), optimizer=adamw)
    found: list[tuple[Tensor, Tensor]] = []
    for stage in STAGES:
        framework = DeepSpeed(zero_stage=stage, persistence_threshold=0)
        framework.setup(job)
        for step in range(4):
            framework.step(samples(job, step))
        found.append((weights_of(framework), own_loop(job, stage)))
        dist.barrier()
        framework.close()
    return found


def test_equals_deepspeeds_own_documented_loop() -> None:
    for stage, (ours, theirs) in zip(STAGES, run_ranks(2, both_loops)[0], strict=True):
        assert torch.equal(ours, theirs), (stage, norm([ours - theirs]))


WEIGHTS = [
    replace(CASE, name=f"{name}-{precision}", model=MODELS[name], precision=precision, lr=0.02, micro_batch=micro)
    for name, precision, micro in (("gpt2", "bf16", 2), ("vgg", "bf16", None), ("gpt2", "fp16", None))
]


def test_its_own_mixed_precision_trains_the_same() -> None:
    work = [(case, DeepSpeed(zero_stage=stage, mixed_precision="weights")) for case in WEIGHTS for stage in (1, 2, 3)]
    for (case, framework), outcome in zip(work, run_ranks(2, train_cases, work)[0], strict=True):
        off = distance(outcome.weights, reference(case, 2))
        # Weights that are cast before use instead of in it, and gradients that are kept in 16 bits.
        assert 1e-5 < off <= 0.05, (case.name, framework.zero_stage, off)
        assert {tensor.dtype for tensor in outcome.weights.values()} == {torch.float32}


def rounds(frameworks: Sequence[DeepSpeed]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Weights at the start, after an update, loaded again, and after the same update from there."""
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for framework in frameworks:
        job = make_job(replace(CASE, lr=0.1))
        job = replace(job, optimizer=partial(make_optimizer, OptimizerConfig("sgd", lr=0.1)))  # without a memory
        framework.setup(job)
        state = [framework.state()]
        dist.broadcast_object_list(state)
        weights = [weights_of(framework)]
        framework.step(samples(job))
        weights.append(weights_of(framework))
        framework.load(state[0] or {})
        framework.evaluate(samples(job))  # between two updates, as between two epochs
        weights.append(weights_of(framework))
        framework.step(samples(job))
        found.append((*weights, weights_of(framework)))  # pyright: ignore
        dist.barrier()
        framework.close()
    return found


def test_a_loaded_state_is_where_training_goes_on() -> None:
    frameworks = [DeepSpeed(zero_stage=stage, persistence_threshold=0) for stage in STAGES]
    frameworks += [DeepSpeed(zero_stage=3), DeepSpeed(zero_stage=3, offload_optimizer=True, offload_parameters=True)]
    first, second = run_ranks(2, rounds, frameworks)
    for framework, (start, after, loaded, again) in zip(frameworks, first, strict=True):
        assert norm([after - start]) > 1e-3, framework
        assert torch.equal(loaded, start), framework
        torch.testing.assert_close(again, after, rtol=1e-6, atol=1e-7)
    assert all(not len(weights) for weights in second[0])  # the state is on the first rank only


def overflow() -> tuple[list[int], list[Tensor]]:
    """Updates counted and weights: at the start, after an overflow, after a finite step."""
    job = replace(make_job(CASE), precision="fp16")
    losses = iter([float("inf"), 1.0])
    plain = job.loss
    job = replace(job, loss=lambda output, targets: plain(output, targets) * next(losses))
    framework = DeepSpeed(zero_stage=0)
    framework.check(job)
    framework.setup(job)
    updates, weights = [framework.updates], [weights_of(framework)]
    for _ in range(2):
        framework.step(samples(job))
        updates.append(framework.updates)
        weights.append(weights_of(framework))
    dist.barrier()
    framework.close()
    return updates, weights


def test_an_overflow_in_fp16_is_no_update() -> None:
    (updates, weights), _ = run_ranks(2, overflow)
    assert updates == [0, 0, 1]
    assert torch.equal(weights[0], weights[1])
    assert norm([weights[2] - weights[1]]) > 1e-3


def two_ranks(**changes: object) -> Job:
    return replace(job(), world_size=2, micro_batch=None, **changes)  # pyright: ignore


def test_what_it_cannot_do_is_said_before_anything_starts() -> None:
    lamb = partial(make_optimizer, OptimizerConfig("lamb", lr=0.1))
    with pytest.raises(Unsupported, match=r"Lamb with framework\.zero_stage=1: layer-wise norms need whole tensors"):
        DeepSpeed().check(two_ranks(optimizer=lamb))
    with pytest.raises(
        Unsupported, match=r"precision=fp16 with framework\.zero_stage=2: .* without lowering the scale"
    ):
        DeepSpeed(zero_stage=2).check(two_ranks(precision="fp16"))
    with pytest.raises(Unsupported, match=r"reduce_dtype=fp16 with framework\.zero_stage=1: .*precision=bf16"):
        DeepSpeed().check(two_ranks(precision="bf16", reduce_dtype="fp16"))
    own = DeepSpeed(zero_stage=3, mixed_precision="weights")
    own.check(two_ranks(precision="fp16", reduce_dtype="fp16", model=MODEL))
    with pytest.raises(Unsupported, match=r"mixed_precision=weights with framework\.zero_stage=3: BatchNorm"):
        own.check(two_ranks(precision="bf16", model=MODELS["resnet"]))
    with pytest.raises(Unsupported, match="do not go together"):
        DeepSpeed().check(two_ranks(compile=True, checkpoint_activations=True))
    with pytest.raises(Unsupported, match=r"train\.compile with framework\.zero_stage=3"):
        DeepSpeed(zero_stage=3).check(two_ranks(compile=True))
    with pytest.raises(Unsupported, match="bf16 need NCCL"):
        DeepSpeed(zero_stage=0).check(two_ranks(reduce_dtype="bf16"))
    with pytest.raises(UserError, match=r"global_batch=5 does not divide over 2 replicas"):
        DeepSpeed().check(two_ranks(global_batch=5))
    DeepSpeed(zero_stage=0).check(two_ranks(optimizer=lamb))
    for precision in ("fp32", "bf16"):
        DeepSpeed(zero_stage=3).check(two_ranks(precision=precision))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"zero_stage": 4}, r"framework\.zero_stage=4 is unknown: choose 0, 1, 2 or 3"),
        ({"reduce_bucket_mb": 0.0}, r"framework\.reduce_bucket_mb=0\.0 must be greater than 0 MiB"),
        ({"persistence_threshold": -1}, r"framework\.persistence_threshold=-1 must not be negative"),
        ({"zero_stage": 0, "offload_optimizer": True}, r"offload_optimizer=True needs framework\.zero_stage=1 or more"),
        ({"zero_stage": 2, "offload_parameters": True}, r"offload_parameters=True needs .*=3 or more, not 2"),
        ({"zero_stage": 0, "reduce_bucket_mb": 25.0}, r"reduce_bucket_mb=25\.0 needs framework\.zero_stage=1"),
        ({"gather_bucket_mb": -1.0}, r"framework\.gather_bucket_mb=-1\.0 must be greater than 0 MiB"),
        ({"mixed_precision": "half"}, r"mixed_precision=half is unknown: choose one of autocast, weights"),
        ({"zero_stage": 0, "mixed_precision": "weights"}, r"mixed_precision=weights needs framework\.zero_stage=1"),
        ({"zero_stage": 0, "overlap_comm": True}, r"overlap_comm=True needs framework\.zero_stage=1"),
    ],
)
def test_a_wrong_knob_names_itself(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DeepSpeed(**knobs)


def test_a_missing_library_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(Unavailable, match=r"pip install 'ddlbench\[deepspeed\]'"):
        DeepSpeed().check(two_ranks())


PROGRAM = [
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddlbench", "+model=resnet50",
    "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32", "loader=synthetic", "progress=false",
    "train.global_batch=8", "train.micro_batch=2", "train.steps=2", "train.epochs=1", "data.val_limit=6",
]  # fmt: skip


def test_the_program_runs_it_under_torchrun(tmp_path: Path) -> None:
    done = run(PYTHON, *PROGRAM, "+framework=zero3", "train.precision=bf16", cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deepspeed" not in (done.stdout + done.stderr).lower()
    assert "accelerator" not in done.stdout + done.stderr
    (path,) = tmp_path.glob("results/*/attempt-1/run.json")
    content = json.loads(path.read_text())
    assert content["status"] == "ok"
    assert content["ledger"]["updates"] == 2
    assert content["framework"] | {"zero_stage": 3, "precision_scheme": "torch_autocast"} == content["framework"]
