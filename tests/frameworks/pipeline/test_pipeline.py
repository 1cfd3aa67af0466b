"""Pipelines' places, states, evaluation and refusals, on meshes with replicas and with parts of layers; that they train
what one process trains is tested in tests/equality/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ddlbench.errors import Unsupported
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.schedules import V_SHAPED
from ddlbench.job import Place
from ddlbench.ranks.fake.fake import fake_world
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.equality.cases import MODELS
from tests.support.equal import make_job, outputs, overflow, ready
from tests.support.jobs import CPU, job, ranks, refused, two_ranks, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case

GPT: Any = MODELS["gpt2"]  # 5 blocks
CASE = Case("gpt2", GPT)  # 12 samples an update
MESH = replace(CASE, global_batch=24, micro_batch=2)


def layout() -> tuple[Place, dict[str, Any], list[str]]:
    framework = Pipeline(dp=2, virtual_stages=2, schedule="interleaved", balance=[1, 1, 2, 1])
    here = replace(make_job(CASE), checkpoint_activations=True)
    framework.check(here)
    with ready(framework, here) as (trainer, _):
        facts = trainer.facts()
        trainer.flush()
        assert trainer.facts()["bubble"] is None  # no step was made
        state = trainer.state()
        assert (state or {}).keys() == (GPT.build().state_dict().keys() if dist.get_rank() == 0 else set())
        return trainer.place, facts, [name for name, _ in trainer.model.named_children()]


def v_shaped() -> tuple[Place, list[str], int, bool]:
    """The place and the blocks of this rank, what it shares with other ranks, and whether it evaluates as one process
    does; it trains afterwards."""
    framework, here = Pipeline(schedule="zbv", virtual_stages=2, dp=2, balance=[1, 2, 1, 1]), make_job(MESH)
    framework.check(here)
    with ready(framework, here) as (trainer, batch):
        place, names = trainer.place, [name for name, _ in trainer.model.named_children()]
        result, plain = [outputs(trainer, batch) for _ in range(2)], here.build().eval()
        equal = batch is None or all(
            logits is not None and torch.allclose(logits, plain(batch.inputs), atol=1e-5) for logits in result
        )
        assert not trainer.losses, "an evaluation computes no loss"
        assert all((logits is not None) == place.reports for logits in result)
        assert (trainer.step(batch) is not None) == place.reports
        return place, names, len(trainer.blocks.shared), equal


def places() -> list[tuple[dict[str, int], int, bool, bool, int]]:
    """Coordinates, replica, whether it reads, whether it reports and how many weights it shares, for three meshes."""
    result: list[tuple[dict[str, int], int, bool, bool, int]] = []
    for framework in (Pipeline(balance=[1, 2, 1, 1]), Pipeline(tp=2), Pipeline(dp=2, tp=2)):
        with ready(framework, make_job(MESH)) as (trainer, _):
            place, shared = trainer.place, len(trainer.blocks.shared)
            result.append((dict(place.coordinates), place.data_rank, place.reads_data, place.reports, shared))
    return result


def dropped_alike() -> list[bool]:
    """Whether the ranks that share layers stay alike in what both have, though each step drops units."""
    with ready(Pipeline(tp=2), make_job(replace(MESH, model=replace(GPT, dropout=0.3)))) as (trainer, batch):
        for _ in range(2):
            trainer.step(batch)
        whole = [tensor for name, tensor in trainer.model.state_dict().items() if name not in trainer.blocks.splits]
        copies = [[torch.empty_like(tensor) for _ in range(2)] for tensor in whole]
        for tensor, both in zip(whole, copies, strict=True):
            dist.all_gather(both, tensor, group=trainer.groups.part.group)
    return [torch.equal(*both) for both in copies]


def overflows() -> list[tuple[int, bool, int, bool]]:
    here = make_job(replace(MESH, precision="fp16"))
    return [overflow(framework, here) for framework in (Pipeline(tp=2), Pipeline(dp=2, sharded=True))]


def shares() -> tuple[int, int]:
    """Elements of the momentum of this rank's parameters, in shards and whole. An evaluation leaves no
    gathered weights: torch's schedule frees them."""
    result: list[int] = []
    for sharded in (True, False):
        with ready(Pipeline(dp=2, sharded=sharded), make_job(MESH)) as (trainer, batch):
            trainer.step(batch)
            outputs(trainer, batch)
            assert all(isinstance(weight, DTensor) == sharded for weight in trainer.model.parameters())
            momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
            result.append(sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in momenta))
    return result[0], result[1]


