"""Replicas x pipelines x parts on one mesh; the rest of what they train alike is in tests/equality/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.vgg import VGG
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.equality.distances import TOLERANCES, assert_equal, distance
from tests.support.broken import CountedTwice
from tests.support.changed_job import Loaded
from tests.support.equal import make_job, overflow, ready, train_cases
from tests.support.jobs import ranks, refused, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case, Outcome, reference

GPT = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)
IMAGES = VGG("vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=7, dropout=0.0)
TEXT = Case("gpt2", GPT, clip_norm=0.5, global_batch=24, micro_batch=2)
VGG_CASE = Case("vgg", IMAGES, clip_norm=0.5, global_batch=24, micro_batch=2)
WITHIN_A_CLASSIFIER = [14, 2]  # the last stage begins behind a layer that gives each rank its own features


class LoadedPipeline(Loaded, Pipeline): ...


KNOBS: dict[str, tuple[Case, Pipeline]] = {
    "parts": (TEXT, Pipeline(schedule="1f1b", tp=2)),
    "shards": (TEXT, Pipeline(schedule="1f1b", dp=2, sharded=True)),
    "shards of parts": (TEXT, Pipeline(dp=2, tp=2, sharded=True)),
    "parts, looped": (TEXT, Pipeline(schedule="interleaved", tp=2, virtual_stages=2)),
    "parts, backward in halves": (TEXT, Pipeline(schedule="zero_bubble", tp=2)),
    "shards, looped": (TEXT, Pipeline(schedule="interleaved", dp=2, sharded=True)),
    "shards, backward in halves": (TEXT, Pipeline(schedule="zero_bubble", dp=2, sharded=True)),
    "parts, on a V": (TEXT, Pipeline(schedule="zbv", tp=2, virtual_stages=2)),
    "shards, on a V": (
        replace(TEXT, model=replace(GPT, tie_weights=False)),
        Pipeline(schedule="dualpipev", dp=2, virtual_stages=2, sharded=True),
    ),
    "checkpointed": (replace(TEXT, checkpoint_activations=True), Pipeline(tp=2)),
    "shards, checkpointed": (replace(TEXT, checkpoint_activations=True), Pipeline(dp=2, sharded=True)),
    "cut between column and row": (VGG_CASE, Pipeline(tp=2, balance=WITHIN_A_CLASSIFIER)),
    "loaded": (TEXT, LoadedPipeline(tp=2)),
    "shards, loaded": (TEXT, LoadedPipeline(dp=2, sharded=True)),
    "bf16": (replace(TEXT, precision="bf16"), Pipeline(tp=2)),
    "shards, bf16": (replace(TEXT, precision="bf16"), Pipeline(dp=2, sharded=True)),
}


def train_knobs() -> list[Outcome]:
    return train_cases([*KNOBS.values(), (TEXT, CountedTwice(tp=2))])


def places() -> list[tuple[dict[str, int], int, bool, bool]]:
    """Coordinates, replica, whether it reads and whether it reports, for two meshes."""
    result: list[tuple[dict[str, int], int, bool, bool]] = []
    for framework in (Pipeline(tp=2), Pipeline(dp=2, tp=2)):
        with ready(framework, make_job(TEXT)) as (trainer, _):
            place = trainer.place
            result.append((dict(place.coordinates), place.data_rank, place.reads_data, place.reports))
    return result


def dropped_alike() -> list[bool]:
    """Whether the ranks that share layers stay alike in what both have, though each step drops units."""
    with ready(Pipeline(tp=2), make_job(replace(TEXT, model=replace(GPT, dropout=0.3)))) as (trainer, batch):
        for _ in range(2):
            trainer.step(batch)
        whole = [tensor for name, tensor in trainer.model.state_dict().items() if name not in trainer.blocks.splits]
        copies = [[torch.empty_like(tensor) for _ in range(2)] for tensor in whole]
        for tensor, both in zip(whole, copies, strict=True):
            dist.all_gather(both, tensor, group=trainer.groups.part.group)
    return [torch.equal(*both) for both in copies]


def overflows() -> list[tuple[int, bool, int, bool]]:
    here = make_job(replace(TEXT, precision="fp16"))
    return [overflow(framework, here) for framework in (Pipeline(tp=2), Pipeline(dp=2, sharded=True))]


def in_fp16(fused: bool) -> tuple[int, bool, int, bool]:
    """Of a pipeline, whose first stage has no loss that its scaler would see."""
    adamw = partial(make_optimizer, OptimizerConfig("adamw", lr=0.01, fused=fused))
    return overflow(Pipeline(), replace(make_job(replace(TEXT, precision="fp16")), optimizer=adamw))


def shares() -> tuple[int, int]:
    """Elements of the momentum of this rank's parameters, in shards and whole. An evaluation leaves no
    gathered weights: torch's schedule frees them."""
    result: list[int] = []
    for sharded in (True, False):
        with ready(Pipeline(dp=2, sharded=sharded), make_job(TEXT)) as (trainer, batch):
            trainer.step(batch)
            trainer.evaluate(batch)
            assert all(isinstance(weight, DTensor) == sharded for weight in trainer.model.parameters())
            momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
            result.append(sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in momenta))
    return result[0], result[1]


