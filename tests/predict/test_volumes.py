"""The counts of each block, by hand; what a step sends by the equations is what the real adapters send."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddlbench.config.choices import choices
from ddlbench.counts.counting import count
from ddlbench.counts.counts import Line, Work
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.models.gpt2 import GPT2
from ddlbench.oracle.machine.machine import load
from ddlbench.oracle.measured.inputs import from_roofline
from ddlbench.oracle.predictor import Inputs, Prediction, predict, strategy
from ddlbench.oracle.strategies.traced import traced as trace
from ddlbench.oracle.timing.computation import ANY, Computation
from ddlbench.predict.__main__ import block_lines, main
from ddlbench.predict.traces import Volume, compared, dimension_of, distinct_ranks, volume_lines
from ddlbench.recipe.optimizers import optimizers
from ddlbench.rehearsal.rehearse import Rehearsal, Sent
from tests.oracle.made import setting as made_setting
from tests.support.libraries import why_no_horovod
from tests.support.rehearsals import OF_IMAGES, OF_TEXT, WORLD, config

# One process sends nothing, and a parameter server between hosts, whose links no cluster file has.
LEFT_OUT = {"single", "parameter_server", *(["horovod"] if why_no_horovod() else [])}
FRAMEWORKS = [name for name in choices("framework") if name not in LEFT_OUT]


def volumes(framework: str, model: str, *more: str) -> dict[str, Volume]:
    """By dimension."""
    made, machine = config(framework, model, *more), load("h100")
    inputs = Inputs(machine, lambda given: from_roofline(given, machine))
    row = predict(made, WORLD, inputs)
    assert row.status == "ok", row.reason
    return {item.dimension: item for item in compared(row, distinct_ranks(row))}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", "gpt2_small"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_equations_send_what_the_adapters_send(framework: str, model: str) -> None:
    if framework in (OF_IMAGES if model == "gpt2_small" else OF_TEXT):
        pytest.skip("for models of the other kind")
    result = volumes(framework, model)
    assert result
    for item in result.values():
        assert item.traced > 0
        assert abs(item.difference) < 0.01, item


def test_parts_of_images_send_what_the_equations_say() -> None:
    """Halos of the rank that sends most, statistics of BatchNorm, the last images, the batch and the gradients."""
    result = volumes("spatial", "resnet50")
    assert list(result) == ["sp", "dp"]
    assert all(item.expected == pytest.approx(item.traced, rel=1e-9) for item in result.values())


def test_shards_of_a_pipeline_are_reduced_and_gathered_and_a_tied_weight_is_summed_by_shards() -> None:
    result = volumes("1f1b", "gpt2_small", "framework.pp=2", "framework.dp=4", "framework.sharded=true")
    assert set(result) == {"pp", "dp", "ends"}
    assert all(item.expected == pytest.approx(item.traced, rel=1e-9) for item in result.values())


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["zero1", "zero2", "zero3"])
def test_zero_gathers_weights_in_16_bits_and_reduces_gradients_in_32(framework: str) -> None:
    """Half of all bytes are those of weights, which are half as many."""
    plain = volumes(framework, "gpt2_small")["dp"]
    in_16_bits = volumes(framework, "gpt2_small", "train.precision=bf16", "framework.mixed_precision=weights")["dp"]
    assert abs(in_16_bits.difference) < 0.01
    assert in_16_bits.traced == pytest.approx(0.75 * plain.traced, rel=0.01)


BLOCKS, SELECTIVE = "train.checkpoint_activations=blocks", "train.checkpoint_activations=selective"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "model", "word"),
    [
        ("tensor", "gpt2_small", "framework.sequence_parallel=true"),
        ("tensor", "gpt2_small", "framework.parallel_loss=false"),
        *(("tensor", model, word) for model in ("gpt2_small", "resnet50", "vgg16") for word in (BLOCKS, SELECTIVE)),
        *(("hybrid", "gpt2_small", word) for word in (BLOCKS, SELECTIVE)),
    ],
)
def test_knobs_of_tensor_and_layers_that_run_again_send_what_the_equations_say(
    framework: str, model: str, word: str
) -> None:
    for item in volumes(framework, model, word).values():
        assert abs(item.difference) < 0.01, item


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "model", "more"),
    [("spatial", "resnet50", ()), ("tensor", "gpt2_small", ("framework.sequence_parallel=true",))],
)
def test_collectives_between_cheap_operators_are_sent_again(framework: str, model: str, more: tuple[str, ...]) -> None:
    """The head, a single layer, does not run again."""
    for item in volumes(framework, model, SELECTIVE, *more).values():
        assert item.expected == pytest.approx(item.traced, rel=1e-9), item


def test_replicas_send_their_gradients_once() -> None:
    result = volumes("ddp", "gpt2_small")
    assert list(result) == ["dp"]
    numbers = sum(parameter.numel() for parameter in config("ddp", "gpt2_small").model.build().parameters())
    assert result["dp"] == Volume("dp", 4 * numbers, 4 * numbers)


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


GPT2_TINY = GPT2("gpt2_small", n_layer=2, n_embd=16, n_head=2, vocab_size=64, seq_len=8)


def test_the_flops_grow_with_the_samples_and_a_part_of_the_bytes_does() -> None:
    """14 GFLOP and 5 GB for each of 3 samples, and 100 GB for all. If the peaks of the device are not known, nothing is
    said to limit them."""
    moved = Line(np.array([100e9, 0.0]), np.array([2e9, 3e9]))
    work, counts = Work(np.array([10e9, 4e9]), moved, np.array([True, False])), count(GPT2_TINY, "fp32", "cpu")
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