WORK: dict[str, Callable[[], Any]] = {
    "layout": layout, "v_shaped": v_shaped, "places": places, "dropped_alike": dropped_alike, "overflows": overflows,
    "shares": shares,
}  # fmt: skip


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    """What each piece of work returned, by rank: one set of processes does it all."""
    return run_ranks(4, results, WORK)


@pytest.mark.slow
def test_every_rank_has_its_coordinates_and_stages(on_four: list[dict[str, Any]]) -> None:
    places, facts, names = zip(*(rank["layout"] for rank in on_four), strict=True)
    assert [dict(place.coordinates) for place in places] == [
        {"dp": 0, "pp": 0}, {"dp": 1, "pp": 0}, {"dp": 0, "pp": 1}, {"dp": 1, "pp": 1},
    ]  # fmt: skip
    assert [(place.data_rank, place.data_size) for place in places] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [place.reports for place in places] == [False, False, True, True]
    # stages 0 and 2 on ranks 0 and 1, stages 1 and 3 on ranks 2 and 3
    assert names == (["embed", "h1", "ln_f"],) * 2 + (["h0", "head"],) * 2
    assert facts[0] == facts[3]
    assert facts[0]["micro_batches"] == 6
    assert facts[0]["micro_batches_rule"] == "4 a rank"
    assert facts[0]["bubble_theoretical"] == pytest.approx(1 / 13)
    assert facts[0]["activation_dtypes"] == ["float32"] * 3
    assert facts[0]["activation_bytes"] == [16 * 32 * 4] * 3  # one sample of 16 tokens x 32


@pytest.mark.slow
def test_on_a_v_one_rank_begins_and_ends_each_replica(on_four: list[dict[str, Any]]) -> None:
    for rank, (place, names, shared, equal) in enumerate(each["v_shaped"] for each in on_four):
        assert (place.reads_data, place.reports) == ((True, True) if rank < 2 else (False, False))
        assert names == (["embed", "head"] if rank < 2 else ["h0", "h1", "ln_f"])
        assert shared == 0
        assert equal


@pytest.mark.slow
def test_neighbours_share_layers_and_other_ranks_are_stages_or_replicas(on_four: list[dict[str, Any]]) -> None:
    """The ends of a pipeline read, the last reports, and both share the embedding."""
    stages, parts, replicas = zip(*(rank["places"] for rank in on_four), strict=True)
    assert stages == (
        ({"dp": 0, "pp": 0}, 0, True, False, 1),
        ({"dp": 0, "pp": 1}, 0, False, False, 0),
        ({"dp": 0, "pp": 2}, 0, False, False, 0),
        ({"dp": 0, "pp": 3}, 0, True, True, 1),
    )
    assert parts == (
        ({"dp": 0, "pp": 0, "tp": 0}, 0, True, False, 1),
        ({"dp": 0, "pp": 0, "tp": 1}, 0, False, False, 1),
        ({"dp": 0, "pp": 1, "tp": 0}, 0, True, True, 1),
        ({"dp": 0, "pp": 1, "tp": 1}, 0, False, False, 1),
    )
    assert replicas == (
        ({"dp": 0, "pp": 0, "tp": 0}, 0, True, True, 0),
        ({"dp": 0, "pp": 0, "tp": 1}, 0, False, False, 0),
        ({"dp": 1, "pp": 0, "tp": 0}, 1, True, True, 0),
        ({"dp": 1, "pp": 0, "tp": 1}, 1, False, False, 0),
    )


@pytest.mark.slow
def test_ranks_that_share_layers_drop_the_same_units(on_four: list[dict[str, Any]]) -> None:
    assert all(all(rank["dropped_alike"]) for rank in on_four)


@pytest.mark.slow
def test_all_ranks_skip_an_update_that_overflows_on_one(on_four: list[dict[str, Any]]) -> None:
    assert [rank["overflows"] for rank in on_four] == [[(1, False, 2, True)] * 2] * 4


@pytest.mark.slow
def test_replicas_hold_a_shard_of_the_optimizer_state(on_four: list[dict[str, Any]]) -> None:
    for sharded, whole in (rank["shares"] for rank in on_four):
        assert sharded == pytest.approx(whole / 2, rel=0.05)


