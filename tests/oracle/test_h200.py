"""Steps of one batch on an H200, predicted from the step of another batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from ddlbench.config.compose import configuration, configurations
from ddlbench.oracle.machine.machine import load
from ddlbench.oracle.measured.inputs import OneStep, from_one_step

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "2026-11-26-h200.md"
ROW = re.compile(r"^\| single \| (\d+) \| ([\d.]+) ms ", re.MULTILINE)
SETTINGS = {"resnet50": ("train.channels_last=true",), "gpt2_small": ()}


@pytest.fixture(autouse=True)
def composing() -> Iterator[None]:
    with configurations():
        yield


def measured(model: str) -> dict[int, float]:
    """Seconds of a step by batch."""
    _, resnet, gpt2 = re.split("^## (?:ResNet-50|GPT-2 small)$", PAGE.read_text(), flags=re.MULTILINE)
    section = resnet if model == "resnet50" else gpt2.partition("\n## ")[0]
    return {int(batch): float(milliseconds) / 1e3 for batch, milliseconds in ROW.findall(section)}


@pytest.mark.slow  # two models of full size are counted
@pytest.mark.parametrize(("model", "least"), [("resnet50", 16), ("gpt2_small", 1)])
def test_the_largest_batch_predicts_the_smaller_ones(model: str, least: int) -> None:
    """Within 20 %, and 7 % in the mean: the host that starts the kernels is not equally fast in all runs."""
    seconds = measured(model)
    words = ("+framework=single", f"+model={model}", "train.precision=bf16", *SETTINGS[model])
    config = configuration(*words, f"train.batch_per_gpu={max(seconds)}")
    computation = from_one_step(config, load("h200"), OneStep(seconds[max(seconds)]))
    errors = {batch: computation.step(batch) / measured_s - 1 for batch, measured_s in seconds.items()}
    assert min(errors) == least
    assert errors[max(errors)] == pytest.approx(0.0, abs=1e-6)
    sizes = [abs(error) for error in errors.values()]
    assert max(sizes) < 0.20, errors
    assert mean(sizes) < 0.07, errors
