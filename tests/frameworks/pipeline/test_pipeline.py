"""Pipelines' own knobs and refusals; that they train what one process trains is tested in tests/equality/."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddlbench.errors import Unsupported
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.schedules import V_SHAPED
from ddlbench.job import Place
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from tests.equality.distances import TOLERANCES, assert_equal, distance
from tests.support.broken import CountedTwice, Untied
from tests.support.changed_job import Loaded
from tests.support.equal import make_job, ready, train_cases
from tests.support.jobs import job, refused, wrong_knob
from tests.support.ranks import run_ranks
from tests.support.reference import Case, reference

GPT = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)
RESNET = ResNet("resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=64, num_classes=7)
CASE = Case("gpt2", GPT, clip_norm=0.5, lr=0.02)  # 12 samples an update, 5 blocks
IMAGES = Case("resnet", RESNET, lr=1e-4, micro_batch=2)  # 6 blocks

KNOBS = {
    "by hand": Pipeline(balance=[1, 4]),
    "two replicas": Pipeline(dp=2),
    "one stage a rank": Pipeline(schedule="interleaved"),
    "two stages a rank": Pipeline(schedule="zero_bubble", virtual_stages=2),
    **{f"on a V: {name}": Pipeline(schedule=name, virtual_stages=2) for name in V_SHAPED},
}
EIGHT_BLOCKS = {
    "gpt2": replace(CASE, model=replace(GPT, n_layer=6), clip_norm=None),
    "resnet": replace(IMAGES, model=replace(RESNET, layers=[2, 2, 1, 1]), lr=1e-5, seed=6),
    "vgg": Case("vgg", VGG("vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=7, dropout=0.0)),
}


@pytest.mark.slow
def test_knobs_train_the_same() -> None:
    """Clipped: the norm is that of the whole gradient, the tied embedding counted once."""
    ranks = run_ranks(2, train_cases, [(CASE, framework) for framework in KNOBS.values()])
    for (name, framework), result in zip(KNOBS.items(), ranks[0], strict=True):
        expected = reference(replace(CASE, micro_batch=2), framework.layout(2).dp)
        assert_equal(result, expected, TOLERANCES["gpt2", "fp32"])
        assert distance(result.weights, expected) < 1e-4, name
        assert torch.equal(result.weights["embed.wte.weight"], result.weights["head.weight"]), name


@pytest.mark.slow
def test_eight_stages_on_four_ranks_train_the_same() -> None:
    """On a V both ends of a tied weight are one tensor of rank 0: nothing is sent for it."""
    schedules = ("looped_bfs", *V_SHAPED)
    cases = {name: replace(case, global_batch=24, micro_batch=2) for name, case in EIGHT_BLOCKS.items()}
    work = [(case, Pipeline(schedule=name, virtual_stages=2)) for case in cases.values() for name in schedules]
    for (case, _), result in zip(work, run_ranks(4, train_cases, work)[0], strict=True):
        assert_equal(result, reference(case, 1), TOLERANCES[case.name, "fp32"])
        if case.name == "gpt2":
            assert torch.equal(result.weights["embed.wte.weight"], result.weights["head.weight"])


@pytest.mark.slow
def test_replicas_of_a_pipeline_with_a_middle_stage_average_weights_and_statistics() -> None:
    cases = [(CASE, Pipeline(dp=2, schedule="1f1b")), (IMAGES, Pipeline(dp=2, balance=[2, 4]))]
    text, images = run_ranks(4, train_cases, cases)[0]
    # 6 samples a replica: 4 x 2 micro batches, taken down to 6 of one sample
    assert_equal(text, reference(replace(CASE, micro_batch=1), 2), TOLERANCES["gpt2", "fp32"])
    assert torch.equal(text.weights["embed.wte.weight"], text.weights["head.weight"])
    assert_equal(images, reference(IMAGES, 2), TOLERANCES["resnet", "fp32"])


def test_the_central_test_notices_untied_copies_and_a_wrong_norm() -> None:
    expected = reference(replace(CASE, micro_batch=2), 1)
    for result in run_ranks(2, train_cases, [(CASE, Untied()), (CASE, CountedTwice(tp=2))])[0]:
        assert distance(result.weights, expected) > 0.01


def layout(framework: Pipeline) -> tuple[Place, dict[str, Any], list[str]]:
    here = replace(make_job(CASE), checkpoint_activations=True)
    framework.check(here)
    with ready(framework, here) as (trainer, _):
        facts = trainer.facts()
        trainer.flush()
        assert trainer.facts()["bubble"] is None  # no step was made
        assert trainer.state() is None or dist.get_rank() == 0
        return trainer.place, facts, [name for name, _ in trainer.model.named_children()]


@pytest.mark.slow
def test_every_rank_has_its_coordinates_and_stages() -> None:
    ranks = run_ranks(4, layout, Pipeline(dp=2, virtual_stages=2, schedule="interleaved", balance=[1, 1, 2, 1]))
    places, facts, names = zip(*ranks, strict=True)
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


def v_shaped() -> tuple[Place, list[str], int, bool]:
    """The place and the blocks of this rank, what it shares with other ranks, and whether it evaluates as one process
    does; it trains afterwards."""
    framework, here = Pipeline(schedule="zbv", virtual_stages=2, balance=[1, 2, 1, 1]), make_job(CASE)
    framework.check(here)
    with ready(framework, here) as (trainer, batch):
        place, names = trainer.place, [name for name, _ in trainer.model.named_children()]
        result, plain = [trainer.evaluate(batch) for _ in range(2)], here.build().eval()
        equal = batch is None or all(
            logits is not None and torch.allclose(logits, plain(batch.inputs), atol=1e-5) for logits in result
        )
        assert not trainer.losses, "an evaluation computes no loss"
        assert all((logits is not None) == place.reports for logits in result)
        assert (trainer.step(batch) is not None) == place.reports
        return place, names, len(trainer.blocks.shared), equal


@pytest.mark.slow
def test_on_a_v_one_rank_begins_and_ends_each_replica() -> None:
    (first, begin, shared, equal), (last, turn, none, _) = run_ranks(2, v_shaped)
    assert (first.reads_data, first.reports, last.reads_data, last.reports) == (True, True, False, False)
    assert (begin, turn) == (["embed", "head"], ["h0", "h1", "ln_f"])
    assert (shared, none) == (0, 0)
    assert equal


def middle() -> tuple[bool, bool, int]:
    with ready(Pipeline(balance=[1, 3, 1]), make_job(CASE)) as (trainer, _):
        state = trainer.state()
        assert state is None or state.keys() == GPT.build().state_dict().keys()
        return trainer.place.reads_data, trainer.place.reports, len(trainer.blocks.shared)


@pytest.mark.slow
def test_ends_of_the_pipeline_read_the_last_reports_and_both_share_the_embedding() -> None:
    assert run_ranks(3, middle) == [(True, False, 1), (False, False, 0), (True, True, 1)]


class LoadedPipeline(Loaded, Pipeline): ...


@pytest.mark.slow
def test_a_state_can_be_loaded() -> None:
    """Weights of another seed, given after setup, count from the first step on."""
    (outcome,) = run_ranks(2, train_cases, [(replace(CASE, seed=3), LoadedPipeline(balance=[1, 4]))])[0]
    assert_equal(outcome, reference(replace(CASE, micro_batch=2), 1), TOLERANCES["gpt2", "fp32"])


def out_of_memory() -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("planted: out of memory")

    with ready(Pipeline(), make_job(CASE)) as (trainer, batch):
        trainer.model[1].register_forward_pre_hook(fail)
        for run in (trainer.step, trainer.evaluate):
            with pytest.raises(torch.OutOfMemoryError):
                run(batch)


@pytest.mark.slow
def test_what_a_stage_raises_is_not_wrapped() -> None:
    run_ranks(1, out_of_memory)


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    two = replace(job(), world_size=2, micro_batch=None)
    Pipeline().check(two)
    refused(Pipeline(), replace(two, reduce_dtype="bf16"), r"averaged in fp32, not bf16")
    with pytest.raises(Unsupported, match=r"7 stages .* the model has 6 blocks: use at most 6 ranks"):
        Pipeline().check(replace(two, world_size=7, global_batch=7))
    refused(Pipeline(schedule="interleaved"), replace(two, world_size=1), r"interleaved needs 2 ranks")
    for key in ("checkpoint_activations", "compile", "channels_last"):
        for schedule in ("zero_bubble", *V_SHAPED):
            stages = 2 if schedule in V_SHAPED else 1
            with pytest.raises(Unsupported, match=f"{schedule}: .* two halves does not support train.{key}=true"):
                Pipeline(schedule=schedule, virtual_stages=stages).check(replace(two, **{key: True}))


def test_shards_on_a_v_need_untied_weights() -> None:
    framework = Pipeline(schedule="zbv", virtual_stages=2, dp=2, sharded=True)
    four = replace(job(), world_size=4, global_batch=32, micro_batch=None)
    framework.check(replace(four, model=replace(GPT, tie_weights=False)))
    refused(framework, replace(four, model=GPT), r"tied between two stages of one rank: set framework\.sharded=false")


def test_a_cut_that_is_measured_again_saves_no_checkpoint() -> None:
    Pipeline().check_checkpoint(job())
    Pipeline(balance=[1, 5], balance_by="seconds").check_checkpoint(job())
    with pytest.raises(Unsupported, match=r"balance_by=seconds: another measurement .* set framework\.balance, or set"):
        Pipeline(balance_by="seconds").check_checkpoint(job())


def test_wrong_knobs_are_named() -> None:
    wrong_knob(Pipeline, r"framework\.schedule=chimera must be one of gpipe, 1f1b", schedule="chimera")
    wrong_knob(Pipeline, r"virtual_stages=1 must be 2 with framework\.schedule=zbv", schedule="zbv")
    wrong_knob(Pipeline, r"framework\.dp=0", dp=0)
    wrong_knob(Pipeline, r"framework\.flops_per_byte=-1 must be 0 or more", flops_per_byte=-1)
    wrong_knob(Pipeline, r"framework\.balance_by=time must be one of flops, seconds", balance_by="time")
    wrong_knob(Pipeline, r"virtual_stages=2 must be 1 with framework\.schedule=gpipe", virtual_stages=2)
