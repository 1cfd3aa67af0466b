"""Predicted bytes of a rank beside those that the real job holds, counted in a rehearsal of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration, configurations
from ddlbench.config.schema import Config
from ddlbench.oracle.inputs import OneStep, from_one_step
from ddlbench.oracle.machine import Link, load
from ddlbench.oracle.predictor import Known, Prediction, predict
from ddlbench.ranks.launch import Launch
from ddlbench.run.rehearsal.rehearse import Rehearsal, rehearse
from tests.support.libraries import why_no_horovod
from tests.support.rehearsals import MODELS

MACHINE = replace(load("local"), links=(Link("made", 1e-6, 1e9),) * 2, cores=2)
TOLERANCE = 0.05
# What the equations do not know, with the reasons in docs/oracle.md ("Memory that is off").
OFF = {("zero3", ""): 0.20, ("zero_bubble", "gpt2_small"): 0.35, ("gpipe", "gpt2_small"): 0.08}
NAMES = [name for name in choices("framework") if not (name == "horovod" and why_no_horovod())]
FAMILIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "tensor", "gpipe", "1f1b", "hybrid")
VARIANTS = {
    "checkpointed": ("train.checkpoint_activations=true",),
    "accumulated": ("train.micro_batch=1",),
    "bf16": ("train.precision=bf16",),
}


def configured(framework: str, model: str, ranks: int, *more: str) -> Config:
    """Four samples a GPU."""
    pipedream = ("framework.dp=2",) if framework == "pipedream" else ()
    hybrid = ("framework.pp=2", f"framework.tp={min(2, ranks // 2)}", f"framework.dp={max(1, ranks // 4)}")
    words = (f"+framework={framework}", f"+model={model}", *MODELS[model], "train.batch_per_gpu=4")
    with configurations():
        return configuration(*words, *(hybrid if framework == "hybrid" else pipedream), *more)


def predicted(config: Config, ranks: int) -> Prediction:
    known = Known(MACHINE, lambda own, _: from_one_step(own, MACHINE, OneStep(1.0)))
    row = predict(config, config.framework, ranks, known)
    if row.status != "ok":
        pytest.skip(row.reason)
    return row


def fullest(config: Config, row: Prediction) -> dict[str, int]:
    """Bytes of the rank with the highest peak, of those that differ: one of each stage, or of each shard."""
    step = 1 if "zero" in row.framework else row.gpus // row.layout.get("pp", 1)
    found = [rehearsed(config, rank, row.gpus) for rank in range(0, row.gpus, step)]
    return max(found, key=lambda memory: memory["peak"])


def rehearsed(config: Config, rank: int, ranks: int) -> dict[str, int]:
    found: Rehearsal = rehearse(config, Launch("torchrun", rank, ranks, rank, ranks), torch.device("cpu"))
    assert found.error is found.left_out is None
    return {name: bytes_ or 0 for name, bytes_ in (found.memory or {}).items()}


def check(framework: str, model: str, ranks: int, *more: str) -> None:
    config = configured(framework, model, ranks, *more)
    row = predicted(config, ranks)
    counted = fullest(config, row)
    assert row.memory is not None
    off = OFF.get((framework, model), OFF.get((framework, ""), TOLERANCE))
    for part, name in {"weights": "parameters", "optimizer": "optimizer"}.items():
        assert row.memory[part] == pytest.approx(counted[name], rel=off), part
    assert row.memory_bytes == pytest.approx(counted["peak"], rel=off)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("framework", NAMES)
def test_predicted_bytes_are_those_that_the_job_holds(framework: str, model: str) -> None:
    check(framework, model, 4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("framework", FAMILIES)
def test_they_are_at_other_numbers_of_ranks(framework: str, model: str, ranks: int) -> None:
    check(framework, model, ranks)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("framework", ["single", *FAMILIES])
def test_they_are_with_checkpoints_accumulation_and_bf16(framework: str, model: str, variant: str) -> None:
    check(framework, model, 1 if framework == "single" else 4, *VARIANTS[variant])
