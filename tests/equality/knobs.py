"""The knobs of the frameworks, each with a case that it must train as one plain process or as DDP does; and planted
faults, with which a framework must not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.megatron import adapter
from ddlbench.frameworks.megatron.adapter import Megatron
from ddlbench.frameworks.megatron.layers import build_layers
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.schedules import V_SHAPED
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Framework, Job
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.vgg import VGG
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from ddlbench.recipe.recipe import CrossEntropy
from tests.equality.cases import MODELS, RATES, SEEDS
from tests.support.broken import (
    broken,
    counted_twice,
    own_tokens,
    repeating,
    summed,
    summed_by_horovod,
    summed_shards,
    untied,
    without_halo,
)
from tests.support.changed_job import loaded
from tests.support.jobs import CASE as WHOLE
from tests.support.libraries import why_no_horovod
from tests.support.reference import Case


@dataclass(frozen=True)
class Knob:
    """changes: of the job, not of the case; as_ddp: those with which DDP trains the same, where it is no plain process.
    within: how far weights may be, as a share of the way they went (None: the whole outcome is equal); beyond: how far
    they are at least, because the knob did something. unlike: the training that is further away"""

    framework: Framework
    case: Case
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    as_ddp: Mapping[str, Any] | None = None
    within: float | None = None
    beyond: float = 0.0
    unlike: Case | None = None


def with_optimizer(name: str, lr: float = 0.02, **keys: Any) -> dict[str, Any]:
    return {"optimizer": partial(make_optimizer, OptimizerConfig(name, lr=lr, **keys))}


def of_ddp(framework: Framework, case: Case, changes: Mapping[str, Any], **more: Any) -> Knob:
    """more: changes that DDP does not get"""
    within, beyond = (0.05, 1e-5) if more else (1e-3, 0.0)
    return Knob(framework, case, {**changes, **more}, as_ddp=changes, within=within, beyond=beyond)


def large(output: Tensor, targets: Tensor) -> Tensor:
    return 100 * CrossEntropy(0.0)(output, targets) ** 2


TEXT: Any = WHOLE.model  # GPT-2 of one layer
CASE, THREES = replace(WHOLE, micro_batch=2), replace(WHOLE, micro_batch=3)
UNTIED = replace(TEXT, tie_weights=False)
IMAGES = Case("vgg", MODELS["vgg"], global_batch=6, steps=3)
KNOBS_OF_THE_JOB: dict[str, Any] = {"micro_batch": 2, "clip_norm": 0.05, "checkpoint_activations": True}
LAST: dict[str, Any] = {"channels_last": True}
ADAMW = with_optimizer("adamw", weight_decay=0.1, decay_norm_and_bias=False)  # two groups of parameters

DATA_PARALLEL = {
    "small buckets": Knob(DDP(bucket_cap_mb=0.01), WHOLE),
    "no views": Knob(DDP(gradient_as_bucket_view=False), WHOLE),
    "static graph": Knob(DDP(static_graph=True), WHOLE),
    "fp16 hook": Knob(DDP(comm_hook="fp16"), WHOLE, within=0.01, beyond=1e-6),
    "powersgd from step 2": Knob(
        DDP(comm_hook="powersgd", powersgd_rank=2, powersgd_start_step=2), WHOLE, within=0.9, beyond=0.01
    ),
}

BF16 = replace(CASE, precision="bf16")
POLICY = replace(BF16, policy=True)
SHARDED = {
    "gathered again": Knob(FSDP(reshard_after_forward=True), CASE),
    "gathered once": Knob(FSDP(reshard_after_forward=False), CASE),
    "offloaded replicas": Knob(FSDP(offload_parameters=True, replicate=2), replace(CASE, clip_norm=0.5)),
    "offloaded activations, too": Knob(FSDP(offload_parameters=True), CASE, {"offload_activations": True}),
    "replicas only": Knob(FSDP(replicate=2), CASE),
    "untied": Knob(FSDP(), replace(CASE, model=UNTIED)),
    "channels last": Knob(FSDP(), IMAGES, LAST),
    "fp16 reduction": Knob(FSDP(), CASE, {"reduce_dtype": "fp16"}, within=0.01, beyond=1e-6),
    "policy in fp32": Knob(FSDP(mixed_precision="policy"), CASE),
    "policy": Knob(FSDP(), POLICY, unlike=BF16),
    "policy, checkpointed": Knob(FSDP(reshard_after_forward=True), replace(POLICY, checkpoint_activations=True)),
    "autocast": Knob(FSDP(mixed_precision="autocast"), BF16),
    "adamw": of_ddp(FSDP(), CASE, ADAMW),
    "fused adamw": of_ddp(FSDP(), CASE, with_optimizer("adamw", weight_decay=0.1, fused=True)),
    "lars": of_ddp(FSDP(), CASE, with_optimizer("lars", momentum=0.9, weight_decay=0.1, trust_coefficient=0.1)),
    "lamb": of_ddp(FSDP(), CASE, with_optimizer("lamb", weight_decay=0.1)),
}

PARTS, CLIPPED = replace(CASE, global_batch=6, steps=3), replace(CASE, global_batch=6, steps=3, clip_norm=0.05)
CHANNELS = TensorParallel("channel", convolutions="channels")
TENSOR = {
    "clipped": Knob(TensorParallel(), CLIPPED),
    "tokens, clipped": Knob(TensorParallel(sequence_parallel=True), CLIPPED),
    "tokens, checkpointed": Knob(TensorParallel(sequence_parallel=True), replace(PARTS, checkpoint_activations=True)),
    "gathered logits": Knob(TensorParallel(parallel_loss=False), PARTS),
    "untied": Knob(TensorParallel(), replace(PARTS, model=UNTIED)),
    "replicas only": Knob(TensorParallel(dp=2), replace(PARTS, micro_batch=3)),
    "channels last": Knob(TensorParallel(), IMAGES, LAST),
    "channels": Knob(CHANNELS, IMAGES),
    "channels, clipped, checkpointed": Knob(CHANNELS, replace(IMAGES, **KNOBS_OF_THE_JOB)),
    "adamw, smoothed": of_ddp(TensorParallel(), replace(PARTS, micro_batch=3), {"loss": CrossEntropy(0.1), **ADAMW}),
}

# 100 rows, then 50, 25, 13, 7 and 4: most cannot be divided. VGG drops the last of an odd number of rows.
RESNET: Any = replace(MODELS["resnet"], image_size=100)  # pyright: ignore
VGG16 = VGG("vgg", channels=[4, 4, 8, 8, 8], hidden=32, image_size=76, num_classes=7, dropout=0.0)
SMALL = Case("resnet", RESNET, lr=RATES["resnet"], seed=SEEDS["resnet"], global_batch=8, steps=3)
PLAIN = Case("vgg", VGG16, global_batch=8, steps=3)
SPATIAL = {
    "vgg": Knob(Spatial(), PLAIN),
    "resnet, knobs": Knob(Spatial(), replace(SMALL, **KNOBS_OF_THE_JOB)),
    "resnet, channels last": Knob(Spatial(), SMALL, LAST),
    "resnet, replicas": Knob(Spatial(dp=2), SMALL),
    "vgg, bf16": Knob(Spatial(), replace(PLAIN, precision="bf16")),
}
SPATIAL_ON_FOUR = {
    "resnet": Knob(Spatial(), SMALL),
    "resnet, 2 x 2": Knob(Spatial(dp=2), SMALL),
    "vgg": Knob(Spatial(), replace(PLAIN, model=replace(VGG16, image_size=140))),  # 4 rows at the end
    "vgg, 2 x 2, knobs": Knob(Spatial(dp=2), replace(PLAIN, **KNOBS_OF_THE_JOB)),
}


@dataclass
class Fused(Megatron):
    """With the kernels of GPUs, whose formulas run operation by operation in this test."""

    def setup(self, job: Job) -> Any:
        with patch.object(adapter, "build_layers", lambda *given, fused: build_layers(*given, fused=True)):
            return super().setup(job)


GPT = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)
LAYERS = Case("gpt2", GPT, global_batch=8, steps=4)
MEGATRON = {
    "parts": Knob(Megatron(), LAYERS),
    "replicas": Knob(Megatron(dp=2), LAYERS),
    "knobs": Knob(Megatron(), replace(LAYERS, **KNOBS_OF_THE_JOB)),
    "fused": Knob(Fused(), LAYERS),
    "untied": Knob(Megatron(), replace(LAYERS, model=replace(GPT, tie_weights=False))),
}

FALLING = replace(WHOLE, steps=4, rates=[0.01, 0.005, 0.01 / 3, 0.0025])
ZERO = [DeepSpeed(zero_stage=stage, persistence_threshold=0) for stage in range(4)]
OFFLOADED = [DeepSpeed(zero_stage=stage, offload_optimizer=True) for stage in (1, 2, 3)]
ALL_OFFLOADED = replace(ZERO[3], offload_optimizer=True, offload_parameters=True)
DEEPSPEED = {
    "small buckets 2": Knob(DeepSpeed(zero_stage=2, reduce_bucket_mb=0.01, gather_bucket_mb=0.01), THREES),
    "small buckets 3": Knob(replace(ZERO[3], reduce_bucket_mb=0.01, gather_bucket_mb=0.01), THREES),
    "overlap 1": Knob(DeepSpeed(zero_stage=1, overlap_comm=True), THREES),
    "overlap 2": Knob(DeepSpeed(zero_stage=2, overlap_comm=True, reduce_bucket_mb=0.01), THREES),
    "no overlap 3": Knob(DeepSpeed(zero_stage=3, overlap_comm=False), THREES),
    "persistent 3": Knob(DeepSpeed(zero_stage=3, persistence_threshold=1000), THREES),
    "offloaded optimizer and activations 2": Knob(OFFLOADED[1], THREES, {"offload_activations": True}),
    "all offloaded 3": Knob(ALL_OFFLOADED, THREES),
    "all offloaded 3, loaded": Knob(loaded(ALL_OFFLOADED), THREES),
}
for stage, zero in enumerate(ZERO):
    DEEPSPEED |= {
        f"adamw {stage}": of_ddp(zero, FALLING, ADAMW),
        f"loaded {stage}": Knob(loaded(zero), THREES),
        f"adamw, fp16 reduction {stage}": of_ddp(zero, FALLING, ADAMW, reduce_dtype="fp16"),
    }
for stage, offloaded in enumerate(OFFLOADED, 1):
    own_casts = DeepSpeed(zero_stage=stage, mixed_precision="weights")
    DEEPSPEED |= {
        f"offloaded optimizer {stage}": Knob(offloaded, THREES),
        # The library rounds the first weights too, and keeps gradients in 16 bits.
        f"weights in bf16 {stage}": Knob(own_casts, BF16, within=0.1, beyond=1e-3),
    }

HOROVOD = {
    "nothing fused": Knob(Horovod(fusion_threshold_mb=0), WHOLE),
    "small buffer, slow cycle": Knob(Horovod(fusion_threshold_mb=0.01, cycle_time_ms=5), WHOLE),
    "fp16": Knob(Horovod(compression="fp16"), WHOLE, within=0.01, beyond=1e-6),
    "adamw": of_ddp(Horovod(), WHOLE, with_optimizer("adamw", 0.01, weight_decay=0.1)),
    "lars": of_ddp(Horovod(), WHOLE, with_optimizer("lars", 1.0, momentum=0.9, decay_norm_and_bias=False)),
    "lamb": of_ddp(Horovod(), WHOLE, with_optimizer("lamb", 0.01)),
    "lamb, large gradients": of_ddp(Horovod(), WHOLE, {"loss": large, **with_optimizer("lamb", 0.01)}),
    "fp16, accumulated, clipped": of_ddp(Horovod(), CASE, {"precision": "fp16", "clip_norm": 0.1}),
}

# The norm is that of the whole gradient, a weight that several ranks have counted once.
NORM = Case("gpt2", GPT, clip_norm=0.5, micro_batch=2)
BN = Case("resnet", MODELS["resnet"], lr=RATES["resnet"], seed=SEEDS["resnet"], micro_batch=2)
PIPELINE = {
    "by hand": Knob(Pipeline(balance=[1, 4]), NORM),
    "two replicas": Knob(Pipeline(dp=2), NORM),
    "one stage a rank": Knob(Pipeline(schedule="interleaved"), NORM),
    "two stages a rank": Knob(Pipeline(schedule="zero_bubble", virtual_stages=2), NORM),
    **{f"on a V, {name}": Knob(Pipeline(schedule=name, virtual_stages=2), NORM) for name in V_SHAPED},
    "loaded": Knob(loaded(Pipeline(balance=[1, 4])), NORM),
}
# Eight stages on four ranks. On a V both ends of a tied weight are one tensor of rank 0: nothing is sent for it.
EIGHT_BLOCKS = [
    Case("gpt2", replace(GPT, n_layer=6), global_batch=24, micro_batch=2),
    replace(BN, model=replace(MODELS["resnet"], layers=[2, 2, 1, 1]), global_batch=24),  # pyright: ignore
    Case("vgg", MODELS["vgg"], global_batch=24, micro_batch=2),
]
PIPELINE_ON_FOUR = {
    f"{case.name}, {name}": Knob(Pipeline(schedule=name, virtual_stages=2), case)
    for case in EIGHT_BLOCKS
    for name in ("looped_bfs", *V_SHAPED)
} | {
    "replicas": Knob(Pipeline(dp=2, schedule="1f1b"), replace(NORM, micro_batch=1)),
    "replicas, statistics": Knob(Pipeline(dp=2, balance=[2, 4]), BN),
}

MESH = replace(NORM, global_batch=24)
AGAIN = replace(MESH, checkpoint_activations=True)
WITHIN_A_CLASSIFIER = [14, 2]  # the last stage begins behind a layer that gives each rank its own features
HYBRID_ON_FOUR = {
    "parts": Knob(Pipeline(schedule="1f1b", tp=2), MESH),
    "shards": Knob(Pipeline(schedule="1f1b", dp=2, sharded=True), MESH),
    "shards of parts": Knob(Pipeline(dp=2, tp=2, sharded=True), MESH),
    "parts, looped": Knob(Pipeline(schedule="interleaved", tp=2, virtual_stages=2), MESH),
    "parts, backward in halves": Knob(Pipeline(schedule="zero_bubble", tp=2), MESH),
    "shards, looped": Knob(Pipeline(schedule="interleaved", dp=2, sharded=True), MESH),
    "shards, backward in halves": Knob(Pipeline(schedule="zero_bubble", dp=2, sharded=True), MESH),
    "parts, on a V": Knob(Pipeline(schedule="zbv", tp=2, virtual_stages=2), MESH),
    "shards, on a V": Knob(
        Pipeline(schedule="dualpipev", dp=2, virtual_stages=2, sharded=True),
        replace(MESH, model=replace(GPT, tie_weights=False)),
    ),
    "checkpointed": Knob(Pipeline(tp=2), AGAIN),
    "shards, checkpointed": Knob(Pipeline(dp=2, sharded=True), AGAIN),
    "cut between column and row": Knob(
        Pipeline(tp=2, balance=WITHIN_A_CLASSIFIER), replace(MESH, name="vgg", model=MODELS["vgg"])
    ),
    "loaded": Knob(loaded(Pipeline(tp=2)), MESH),
    "shards, loaded": Knob(loaded(Pipeline(dp=2, sharded=True)), MESH),
    "bf16": Knob(Pipeline(tp=2), replace(MESH, precision="bf16")),
    "shards, bf16": Knob(Pipeline(dp=2, sharded=True), replace(MESH, precision="bf16")),
}
HYBRID_ON_EIGHT = {
    f"replicas, pipelines and parts{', sharded' if sharded else ''}": Knob(
        Pipeline(schedule="1f1b", dp=2, tp=2, sharded=sharded), replace(MESH, global_batch=48)
    )
    for sharded in (False, True)
}

KNOBS: dict[tuple[int, str], dict[str, Knob]] = {  # ranks and framework -> name -> knob
    (1, "megatron"): {"one rank": Knob(Megatron(), LAYERS)},
    (2, "ddp"): DATA_PARALLEL,
    (2, "fsdp"): SHARDED,
    (2, "tensor"): TENSOR,
    (2, "spatial"): SPATIAL,
    (2, "megatron"): MEGATRON,
    (2, "deepspeed"): DEEPSPEED,
    (2, "horovod"): {} if why_no_horovod() else HOROVOD,
    (2, "pipeline"): PIPELINE,
    (4, "megatron"): {"replicas of parts, knobs": Knob(Megatron(dp=2), replace(LAYERS, **KNOBS_OF_THE_JOB))},
    (4, "spatial"): SPATIAL_ON_FOUR,
    (4, "pipeline"): PIPELINE_ON_FOUR,
    (4, "hybrid"): HYBRID_ON_FOUR,
    (8, "hybrid"): HYBRID_ON_EIGHT,
}
# Of two ranks: 100 times as far as two right trainings may be from each other, or `beyond`.
FAULTS = {
    "ddp, summed": Knob(broken(DDP(), summed), CASE),
    "ddp, repeated": Knob(broken(DDP(), repeating), CASE),
    "ddp, clipped": Knob(DDP(), CASE, {"clip_norm": 0.1}),
    "fsdp, summed": Knob(broken(FSDP(), summed_shards), CASE),
    **{f"zero{stage}, repeated": Knob(broken(DeepSpeed(zero_stage=stage), repeating), THREES) for stage in (1, 3)},
    **{f"zero{stage}, clipped": Knob(DeepSpeed(zero_stage=stage), THREES, {"clip_norm": 0.1}) for stage in (1, 3)},
    "tensor, own tokens": Knob(broken(TensorParallel(sequence_parallel=True), own_tokens), PARTS),
    "spatial, no halo": Knob(broken(Spatial(), without_halo), PLAIN, beyond=1e-3),
    "pipeline, untied": Knob(broken(Pipeline(), untied), NORM),
    "hybrid, counted twice": Knob(broken(Pipeline(tp=2), counted_twice), NORM),
    **({} if why_no_horovod() else {"horovod, summed": Knob(broken(Horovod(), summed_by_horovod), WHOLE)}),
}

RELOADED: dict[str, tuple[Case, Framework]] = {
    "fsdp": (CASE, FSDP()),  # an evaluation leaves the outermost group gathered
    "tensor": (PARTS, TensorParallel()),
    "spatial": (PLAIN, Spatial()),
    "megatron": (LAYERS, Megatron()),
    "parameter_server": (WHOLE, ParameterServer(bound=1)),
    **{f"zero{stage}": (WHOLE, zero) for stage, zero in enumerate(ZERO)},
    "zero3, persistent": (WHOLE, DeepSpeed(zero_stage=3)),
    "zero3, offloaded": (WHOLE, DeepSpeed(zero_stage=3, offload_optimizer=True, offload_parameters=True)),
}
DROPPING: dict[str, tuple[Case, Framework]] = {
    "tensor": (PARTS, TensorParallel()),
    "tensor, tokens": (PARTS, TensorParallel(sequence_parallel=True)),
    "megatron": (LAYERS, Megatron()),
}
# Of a pipeline, whose first stage has no loss that its scaler would see, with an optimizer that scales by itself.
OVERFLOWING: dict[str, tuple[Framework, dict[str, Any], str]] = {
    "fsdp": (FSDP(), {}, ""),
    "tensor": (TensorParallel(), {}, "h0.mlp.c_fc.weight"),
    "gpipe": (Pipeline(), with_optimizer("adamw", 0.01), ""),
    "gpipe, fused": (Pipeline(), with_optimizer("adamw", 0.01, fused=True), ""),
}

SLOW: set[tuple[object, ...]] = {
    (2, "deepspeed"), (2, "pipeline"), (4, "spatial"), (4, "pipeline"), (4, "hybrid"), (8, "hybrid"),
    *((2, "reloaded", name) for name in RELOADED if name.startswith("zero")),
    *((2, "overflow", name) for name in OVERFLOWING if name.startswith("gpipe")),
}  # fmt: skip
