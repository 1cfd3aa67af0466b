"""PipeDream against one plain process that trains with weights as old as they should be; knobs and refusals;
neighbours send and receive in one order, also messages that are larger than a socket's buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddlbench.errors import UserError
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.pipeline.pipedream_trainer import Link
from ddlbench.job import Framework, Job, Model, Place
from tests.equality.cases import RATES
from tests.equality.distances import assert_equal
from tests.frameworks.pipeline.old_weights import CHANGING, RESNET, TIED, UNTIED, VGG, Trial, of
from tests.support.broken import Emptied, Prompt, Unstashed
from tests.support.equal import make_job, ready, train_cases
from tests.support.jobs import refused, wrong_knob
from tests.support.ranks import run_ranks
from tests.support.reference import Case, Outcome

# VGG's weights must change enough in five updates for their age to be measurable.
RATES_HERE = {**RATES, "vgg": 0.5}
Layout = tuple[Place, dict[str, Any]]


def buffered(**knobs: Any) -> PipeDream:
    return PipeDream(name="pipedream_2bw", double_buffered=True, **knobs)


def trial(model: Model, framework: PipeDream, staleness: Sequence[int], replicas: int = 1, **of_case: Any) -> Trial:
    case = Case(model.name, model, **{"lr": RATES_HERE[model.name], **of_case})
    return Trial(case, framework, staleness, replicas=replicas)


QUICK = {
    "resnet": trial(RESNET, PipeDream(balance=[3, 3]), [1, 0]),
    "vgg": trial(VGG, PipeDream(balance=[13, 3]), [1, 0]),
    "gpt2": trial(UNTIED, Emptied(balance=[2, 3]), [1, 0], rates=CHANGING),
    "gpt2-2bw": trial(TIED, Emptied("pipedream_2bw", True, balance=[2, 3]), [1, 1], micro_batch=2, rates=CHANGING),
    "gpt2-bf16-2bw": trial(TIED, buffered(balance=[2, 3]), [1, 1], micro_batch=2, precision="bf16"),
    "resnet-checkpointed": trial(RESNET, PipeDream(balance=[3, 3]), [1, 0], checkpoint_activations=True),
}
SLOW = {
    "vgg-accumulated": trial(VGG, PipeDream(balance=[13, 3]), [1, 0], micro_batch=3),
    "resnet-2bw": trial(RESNET, buffered(balance=[3, 3]), [1, 1], micro_batch=6),
    "vgg-2bw": trial(VGG, buffered(balance=[13, 3]), [1, 1], micro_batch=3),
    "resnet-bf16": trial(RESNET, PipeDream(balance=[3, 3]), [1, 0], precision="bf16"),
    "vgg-bf16": trial(VGG, PipeDream(balance=[13, 3]), [1, 0], precision="bf16"),
    "gpt2-checkpointed": trial(UNTIED, PipeDream(balance=[2, 3]), [1, 0], checkpoint_activations=True),
    "resnet-replicas": trial(RESNET, PipeDream(dp=2, balance=[6]), [0], 2),
}
FAULTS = {
    "unstashed": trial(UNTIED, Unstashed(balance=[2, 3]), [1, 0]),
    "rates of another step": trial(UNTIED, Prompt(balance=[2, 3]), [1, 0], rates=CHANGING),
}
SLOW_FAULTS = {"unstashed, 2bw": trial(TIED, Unstashed("pipedream_2bw", True, balance=[2, 3]), [1, 1], micro_batch=2)}
FOUR_RANKS = {
    "three, two, one, none behind": trial(UNTIED, PipeDream(balance=[1, 1, 2, 1]), [3, 2, 1, 0]),
    "fewer minibatches than stages": trial(UNTIED, PipeDream(balance=[1, 1, 2, 1]), [3, 2, 1, 0], steps=2),
    "two micro batches": trial(UNTIED, PipeDream(balance=[1, 1, 2, 1]), [2, 1, 1, 0], micro_batch=6),
    "2bw": trial(TIED, buffered(balance=[1, 1, 2, 1]), [1, 1, 1, 1], micro_batch=3),
    "replicas": trial(UNTIED, PipeDream(dp=2, balance=[2, 3]), [1, 0], 2),
    "replicas, 2bw": trial(TIED, buffered(dp=2, balance=[2, 3]), [1, 1], 2, micro_batch=3),
    "images": trial(VGG, PipeDream(balance=[6, 4, 3, 3]), [3, 2, 1, 0]),
    "replicas of images": trial(RESNET, PipeDream(dp=2, balance=[3, 3]), [1, 0], 2),
}


def train(world: int, trials: Mapping[str, Trial]) -> tuple[dict[str, Outcome], list[Layout]]:
    """The outcome of each trial, and the place and facts of every rank; in one set of processes."""
    work: list[tuple[Case, Framework]] = [(each.case, each.framework) for each in trials.values()]
    ranks = run_ranks(world, train_and_look, work)
    return dict(zip(trials, ranks[0][0], strict=True)), [layout for _, layout in ranks]


def train_and_look(work: Sequence[tuple[Case, Framework]]) -> tuple[list[Outcome], Layout]:
    return train_cases(work), look()


def look() -> Layout:
    framework = buffered(balance_by="seconds")
    here = replace(make_job(Case("gpt2", TIED)), micro_batch=3)
    framework.check(here)
    with ready(framework, here) as (trainer, _):
        facts = trainer.facts()
        trainer.flush()  # nothing is in flight
        state = trainer.state()
        assert state is None or state.keys() == TIED.build().state_dict().keys()
        return trainer.place, facts


@pytest.fixture(scope="module")
def two_ranks() -> tuple[dict[str, Outcome], list[Layout]]:
    return train(2, {**QUICK, **FAULTS})


@pytest.mark.parametrize("name", QUICK)
def test_equals_one_process_with_weights_as_old(two_ranks: tuple[dict[str, Outcome], list[Layout]], name: str) -> None:
    assert_as_old(QUICK[name], two_ranks[0][name])


def assert_as_old(each: Trial, results: Outcome) -> None:
    assert_equal(results, each.expected(), each.tolerance)
    if each.case.model is TIED:
        assert torch.equal(results.weights["embed.wte.weight"], results.weights["head.weight"])


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_notices_planted_faults(two_ranks: tuple[dict[str, Outcome], list[Layout]], name: str) -> None:
    FAULTS[name].assert_differs(two_ranks[0][name], FAULTS[name].expected())


def test_every_rank_has_its_coordinates_and_stages(two_ranks: tuple[dict[str, Outcome], list[Layout]]) -> None:
    places, facts = zip(*two_ranks[1], strict=True)
    assert [dict(place.coordinates) for place in places] == [{"dp": 0, "pp": 0}, {"dp": 0, "pp": 1}]
    assert [(place.reads_data, place.reports) for place in places] == [(True, False), (True, True)]
    assert facts[0] == facts[1], "both have the seconds that rank 0 measured"
    assert facts[0]["balanced_by"] == "seconds"
    assert len(facts[0]["block_seconds"]) == sum(facts[0]["blocks_per_stage"]) == 5
    assert min(facts[0]["block_seconds"]) > 0
    assert facts[0]["staleness_theoretical"] == [1, 1]
    assert facts[0]["staleness"] is None, "no step was made"
    assert facts[0]["weight_versions"] == [2, 1]
    assert facts[0]["micro_batches"] == 4
    assert facts[0]["activation_bytes"] == [3 * 16 * 32 * 4]  # three samples of 16 tokens x 32


@pytest.mark.slow
def test_two_ranks_at_length() -> None:
    outcomes, _ = train(2, {**SLOW, **SLOW_FAULTS})
    for name, each in SLOW.items():
        assert_as_old(each, outcomes[name])
    for name, each in SLOW_FAULTS.items():
        each.assert_differs(outcomes[name], each.expected())


@pytest.mark.slow
def test_four_ranks() -> None:
    outcomes, layouts = train(4, FOUR_RANKS)
    for name, each in FOUR_RANKS.items():
        assert_as_old(each, outcomes[name])
    assert [(place.reads_data, place.reports) for place, _ in layouts] == [
        (True, False), (False, False), (False, False), (True, True),
    ]  # fmt: skip
    assert layouts[0][1]["weight_versions"] == [2, 2, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("trials", [QUICK, SLOW, FOUR_RANKS], ids=["quick", "slow", "four ranks"])
def test_old_weights_differ_from_current_ones_by_more_than_the_tolerance(trials: Mapping[str, Trial]) -> None:
    for each in trials.values():
        if max(each.staleness) > 0 and each.case.precision == "fp32":
            each.assert_differs(each.fresh(), each.expected())


def test_supported_settings_are_accepted() -> None:
    PipeDream().check(of(2, precision="bf16", checkpoint_activations=True, channels_last=True))
    PipeDream().check(of(2, micro_batch=4))
    PipeDream().check(of(1, model=TIED, clip_norm=1.0))
    buffered().check(of(2, model=TIED))


@pytest.mark.parametrize(
    ("framework", "given", "says"),
    [
        (PipeDream(), of(4, clip_norm=1.0), r"norm .* is known only 3 micro batches after the last of 4 stages"),
        (buffered(), of(2, clip_norm=1.0), r"pipedream_2bw: the norm .* known only 1 micro .* train\.clip_norm=null"),
        (PipeDream(), of(2, precision="fp16"), r"several loss scales.*use train\.precision=bf16"),
        (PipeDream(), of(2, compile=True), r"set train\.compile=false"),
        (PipeDream(), of(2, reduce_dtype="bf16"), r"averaged in fp32, not bf16"),
        (PipeDream(), of(3, model=TIED), r"2 updates older .* set model\.tie_weights=false, or .*pipedream_2bw"),
        (PipeDream(), of(24, global_batch=24), r"24 stages \(24 ranks in a pipeline\) but the model has 16 blocks"),
    ],
)
def test_unsupported_settings_are_refused_before_anything_starts(framework: PipeDream, given: Job, says: str) -> None:
    refused(framework, given, says)


def test_wrong_numbers_are_named() -> None:
    wrong_knob(PipeDream, r"framework\.dp=0", dp=0)
    wrong_knob(PipeDream, r"framework\.flops_per_byte=-1", flops_per_byte=-1)
    with pytest.raises(
        UserError, match=r"pipedream_2bw over 4 ranks cannot run 2 micro .* choose train\.micro_batch=3"
    ):
        buffered().check(of(4, micro_batch=6))


NUMBERS = 1_000_000


def turns() -> list[float | None]:
    rank = dist.get_rank()
    border = torch.empty(NUMBERS, dtype=torch.float64, device="meta")
    link = Link(1 - rank, None, border, torch.device("cpu"))
    sends = [True, True, False] if rank == 0 else [False, True, True]
    receives = sends[::-1]  # only to rank 1, both ways, only to rank 0
    got: list[float | None] = []
    for turn, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        outgoing = torch.full((2, NUMBERS // 2), 10.0 * rank + turn, dtype=torch.float64).t() if send else None
        came = link.exchange(outgoing.reshape(NUMBERS) if outgoing is not None else None, receive)
        got.append(None if came is None else came.unique().item())
    assert link.exchange(None, receive=False) is None
    link.wait_for_send()
    return got


def test_both_ends_send_and_receive_in_the_same_order() -> None:
    assert run_ranks(2, turns) == [[None, 11.0, 12.0], [0.0, 1.0, None]]
