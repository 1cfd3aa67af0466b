"""Micro batches, refusals and bubbles of pipeline schedules; each number worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.pipeline.schedules import bubble, check_stages, in_flight, micro_batch_count, rank_of
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.job import Job
from ddlbench.oracle.timing.schedule import F, order
from tests.support.jobs import job


def of(global_batch: int, micro_batch: int | None = None) -> Job:
    return replace(job(), global_batch=global_batch, micro_batch=micro_batch)


@pytest.mark.parametrize(
    ("schedule", "samples", "ranks", "count"),
    [
        ("gpipe", 32, 2, 8),
        ("gpipe", 12, 2, 6),  # 8 and 7 do not divide 12
        ("gpipe", 3, 4, 3),
        ("1f1b", 17, 2, 17),  # 1 is too few, so more than 4 a rank
        ("interleaved", 64, 4, 16),
        ("interleaved", 14, 4, 7),  # 14 // 4 = 3 rounds of unequal size; 7 go in one round
        ("looped_bfs", 17, 4, 17),  # 1 does not fill the pipeline
        ("zbv", 7, 4, 7),  # 2 p - 1 do
        ("dualpipev", 8, 4, 8),  # 2 p do
    ],
)
def test_four_a_rank_or_the_nearest_that_fits(schedule: str, samples: int, ranks: int, count: int) -> None:
    assert micro_batch_count(schedule, of(samples), ranks, 1) == count


def test_the_micro_batch_of_the_configuration_counts() -> None:
    assert micro_batch_count("gpipe", of(24, 2), 2, 1) == 12
    assert micro_batch_count("gpipe", of(24, 2), 2, 3) == 4  # 8 samples a replica


def test_a_refused_number_is_named_with_the_nearest_choice() -> None:
    with pytest.raises(
        UserError, match=r"1f1b over 4 ranks cannot run 2 .*micro_batch=6 .* choose train\.micro_batch=3"
    ):
        micro_batch_count("1f1b", of(12, 6), 4, 1)
    with pytest.raises(UserError, match=r"the 2 samples of a replica .*over 3\).* 1f1b over 4 ranks.*global_batch=48"):
        micro_batch_count("1f1b", of(6), 4, 3)
    with pytest.raises(UserError, match=r"dualpipev over 4 ranks, which needs 8 or more: .*_batch=16"):
        micro_batch_count("dualpipev", of(6), 4, 1)
    with pytest.raises(UserError, match=r"interleaved over 4 ranks cannot run 14 micro .*choose train\.micro_batch=2"):
        micro_batch_count("interleaved", of(14, 1), 4, 1)


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        (Pipeline(dp=2), Layout(dp=2, pp=4)),
        (Pipeline(dp=None, pp=2), Layout(dp=4, pp=2)),
        (Pipeline(dp=2, tp=2), Layout(dp=2, tp=2, pp=2)),
        (Pipeline(dp=None, tp=4, pp=1), Layout(dp=2, tp=4)),
        (PipeDream(dp=2), Layout(dp=2, pp=4)),
        (PipeDream(dp=None, pp=2), Layout(dp=4, pp=2)),
    ],
)
def test_eight_ranks_are_divided_over_pipelines_and_parts(framework: Pipeline | PipeDream, expected: Layout) -> None:
    assert framework.layout(8) == expected


def test_a_remedy_shares_no_layers_where_none_are_shared() -> None:
    with pytest.raises(UserError, match=r"^framework\.dp=1 x framework\.pp=3 does not fill 4 .* framework\.pp=4"):
        Pipeline(pp=3).layout(4)


def test_stages_need_blocks() -> None:
    check_stages(3, 2, 6, [1, 1, 1, 1, 1, 1])
    with pytest.raises(
        Unsupported, match=r"8 stages \(4 ranks .*virtual_stages=2\) but the model has 6 blocks: use at most 3 "
    ):
        check_stages(4, 2, 6, None)
    with pytest.raises(Unsupported, match=r"16 stages .* has 6 blocks: set framework.virtual_stages=3$"):
        check_stages(2, 8, 6, None)  # a pipeline of 0 ranks, or of 1, is none
    with pytest.raises(Unsupported, match=r"24 stages .* has 6 blocks: set framework.virtual_stages=1$"):
        check_stages(8, 3, 6, None)
    with pytest.raises(UserError, match=r"balance=\[2, 3\] gives 5 blocks to 2 stages: the model has 6 .* 2 stages"):
        check_stages(2, 1, 6, [2, 3])
    with pytest.raises(UserError, match=r"balance=\[6, 0\]"):
        check_stages(2, 1, 6, [6, 0])
    with pytest.raises(UserError, match=r"balance=\[6\] gives 6 blocks to 1 stages"):
        check_stages(2, 1, 6, [6])


def test_bubbles() -> None:
    assert bubble("gpipe", 4, 1, 1) == 0
    assert bubble("1f1b", 8, 4, 1) == pytest.approx(3 / 11)
    assert bubble("interleaved", 8, 4, 2) == pytest.approx(3 / 19)
    assert bubble("zero_bubble", 8, 4, 1) == pytest.approx(1 / 9)  # a third of the ramp: 1 / (8 + 1)
    assert bubble("looped_bfs", 8, 4, 2) == pytest.approx(3 / 19)
    assert bubble("dualpipev", 8, 4, 2) == pytest.approx(3 * 2 / (8 * 2 * 3 + 3 * 2))  # F&B + B - 3 W = 3 + 2 - 3
    assert bubble("zbv", 8, 4, 2) == 0


def test_stages_go_round_or_there_and_back() -> None:
    assert [rank_of(stage, 3, v_shaped=False) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of(stage, 3, v_shaped=True) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("schedule", "ranks", "count", "virtual"),
    [
        ("gpipe", 2, 4, 1),
        ("1f1b", 4, 4, 1),
        ("1f1b", 2, 8, 1),
        ("interleaved", 2, 2, 2),
        ("interleaved", 4, 8, 3),
        ("looped_bfs", 2, 4, 2),
    ],
)
def test_micro_batches_in_memory_are_those_of_the_schedule(schedule: str, ranks: int, count: int, virtual: int) -> None:
    for rank in range(ranks):
        there = [0]
        for kind, _, _ in order(schedule, rank, ranks, ranks * virtual, count):
            there.append(there[-1] + (1 if kind == F else -1))
        assert in_flight(schedule, rank, ranks, count, virtual) == max(there)


def test_pipedream_has_a_micro_batch_for_each_later_stage() -> None:
    assert [in_flight("pipedream", rank, 3, 1, 1) for rank in range(3)] == [3, 2, 1]
