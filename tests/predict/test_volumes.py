"""What a step sends by the equations is what the real adapters send, traced in a rehearsal."""

from __future__ import annotations

import pytest

from ddlbench.config.choices import choices
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.oracle.machine.machine import load
from ddlbench.oracle.measured.inputs import from_roofline
from ddlbench.oracle.predictor import Inputs, Prediction, predict, strategy
from ddlbench.oracle.strategies.traced import traced as trace
from ddlbench.predict.volumes import Volume, compared, dimension_of, distinct_ranks, lines
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


@pytest.mark.slow
@pytest.mark.parametrize("word", ["framework.sequence_parallel=true", "framework.parallel_loss=false"])
def test_the_knobs_of_tensor_send_what_the_equations_say(word: str) -> None:
    for item in volumes("tensor", "gpt2_small", word).values():
        assert abs(item.difference) < 0.01, item


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "model"),
    [("tensor", "gpt2_small"), ("hybrid", "gpt2_small"), ("tensor", "resnet50"), ("tensor", "vgg16")],
)
@pytest.mark.parametrize("value", ["blocks", "selective"])
def test_layers_that_run_again_send_again(framework: str, model: str, value: str) -> None:
    for item in volumes(framework, model, f"train.checkpoint_activations={value}").values():
        assert abs(item.difference) < 0.01, item


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "model", "more"),
    [("spatial", "resnet50", ()), ("tensor", "gpt2_small", ("framework.sequence_parallel=true",))],
)
def test_collectives_between_cheap_operators_are_sent_again(framework: str, model: str, more: tuple[str, ...]) -> None:
    """The head, a single layer, does not run again."""
    for item in volumes(framework, model, "train.checkpoint_activations=selective", *more).values():
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
    assert [(item.what, item.count, item.bytes_) for item in outcome.messages] == [
        ("all_reduce among 4 ranks", 1, reference.messages[0].bytes_)
    ]
    assert outcome.exposed_s == pytest.approx(reference.exposed_s)
    assert outcome.compute_s == pytest.approx(reference.compute_s)
    assert outcome.memory.weights == reference.memory.weights


def test_what_is_traced_is_not_compared_with_itself() -> None:
    message = {"what": "all_reduce among 4 ranks", "along": "", "count": 1, "bytes_": 8.0}
    row = Prediction("unknown", "resnet50", "h100", 4, "ok", "", messages=(message,))
    *_, last = lines([row])
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
