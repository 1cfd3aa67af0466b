"""Predicted bytes of a rank beside those that the real job holds, counted in a rehearsal of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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
RANKS = 4
CHECKPOINTED, BF16 = ("train.checkpoint_activations=true",), ("train.precision=bf16",)
# docs/oracle.md lists what is off, and what has not been compared yet.
CASES = [
    *(("ddp", model, words) for model in MODELS for words in ((), CHECKPOINTED, BF16)),
    *(("1f1b", model, CHECKPOINTED) for model in MODELS),
    *(("fsdp", model, CHECKPOINTED) for model in MODELS),
    *(("fsdp", model, ()) for model in ("vgg16", "resnet50")),
    *(("zero1", model, ()) for model in ("vgg16", "gpt2_small")),
    *(("zero0", model, ()) for model in ("vgg16", "gpt2_small")),
    *(("local_sgd", model, ()) for model in ("vgg16", "gpt2_small")),
    *((name, "vgg16", ()) for name in ("tensor", "gpipe", "1f1b", "interleaved", "hybrid")),
    *((("horovod", "vgg16", ()),) if why_no_horovod() is None else ()),
]


def configured(framework: str, model: str, *more: str) -> Config:
    """Four samples a GPU."""
    hybrid = ("framework.pp=2", "framework.tp=2") if framework == "hybrid" else ()
    words = (f"+framework={framework}", f"+model={model}", *MODELS[model], "train.batch_per_gpu=4")
    with configurations():
        return configuration(*words, *hybrid, *more)


def predicted(config: Config) -> Prediction:
    known = Known(MACHINE, lambda own, _: from_one_step(own, MACHINE, OneStep(1.0)))
    row = predict(config, config.framework, RANKS, known)
    assert row.status == "ok", row.reason
    return row


def fullest(config: Config, row: Prediction) -> dict[str, int]:
    """Bytes of the rank with the highest peak, of those that differ: one of each stage, or of each shard."""
    step = 1 if "zero" in row.framework else row.gpus // row.layout.get("pp", 1)
    found = [rehearsed(config, rank, row.gpus) for rank in range(0, row.gpus, step)]
    return max(found, key=lambda memory: memory["peak"])


def rehearsed(config: Config, rank: int, ranks: int) -> dict[str, int]:
    found: Rehearsal = rehearse(config, Launch("torchrun", rank, ranks, rank, ranks), torch.device("cpu"))
    assert found.error is None
    return {name: bytes_ or 0 for name, bytes_ in (found.memory or {}).items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("framework", "model", "words"), CASES)
def test_predicted_bytes_are_those_that_the_job_holds(framework: str, model: str, words: tuple[str, ...]) -> None:
    config = configured(framework, model, *words)
    row = predicted(config)
    counted = fullest(config, row)
    assert row.memory is not None
    for part, name in {"weights": "parameters", "optimizer": "optimizer"}.items():
        assert row.memory[part] == pytest.approx(counted[name], rel=TOLERANCE), part
    assert row.memory_bytes == pytest.approx(counted["peak"], rel=TOLERANCE)
