from __future__ import annotations

import pytest

from ddlbench.predict.grading.points import COLUMNS, model_words, points, strategy_of
from tests.predict.grading.rows import BASE, POINT, rows


def test_a_point_has_the_seconds_of_its_step_and_of_its_base() -> None:
    """8,192 images at 60,000 images/s, from 2,048 images at 16,000 images/s."""
    (point,) = points(rows(BASE, POINT), [])
    assert (point.measured.samples, point.measured.gpus) == (8192, 32)
    assert point.measured.seconds == pytest.approx(8192 / 60_000)
    assert point.base.seconds == pytest.approx(2048 / 16_000)
    assert point.framework == "ddp"
    copied = "framework.gradient_as_bucket_view=false"
    assert point.words == ("+model=resnet50", copied, "train.precision=fp16", "train.reduce_dtype=fp32")


def test_a_base_has_its_own_batch() -> None:
    """The batch of one GPU may differ between a point and its base."""
    (point,) = points(rows({**BASE, "batch_per_gpu": "512"}, POINT), [])
    assert point.base.samples == 8 * 512
    (stated,) = points(rows({**POINT, "layout": "base batch per GPU 408; 1281167 images an epoch"}), [])
    assert stated.base.samples == 8 * 408


GPT2 = {"model": "GPT-2 medium", "seq_len": "1024"}


@pytest.mark.parametrize(
    ("units", "measured", "more", "seconds"),
    [
        (("img/s", "examples/s"), "60000", {}, 8192 / 60_000),
        (("img/s/GPU", "img/s, per GPU", "images/s (each GPU)"), "2000", {}, 8192 / 64_000),
        (("s/epoch", "s/epoch (median)"), "30", {"layout": "1281167 images an epoch"}, 30 * 8192 / 1_281_167),
        (("s/epoch",), "30", {"layout": "1,281,167 images per epoch"}, 30 * 8192 / 1_281_167),
        (("ms", "ms/iter"), "140", {}, 0.140),
        (("s/step", "seconds per step"), "0.14", {}, 0.14),
        (("tokens/s/GPU", "tok/GPU/s"), "4096000", GPT2, 8192 * 1024 / 32 / 4_096_000),
    ],
)
def test_units(units: tuple[str, ...], measured: str, more: dict[str, str], seconds: float) -> None:
    for unit in units:
        (point,) = points(rows({**POINT, **more, "unit": unit, "measured": measured, "base_value": measured}), [])
        assert point.measured.seconds == pytest.approx(seconds), unit


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "AlexNet"}, "the model 'AlexNet' is not known"),
        ({"base_gpus": "32"}, "its base has as many GPUs"),
        ({"precision": "fp8 (mixed)"}, "the precision 'fp8 (mixed)' is not known"),
        ({"model": "GPT 0B", "seq_len": "128"}, "the model 'GPT 0B' is not known"),
        ({"gpu_type": "TPU v3"}, "GPU type 'TPU v3'"),
        ({"network": "fast"}, "network 'fast' has no speed"),
        ({"model": "WideResNet-50"}, "the model 'WideResNet-50' is not known"),
        ({"strategy": "parameter_server on cpu"}, "a parameter server has no equations"),
        ({"strategy": "DDP + PowerSGD"}, "'DDP + PowerSGD' has compressed gradients"),
        ({"strategy": "DDP, 1-bit"}, "has compressed gradients"),
        ({"framework": "ChainerMN 7, double buffering"}, "has gradients of the step before"),
        ({"strategy": "FSDP+DP"}, "does not state how many replicas"),
        ({"strategy": "ZeRO-2 within groups of 8 GPUs"}, "shards gradients or weights within groups"),
        ({"strategy": "local SGD (data parallel)"}, "has updates of another kind"),
        ({"strategy": "ZeRO-3 with CPU offload"}, "has weights or states on the host"),
        ({"model": "Mask R-CNN (ResNet-50)"}, "is not known"),
        ({"model": "SE-ResNet-50"}, "is not known"),
        ({"model": "ALBERT-large"}, "is not known"),
        ({"model": "Adopted CNN 25M", "seq_len": "512"}, "is not known"),
        ({"model": "prompt net 1B", "seq_len": "512"}, "is not known"),
        ({"model": "Qwen3-30B-A3B", "seq_len": "512"}, "has experts"),
        ({"model": "DeepSeek-MoE 16B", "seq_len": "512"}, "has experts"),
        ({"strategy": "asynchronous SGD"}, "asynchronous updates have no equations"),
        ({"strategy": "TP 8 x PP 4"}, "does not state the layout of"),
        ({"strategy": "FSDP + TP"}, "does not state the layout of"),
        ({"strategy": "FSDP HYBRID_SHARD"}, "does not state how many replicas"),
        ({"strategy": "magic", "framework": "wand"}, "the strategy 'magic' is not known"),
        ({"strategy": "FSDP + TP8"}, "does not state the layout of 'FSDP + TP8'"),
        ({"strategy": "FSDP2 + CP 8"}, "does not state the layout"),
        ({"unit": "img/s/node"}, "the unit 'img/s/node' is not known"),
        ({"unit": "images/sec per chip"}, "the unit 'images/sec per chip' is not known"),
        ({"unit": "img/s, per node"}, "the unit 'img/s, per node' is not known"),
        ({"unit": "ms/image"}, "the unit 'ms/image' is not known"),
        ({"unit": "s"}, "the unit 's' is not known"),
        ({"unit": "Msamples/s"}, "the unit 'Msamples/s' is not known"),
        ({"precision": "int8"}, "the precision 'int8' is not known"),
        ({"batch_per_gpu": ""}, "it states no batch"),
        ({"unit": "furlongs"}, "the unit 'furlongs' is not known"),
        ({"step_ms": "150"}, "60000 img/s give 136.533 ms a step, step_ms is 150"),
        ({"measured": "nan"}, "is no number above 0"),
        ({"gpus": "-4"}, "is no number above 0"),
        ({"global_batch": "4096"}, "32 GPUs with 256 samples each are not global_batch = 4096"),
        ({"unit": "s/epoch"}, "its layout does not state the images of an epoch"),
        ({"model": "GPT-2 medium"}, "it states no seq_len"),
        ({"base_gpus": "", "base_value": ""}, "no base in its series"),
    ],
)
def test_a_row_is_left_out_with_its_reason(change: dict[str, str], reason: str) -> None:
    left_out = list[str]()
    list(points(rows(BASE, {**POINT, **change}), left_out))
    left_out = [text for text in left_out if text.startswith("line 3")]
    assert len(left_out) == 1
    assert reason in left_out[0]
    assert left_out[0].startswith("line 3: a page")


