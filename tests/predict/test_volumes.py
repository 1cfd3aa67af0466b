"""The counts of each block, by hand; what a step sends by the equations is what the real adapters send."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddlbench.config.choices import choices
from ddlbench.counts.counting import count
from ddlbench.counts.counts import Line, Work
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.oracle.measured.inputs import OneStep
from ddlbench.oracle.predictor import Prediction, strategy
from ddlbench.oracle.strategies.traced import traced as trace
from ddlbench.oracle.timing.computation import ANY, Computation
from ddlbench.predict import rows as command
from ddlbench.predict.__main__ import block_lines, main
from ddlbench.predict.traces import Volume, compared, dimension_of, distinct_ranks, volume_lines
from ddlbench.recipe.optimizers import optimizers
from ddlbench.rehearsal.rehearse import Rehearsal, Sent
from tests.oracle.made import GPT, by_one_step, by_roofline
from tests.oracle.made import setting as made_setting
from tests.oracle.memory_grid import MACHINE
from tests.support.libraries import why_no_horovod
from tests.support.rehearsals import OF_IMAGES, OF_TEXT, WORLD, config

# One process sends nothing, and a parameter server between hosts, whose links no cluster file has.
LEFT_OUT = {"single", "parameter_server", *(["horovod"] if why_no_horovod() else [])}
PLAIN = [
    (framework, model)
    for model in ("resnet50", "gpt2_small")
    for framework in choices("framework")
    if framework not in LEFT_OUT | (OF_IMAGES if model == "gpt2_small" else OF_TEXT)
]
SEQUENCE, SELECTIVE = "framework.sequence_parallel=true", "train.checkpoint_activations=selective"
BF16 = "train.precision=bf16"
AGAIN = ("train.checkpoint_activations=blocks", SELECTIVE)
KNOBS = [
    ("tensor", "gpt2_small", SEQUENCE),
    ("tensor", "gpt2_small", "framework.parallel_loss=false"),
    *(("tensor", model, word) for model in ("gpt2_small", "resnet50", "vgg16") for word in AGAIN),
    *(("hybrid", "gpt2_small", word) for word in AGAIN),
    ("tensor", "gpt2_small", SEQUENCE, BF16),
    *((framework, "resnet50", BF16) for framework in ("tensor", "channel", "spatial")),
    ("hybrid", "gpt2_small", BF16),
]


def volumes(framework: str, model: str, *more: str) -> dict[str, Volume]:
    """By dimension."""
    row = by_roofline(config(framework, model, *more), WORLD)
    assert row.status == "ok", row.reason
    return {item.dimension: item for item in compared(row, distinct_ranks(row))}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PLAIN, *KNOBS], ids="-".join)
def test_the_equations_send_what_the_adapters_send(case: tuple[str, ...]) -> None:
    result = volumes(*case)
    assert result
    for item in result.values():
        assert item.traced > 0
        assert abs(item.difference) < 0.01, item


@pytest.mark.parametrize(
    ("case", "dimensions"),
    [
        (("tensor", "gpt2_small"), ["tp", "dp"]),
        (("spatial", "resnet50"), ["sp", "dp"]),
        (("1f1b", "gpt2_small", "framework.pp=2", "framework.dp=4", "framework.sharded=true"), ["pp", "dp", "ends"]),
        (("fsdp", "resnet50", "train.micro_batch=2"), ["dp"]),
        (("tensor", "gpt2_small", BF16), ["tp", "dp"]),
        pytest.param(("spatial", "resnet50", SELECTIVE), ["sp", "dp"], marks=pytest.mark.slow),
        pytest.param(("tensor", "gpt2_small", SELECTIVE, SEQUENCE), ["tp", "dp"], marks=pytest.mark.slow),
    ],
    ids=[
        "layers",
        "parts-of-images",
        "shards-of-a-pipeline",
        "micro-batches-of-shards",
        "layers-in-bf16",
        "images-again",
        "layers-again",
    ],
)
def test_every_byte_is_in_the_equations(case: tuple[str, ...], dimensions: list[str]) -> None:
    """Of parts of images: halos of the rank that sends most, statistics of BatchNorm, the last images, the batch and
    the gradients. Shards of a pipeline are reduced and gathered, and a tied weight is summed by shards. Collectives
    between cheap operators are sent again; those of the head, a single layer, are not."""
    result = volumes(*case)
    assert set(result) == set(dimensions)
    assert all(item.expected == pytest.approx(item.traced, rel=1e-9) for item in result.values())


@pytest.mark.parametrize("more", [(), (SEQUENCE,)], ids=["all-reduce", "reduce-scatter"])
def test_ranks_on_the_cpu_add_bf16_in_fp32(more: tuple[str, ...]) -> None:
    row = by_one_step(config("tensor", "gpt2_small", BF16, *more), WORLD, MACHINE, OneStep(1.0))
    assert row.status == "ok", row.reason
    result = compared(row, distinct_ranks(row))
    assert {item.dimension for item in result} == {"tp", "dp"}
    assert all(item.expected == pytest.approx(item.traced, rel=1e-9) for item in result)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["zero1", "zero2", "zero3"])
def test_zero_gathers_weights_in_16_bits_and_reduces_gradients_in_32(framework: str) -> None:
    """Half of all bytes are those of weights, which are half as many."""
    plain = volumes(framework, "gpt2_small")["dp"]
    in_16_bits = volumes(framework, "gpt2_small", "train.precision=bf16", "framework.mixed_precision=weights")["dp"]
    assert abs(in_16_bits.difference) < 0.01
    assert in_16_bits.traced == pytest.approx(0.75 * plain.traced, rel=0.01)


class Unknown(LocalSGD):
    """Averages weights after every step; no equation knows it."""

    name = "unknown"

    def __init__(self) -> None:
        super().__init__(local_steps=1)


def test_a_framework_without_equations_is_predicted_from_what_it_sends() -> None:
    """It computes all of its samples and sends its weights, the whole of them exposed."""
    setting = made_setting(4, 8)
    outcome, reference = trace(Unknown(), setting), strategy(LocalSGD(local_steps=1), setting)
    (sent,) = outcome.messages
    assert (sent.what, sent.count, sent.bytes_) == ("all_reduce among 4 ranks", 1, reference.messages[0].bytes_)
    assert outcome.exposed_s == pytest.approx(reference.exposed_s)
    assert outcome.compute_s == pytest.approx(reference.compute_s)
    assert outcome.memory.weights == reference.memory.weights


def test_what_is_traced_is_not_compared_with_itself() -> None:
    message = {"what": "all_reduce among 4 ranks", "along": "", "count": 1, "bytes_": 8.0}
    row = Prediction("unknown", "resnet50", "h100", 4, "ok", "", messages=(message,))
    *_, last = volume_lines([row])
    assert last == "  unknown at 4: the messages are traced: it has no equations"


def test_dimensions_of_groups() -> None:
    """Stages of dp 2 x tp 2: parts are neighbours, replicas two apart, stages four, the ends of 3 stages eight."""
    layout = {"dp": 2, "tp": 2, "pp": 3}
    groups = {(2, 1): "tp", (2, 2): "dp", (2, 8): "ends"}
    for (ranks, stride), name in groups.items():
        assert dimension_of(Sent("all_reduce", ranks, stride, 1, 8), layout) == name
    assert dimension_of(Sent("send", 3, 4, 1, 8), layout) == "pp"
    assert dimension_of(Sent("all_gather", 4, 1, 1, 8), {"dp": 8, "shards": 4}) == "dp"


def test_what_is_received_is_counted_where_it_is_sent() -> None:
    both = [Sent("send", 2, 1, 3, 30.0), Sent("recv", 2, 1, 3, 30.0)]
    row = Prediction("gpipe", "resnet50", "h100", 2, "ok", "", layout={"dp": 1, "tp": 1, "pp": 2})
    (volume,) = compared(row, [Rehearsal("gpipe", "resnet50", 2, "cpu", 0, collectives=tuple(both))])
    assert (volume.dimension, volume.traced) == ("pp", 30.0)


def test_the_flops_grow_with_the_samples_and_a_part_of_the_bytes_does() -> None:
    """14 GFLOP and 5 GB for each of 3 samples, and 100 GB for all. If the peaks of the device are not known, nothing is
    said to limit them."""
    moved = Line(np.array([100e9, 0.0]), np.array([2e9, 3e9]))
    work, counts = Work(np.array([10e9, 4e9]), moved, np.array([True, False])), count(GPT, "fp32", "cpu")
    counts = replace(counts, blocks=(replace(counts.blocks[0], forward=work, backward=work),))
    _, _, _, *rows, last = block_lines(Computation(counts, ANY, optimizers["adamw"].costs, "none"), 3)
    assert [row.split()[1:] for row in rows] == [[pass_, "42", "115", "0.365"] for pass_ in ("forward", "backward")]
    assert last.startswith("the peaks of the device are not known")


def test_equal_blocks_are_one_line_for_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of 64 numbers for 128 tokens move far more bytes than an A100 can read while it computes."""
    words = [
        "+model=gpt2_small", "+framework=ddp", "model.n_layer=4", "model.n_embd=64", "model.n_head=4",
        "model.seq_len=64", "model.vocab_size=512", "cluster=juwels_booster", "gpus=2", "train.batch_per_gpu=2",
    ]  # fmt: skip
    assert main([*words, "--blocks"]) == 0
    said = capsys.readouterr().out.splitlines()
    first = said.index("work of each block for 2 samples, from the operations of the model:")
    table = [line.split("  ") for line in said[first:]]
    names = [row[0] for row in table if row[-1] in ("memory", "computing")]
    assert len(names) == 2 * len(set(names))
    assert any(" to " in name for name in names)
    assert {row[-1] for row in table[3:-1] if len(row) > 3} >= {"memory"}


def test_the_work_of_blocks_is_printed_beside_frameworks_that_lack_a_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without +framework. `single` has no framework.dp."""
    monkeypatch.setattr(command, "choices", lambda _: ["single", "tensor"])
    words = ["+model=gpt2_small", "model.n_layer=2", "model.n_embd=64", "model.n_head=4", "model.seq_len=64"]
    words += ["model.vocab_size=512", "cluster=juwels_booster", "gpus=2", "framework.dp=1", "framework.tp=2"]
    assert main([*words, "--blocks"]) == 0
    said = capsys.readouterr().out
    assert "refused: single at 2: framework.dp does not exist" in said
    assert said.index("work of each block for ") < said.index("best: tensor")
