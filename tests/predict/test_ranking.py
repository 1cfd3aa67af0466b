"""The best of the predictions, what the bands cannot separate from it, and which runs decide."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from ddlbench.config.compose import configuration
from ddlbench.oracle.predictor import Prediction
from ddlbench.predict.ranking import command, conclusion, fitting, regret, separated, table


def predicted(framework: str, gpus: int, rate: float, fits: bool = True) -> Prediction:
    return Prediction(framework, "m", "c", gpus, "ok", "why", samples_per_s=rate, memory_bytes=1.0, fits=fits)


def banded(framework: str, step_s: float, low: float, high: float) -> Prediction:
    """The prediction of a step of 100 samples on 36 GPUs: 100 steps of 1 s are one GPU-hour."""
    return Prediction(
        framework, "m", "c", 36, "ok", "why", step_s=step_s, samples_per_s=100 / step_s, low_80_s=low, high_80_s=high
    )


def test_without_bands_the_conclusion_names_what_is_within_3_percent() -> None:
    """On the same GPUs, of what fits."""
    result = [
        predicted("ddp", 4, 97.0), predicted("fsdp", 4, 100.0), predicted("zero3", 4, 96.9),
        predicted("zero1", 8, 99.0), predicted("tensor", 4, 99.0, fits=False),
    ]  # fmt: skip
    assert conclusion(fitting(result), "") == ["best: fsdp () at 4 GPUs, 100 samples/s: why; within 3% of it: ddp"]
    assert conclusion(fitting(result[:1]), "") == ["best: ddp () at 4 GPUs, 97 samples/s: why"]
    assert conclusion(fitting(result, max_gpus=2), " with 2") == ["nothing that fits with 2"]


def test_what_rounding_leaves_of_equal_seconds_is_0_in_the_table() -> None:
    row = replace(banded("zbv", 1.0, 0.9, 1.2), compute_s=0.9, bubble_s=1.1e-16, data_s=2.5e-6)
    assert " 900 ms " in table([row])
    assert " 0 ms " in table([row])
    assert " 0.0025 ms " in table([row])
    assert "e-" not in table([row])


def test_bands_that_overlap_do_not_separate() -> None:
    """zero3 may be faster than ddp's prediction, horovod overlaps but cannot be, tensor is slower in any case."""
    best, may = banded("ddp", 1.0, 0.95, 1.1), banded("zero3", 1.05, 0.9, 1.2)
    slower, apart = banded("horovod", 1.2, 1.08, 1.3), banded("tensor", 2.0, 1.5, 2.5)
    assert [separated(best, row) for row in (may, slower, apart)] == [False, False, True]
    head, tie, cost, runs = conclusion(fitting([apart, slower, may, best]), "")
    assert head == "best: ddp () at 36 GPUs, 100 samples/s: why"
    assert tie.endswith("do not separate it from zero3, horovod")
    assert cost.startswith(f"choosing ddp now costs {regret([best, may, slower]):.1%} of a step")
    assert runs == "to decide, run 100 steps of ddp, zero3 at 36 GPUs: 2 GPU-hours beside start and warm-up"


def test_frameworks_of_the_same_equations_count_once() -> None:
    """deepspeed is zero1; between these two alone no run decides."""
    best, same, other = (banded(name, s, 0.9, 1.2) for name, s in (("zero1", 1.0), ("deepspeed", 1.0), ("ddp", 1.05)))
    _, tie, cost, runs = conclusion(fitting([best, same, other]), "")
    assert tie.endswith("do not separate it from deepspeed, ddp")
    assert cost.startswith(f"choosing zero1 now costs {regret([best, other]):.1%} of a step")
    assert runs.startswith("to decide, run 100 steps of zero1, ddp at 36 GPUs: ")
    assert conclusion(fitting([best, same]), "")[1:] == [tie.replace("deepspeed, ddp", "deepspeed")]


def test_equal_plans_of_one_framework_are_named_and_count_once() -> None:
    """The best plan is ddp's with micro batches of 16; of its four others three are named."""
    sizes = {16: 1.0, 8: 1.01, 4: 1.02, 2: 1.03, 1: 1.04}
    plans = [replace(banded("ddp", s, 0.9, 1.2), settings={"train.micro_batch": size}) for size, s in sizes.items()]
    other = replace(banded("fsdp", 1.05, 0.9, 1.2), settings={"train.micro_batch": 4}, layout={"dp": 36})
    _, tie, cost, runs = conclusion(fitting([*plans, other]), "")
    named = "ddp (micro batch 8; micro batch 4; micro batch 2; and 1 more), fsdp (dp36 micro batch 4)"
    assert tie.endswith(f"do not separate it from {named}")
    assert cost.startswith(f"choosing ddp now costs {regret([plans[0], other]):.1%} of a step")
    assert runs.startswith("to decide, run 100 steps of ddp, fsdp at 36 GPUs: ")


@pytest.mark.parametrize("recompute", [True, False, ["h.0", "h.1"], "every:2"])
def test_a_shell_runs_the_command_of_a_plan(recompute: object) -> None:
    """A list is one word for it."""
    settings = {"train.micro_batch": 4, "train.checkpoint_activations": recompute}
    words = shlex.split(command(replace(predicted("ddp", 4, 1.0), settings=settings)))
    train = configuration(*words, "+model=gpt2_small", "model.n_layer=2").train
    assert (train.micro_batch, train.checkpoint_activations) == (4, recompute)


def test_separate_bands_end_with_the_best() -> None:
    assert len(conclusion(fitting([banded("ddp", 1.0, 0.9, 1.1), banded("fsdp", 2.0, 1.8, 2.2)]), "")) == 1


def test_the_expected_loss_by_hand() -> None:
    """Two equal frameworks with a band of e^+-0.12816, so a standard deviation of 0.1: the logarithm of the faster one
    lies 0.1 / sqrt(pi) = 5.64 % below the middle in the mean. Against itself alone a framework loses nothing."""
    same = [banded(name, 1.0, 0.8797, 1.1367) for name in ("ddp", "fsdp")]
    assert regret(same) == pytest.approx(0.0595, abs=0.003)
    assert regret(same[:1]) == 0
    assert regret([same[0], banded("tensor", 9.0, 8.0, 10.0)]) == pytest.approx(0, abs=1e-6)