WORK: dict[str, Callable[[], Any]] = {
    "trained": train_knobs, "places": places, "dropped_alike": dropped_alike, "overflows": overflows, "shares": shares,
}  # fmt: skip


@cache
def on_four_ranks() -> list[dict[str, Any]]:
    """What each piece of work returned, by rank: one set of processes does it all."""
    return run_ranks(4, results, WORK, timeout_s=280)


@pytest.mark.slow
def test_knobs_train_what_one_process_trains() -> None:
    """Clipped: the norm is that of the whole gradient, what several ranks have counted once."""
    outcomes = on_four_ranks()[0]["trained"]
    for (name, (case, framework)), result in zip(KNOBS.items(), outcomes[:-1], strict=True):
        expected, tolerance = reference(case, framework.layout(4).dp), TOLERANCES[case.model.name, case.precision]
        assert distance(result.weights, expected) <= tolerance.weights, name
        assert_equal(result, expected, tolerance)
    assert distance(outcomes[-1].weights, reference(TEXT, 1)) > 0.01  # the central test would notice


@pytest.mark.slow
def test_neighbours_share_layers_and_other_ranks_are_stages_or_replicas() -> None:
    by_rank = [rank["places"] for rank in on_four_ranks()]
    assert [parts for parts, _ in by_rank] == [
        ({"dp": 0, "pp": 0, "tp": 0}, 0, True, False),
        ({"dp": 0, "pp": 0, "tp": 1}, 0, False, False),
        ({"dp": 0, "pp": 1, "tp": 0}, 0, True, True),
        ({"dp": 0, "pp": 1, "tp": 1}, 0, False, False),
    ]
    assert [replicas for _, replicas in by_rank] == [
        ({"dp": 0, "pp": 0, "tp": 0}, 0, True, True),
        ({"dp": 0, "pp": 0, "tp": 1}, 0, False, False),
        ({"dp": 1, "pp": 0, "tp": 0}, 1, True, True),
        ({"dp": 1, "pp": 0, "tp": 1}, 1, False, False),
    ]


@pytest.mark.slow
def test_ranks_that_share_layers_drop_the_same_units() -> None:
    assert all(all(rank["dropped_alike"]) for rank in on_four_ranks())


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_a_pipeline_in_fp16_makes_or_skips_an_update_on_every_stage(fused: bool) -> None:
    assert run_ranks(2, in_fp16, fused) == [(1, False, 2, True)] * 2


@pytest.mark.slow
def test_all_ranks_skip_an_update_that_overflows_on_one() -> None:
    assert [rank["overflows"] for rank in on_four_ranks()] == [[(1, False, 2, True)] * 2] * 4


@pytest.mark.slow
def test_replicas_hold_a_shard_of_the_optimizer_state() -> None:
    for sharded, whole in (rank["shares"] for rank in on_four_ranks()):
        assert sharded == pytest.approx(whole / 2, rel=0.05)


@pytest.mark.slow
def test_replicas_pipelines_and_parts_at_once() -> None:
    case = replace(TEXT, global_batch=48)
    frameworks = [Pipeline(schedule="1f1b", dp=2, tp=2, sharded=sharded) for sharded in (False, True)]
    for result in run_ranks(8, train_cases, [(case, framework) for framework in frameworks], timeout_s=280)[0]:
        assert_equal(result, reference(case, 2), TOLERANCES["gpt2", "fp32"])
        assert torch.equal(result.weights["embed.wte.weight"], result.weights["head.weight"])


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    Pipeline(dp=2, tp=2, sharded=True).check(ranks(8))
    with pytest.raises(UserError, match=r"dp=2 x framework\.tp=3 x framework\.pp=null does not fill 8 ranks: choose "):
        Pipeline(dp=2, tp=3).check(ranks(8))
    refused(Pipeline("hybrid", tp=8), ranks(16), r"hybrid: 8 ranks cannot share the 4 heads of h0\.attn: .*tp=4 .*dp=2")
    refused(Pipeline(tp=2), ranks(2, compile=True), r"train\.compile=false")
    fused = OptimizerConfig("sgd", lr=0.1, fused=True)
    with pytest.raises(Unsupported, match=r"fused SGD does not support shards"):
        Pipeline(dp=2, sharded=True).check(ranks(2, optimizer=lambda named: make_optimizer(fused, named)))
    wrong_knob(Pipeline, r"framework\.tp=0", tp=0)