def test_a_row_counts_once_with_each_loader() -> None:
    left_out = list[str]()
    loaded = {**POINT, "loader": "DALI"}
    assert len(list(points(rows(POINT, dict(POINT), loaded, dict(loaded)), left_out))) == 2
    assert [reason.rpartition(": ")[2] for reason in left_out] == ["the same as line 2", "the same as line 4"]
    assert set(POINT) == set(COLUMNS)


STRATEGIES = {
    "FSDP FULL_SHARD (PURE)": "fsdp", "fully sharded": "fsdp", "FSDP (ZeRO-3)": "fsdp", "FSDP NO_SHARD": "ddp",
    "Horovod DP": "horovod", "ZeRO-2": "zero2", "ZeRO stage 3": "zero3", "DistributedDataParallel": "ddp",
    "MultiWorkerMirroredStrategy": "ddp", "synchronous SGD": "ddp", "replicated all-reduce (NCCL)": "ddp",
    "DP (TP1 PP1)": "ddp", "DDP (async all-reduce)": "ddp", "ZeRO-1 within groups of 8 GPUs": "ddp",
}  # fmt: skip
KAHIRA = {  # of 32 GPUs, 8 in a node
    "data": ("ddp", []),
    "spatial (s)": ("spatial", ["framework.dp=1", "framework.sp=32"]),
    "data + spatial (ds)": ("spatial", ["framework.dp=4", "framework.sp=8"]),
    "filter parallelism": ("tensor", ["framework.dp=1", "framework.tp=32"]),
    "data+filter": ("tensor", ["framework.dp=4", "framework.tp=8"]),
    "channel": ("channel", ["framework.dp=1", "framework.tp=32"]),
}