def test_what_a_stage_raises_is_not_wrapped() -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("planted: out of memory")

    with fake_world(0, 1, CPU), ready(Pipeline(), make_job(CASE)) as (trainer, batch):
        trainer.model[1].register_forward_pre_hook(fail)
        for run in (trainer.step, partial(outputs, trainer)):
            with pytest.raises(torch.OutOfMemoryError):
                run(batch)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_evaluation_keeps_the_outputs_of_one_micro_batch(schedule: str) -> None:
    """torch keeps what each micro batch has sent, and on the last stage its outputs, until the next step."""
    with fake_world(0, 1, CPU), ready(Pipeline(schedule=schedule), make_job(MESH)) as (trainer, batch):
        (stage,), kept = trainer.stages, list[int]()
        trainer.step(batch)
        trainer.evaluate(batch, lambda *_: kept.append(len(stage.fwd_cache)))
        assert kept == [1] * 12
        assert not stage.fwd_cache


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    Pipeline().check(two_ranks())
    seven = replace(two_ranks(global_batch=7), world_size=7)
    refused(Pipeline(), seven, r"7 stages .* the model has 6 blocks: use at most 6 ranks")
    refused(Pipeline(schedule="interleaved"), replace(two_ranks(), world_size=1), r"interleaved needs 2 ranks")
    for key in ("checkpoint_activations", "compile", "channels_last"):
        for schedule in ("zero_bubble", *V_SHAPED):
            framework = Pipeline(schedule=schedule, virtual_stages=2 if schedule in V_SHAPED else 1)
            reason = f"{schedule}: .* two halves does not support train.{key}=true"
            refused(framework, two_ranks(**{key: True}), reason)


def test_layers_and_shards_that_cannot_be_shared_are_refused() -> None:
    Pipeline(dp=2, tp=2, sharded=True).check(ranks(8))
    refused(Pipeline("hybrid", tp=8), ranks(16), r"hybrid: 8 ranks cannot share the 4 heads of h0\.attn: .*tp=4 .*dp=2")
    refused(Pipeline(tp=2), ranks(2, compile=True), r"train\.compile=false")
    fused = partial(make_optimizer, OptimizerConfig("sgd", lr=0.1, fused=True))
    refused(Pipeline(dp=2, sharded=True), ranks(2, optimizer=fused), "fused SGD does not support shards")
    Pipeline(dp=1, sharded=True).check(ranks(2, optimizer=fused))


def test_shards_on_a_v_need_untied_weights() -> None:
    framework = Pipeline(schedule="zbv", virtual_stages=2, dp=2, sharded=True)
    framework.check(ranks(4, replace(GPT, tie_weights=False), global_batch=32))
    refused(
        framework, ranks(4, GPT, global_batch=32), r"tied between two stages of one rank: set framework\.sharded=false"
    )


def test_a_cut_that_is_measured_again_saves_no_checkpoint() -> None:
    Pipeline().check_checkpoint(job())
    Pipeline(balance=[1, 5], balance_by="seconds").check_checkpoint(job())
    with pytest.raises(Unsupported, match=r"balance_by=seconds: another measurement .* set framework\.balance, or set"):
        Pipeline(balance_by="seconds").check_checkpoint(job())


def test_wrong_knobs_are_named() -> None:
    wrong_knob(Pipeline, r"framework\.schedule=chimera must be one of gpipe, 1f1b", schedule="chimera")
    wrong_knob(Pipeline, r"virtual_stages=1 must be 2 with framework\.schedule=zbv", schedule="zbv")
    wrong_knob(Pipeline, r"must be 2 or more with framework\.schedule=looped_bfs$", schedule="looped_bfs")
    wrong_knob(Pipeline, r"framework\.dp=0", dp=0)
    wrong_knob(Pipeline, r"framework\.tp=0", tp=0)
    wrong_knob(Pipeline, r"framework\.flops_per_byte=-1 must be 0 or more", flops_per_byte=-1)
    wrong_knob(Pipeline, r"framework\.balance_by=time must be one of flops, seconds", balance_by="time")
    wrong_knob(Pipeline, r"virtual_stages=2 must be 1 with framework\.schedule=gpipe", virtual_stages=2)