@pytest.mark.parametrize("strategy", KAHIRA)
def test_the_strategies_of_kahira_et_al(strategy: str) -> None:
    (row,) = rows({**POINT, "strategy": strategy})
    assert strategy_of(row) == KAHIRA[strategy]


WHOLE_WEIGHTS = {"FSDP SHARD_GRAD_OP (DEFAULT)": "fsdp", "FSDP (ZeRO-2)": "fsdp"}


@pytest.mark.parametrize(
    ("strategy", "library", "framework"),
    [
        *((strategy, "PyTorch", framework) for strategy, framework in (STRATEGIES | WHOLE_WEIGHTS).items()),
        ("DDP", "torch FSDP", "ddp"),  # the strategy counts before the name of the library
        ("data parallel", "DeepSpeed ZeRO-1", "zero1"),
        ("DP (NCCL)", "MXNet + Horovod", "horovod"),
        ("weights in shards", "torch FSDP", "fsdp"),
    ],
)
def test_strategies(strategy: str, library: str, framework: str) -> None:
    (point,) = points(rows({**POINT, "strategy": strategy, "framework": library}), [])
    assert point.framework == framework
    assert ("framework.reshard_after_forward=false" in point.words) == (strategy in WHOLE_WEIGHTS)
    sent = "fp16" if "PURE" in strategy else "fp32"
    assert f"train.reduce_dtype={sent}" in point.words


@pytest.mark.parametrize(
    ("strategy", "precision", "model", "words"),
    [
        ("Horovod, fp16 allreduce", "fp32", "ResNet-50", ["train.precision=fp32", "train.reduce_dtype=fp16"]),
        ("Horovod, gradients in fp16", "amp", "ResNet-50", ["train.precision=fp16", "train.reduce_dtype=fp16"]),
        ("ZeRO-2", "bf16", "BERT-large", ["framework.mixed_precision=weights", "train.reduce_dtype=bf16"]),
        ("ZeRO-2", "bf16", "ResNet-50", ["train.precision=bf16", "train.reduce_dtype=fp32"]),
        ("ZeRO-2", "fp32", "BERT-large", ["train.precision=fp32", "train.tf32=false"]),
        *(("DDP", name, "ResNet-50", ["train.precision=fp32"]) for name in ("float32", "single")),
        *(("DDP", name, "ResNet-50", ["train.precision=fp16"]) for name in ("amp", "mixed precision")),
        ("DDP", "bfloat16", "ResNet-50", ["train.precision=bf16"]),
    ],
)
def test_types_of_weights_and_gradients(strategy: str, precision: str, model: str, words: list[str]) -> None:
    row = {**POINT, "strategy": strategy, "precision": precision, "model": model, "seq_len": "512"}
    (point,) = points(rows(row), [])
    assert set(words) <= set(point.words)
    assert ("framework.mixed_precision=weights" in point.words) == ("framework.mixed_precision=weights" in words)


@pytest.mark.parametrize(
    ("library", "strategy", "precision", "sent", "overlaps"),
    [
        ("Megatron-LM", "DDP", "fp16", "fp16", False),
        ("Megatron-LM", "DDP", "bf16", "fp32", False),
        ("ChainerMN 7", "DP", "fp16", "fp16", False),
        ("DeepSpeed", "ZeRO stage 0", "bf16", "bf16", False),
        ("DeepSpeed", "ZeRO stage 3", "bf16", "bf16", True),
        ("apex", "DDP", "fp16", "fp32", True),
        ("MXNet", "Horovod", "fp16", "fp16", True),
        ("MXNet", "Horovod", "amp fp16", "fp32", True),
        ("InternEvo", "ZeRO-1 within groups of 8 GPUs", "bf16", "bf16", True),
    ],
)
def test_libraries_differ_in_the_type_of_gradients_and_in_their_overlap(
    library: str, strategy: str, precision: str, sent: str, overlaps: bool
) -> None:
    row = {"framework": library, "strategy": strategy, "precision": precision, "model": "GPT 1.3B", "seq_len": "512"}
    (point,) = points(rows({**POINT, **row}), [])
    assert f"train.reduce_dtype={sent}" in point.words
    assert point.machine.overlap == overlaps


@pytest.mark.parametrize(
    ("library", "algorithm"),
    [
        ("PyTorch 1.5.0a0", "ring"),
        ("TensorFlow 1.15.2 + Horovod 0.19.0", "ring"),
        ("ChainerMN 7", "ring"),
        ("PyTorch 1.11.0+cu115", "auto"),
        ("PyTorch 2.2", "auto"),
    ],
)
def test_the_software_of_2020_reduces_in_a_ring(library: str, algorithm: str) -> None:
    (point,) = points(rows({**POINT, "framework": library}), [])
    assert point.machine.algorithm == algorithm


@pytest.mark.parametrize(
    ("library", "model", "strategy", "size"),
    [
        ("PyTorch (DeepLearningExamples)", "BERT-base", "DDP", "954"),
        ("PyTorch (DLE, DDP, LAMB)", "BERT-large", "DDP with accumulation", "954"),
        ("PyTorch (DeepLearningExamples)", "ResNet-50", "DDP", None),
        ("TensorFlow 1 + Horovod (DLE)", "BERT-base", "DP", None),
        ("TensorFlow 2.3", "BERT-base", "DP (tf.distribute, mirrored)", "1000000"),
        ("ChainerMN 7", "VGG-16", "DP", "1000000"),
    ],
)
def test_some_libraries_send_larger_messages(library: str, model: str, strategy: str, size: str | None) -> None:
    row = {"framework": library, "strategy": strategy, "model": model, "seq_len": "128"}
    (point,) = points(rows({**POINT, **row}), [])
    assert [word for word in point.words if "bucket_cap" in word] == (
        [f"framework.bucket_cap_mb={size}"] if size else []
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("GPT 535M (hidden 1536, 16 layers)", ["model.n_layer=16", "model.n_embd=1536", "model.n_head=24"]),
        ("GPT, layers=8 width=512 4 heads, vocabulary 512", ["model.n_head=4", "model.vocab_size=512"]),
        ("RN50", ["+model=resnet50"]),
        ("resnet_152", ["+model=resnet152"]),
        ("VGG 16", ["+model=vgg16"]),
        ("BERT", ["model.n_layer=24", "model.n_embd=1024"]),  # of MLPerf
        ("BERT Large", ["model.n_layer=24", "model.n_embd=1024"]),
        ("GPT-2 (1.5B)", ["model.n_layer=48", "model.n_embd=1600"]),
        ("GPT-NeoX-20B", ["model.n_layer=44", "model.n_embd=6144"]),
        ("GPT 1T", ["model.n_layer=128", "model.n_embd=25600"]),
        ("Llama 3.1 8B", ["model.n_layer=32", "model.n_embd=4096"]),
    ],
)
def test_models(model: str, words: list[str]) -> None:
    (row,) = rows({**POINT, "source": "MLPerf Training v1.1", "model": model, "seq_len": "512"})
    assert set(words) <= set(model_words(row))


@pytest.mark.parametrize("broken", [{"measured": "-5"}, {"unit": "furlongs"}])
def test_the_first_row_of_a_series_is_named_where_it_is_broken(broken: dict[str, str]) -> None:
    left_out = list[str]()
    assert list(points(rows({**POINT, "gpus": POINT["base_gpus"], "global_batch": "", **broken}), left_out)) == []
    assert left_out[0].startswith("line 2")


@pytest.mark.parametrize("broken", [{"gpus": "-4"}, {"measured": "nan"}, {"base_gpus": "some"}])
def test_a_broken_row_leaves_out_no_other_row_of_its_series(broken: dict[str, str]) -> None:
    left_out = list[str]()
    assert len(list(points(rows({**POINT, **broken}, BASE, POINT), left_out))) == 1
    assert left_out[0].startswith("line 2")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "amp fp16", "bf16"])
def test_checkpointed_activations_are_predicted_in_every_precision(precision: str) -> None:
    plain, checkpointed = (
        points(rows({**POINT, "precision": precision, "layout": f"mbs8 ac={ac}"}), []) for ac in ("False", "True")
    )
    word = "train.checkpoint_activations=true"
    assert all(word not in point.words for point in plain)
    assert [word in point.words for point in checkpointed] == [True]
