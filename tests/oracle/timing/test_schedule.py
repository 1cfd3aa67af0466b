from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from ddlbench.frameworks.pipeline.schedules import bubble
from ddlbench.oracle.timing.schedule import Stages, Timed, order, seconds, simulate
from tests.oracle.made import equal


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "count"), [(1, 5), (2, 2), (4, 8), (4, 100), (8, 9)])
def test_equal_stages_take_m_plus_p_minus_1(schedule: str, ranks: int, count: int) -> None:
    """Huang et al. 2019: (m + p - 1) (F + B)."""
    assert seconds(schedule, equal(ranks), ranks, count) == pytest.approx((count + ranks - 1) * 3)


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "count", "expected"),
    [
        # With messages of 2 s: rank 0 computes W0 at 8 s as planned, although F2 could begin. Gradients of weights that
        # run only where a rank waits anyway would take 19 s: torch does not move them.
        ("zero_bubble", equal(2, send=2.0), 2, 4, 21),
        # The slowest stage takes 3 + 6: 10 micro batches there, and 1 + 2 once in stage 0.
        ("1f1b", Stages((1.0, 3.0), (2.0, 6.0), (0.0, 0.0)), 2, 10, 10 * 9 + 3),
    ],
)
def test_seconds_by_hand(schedule: str, stages: Stages, ranks: int, count: int, expected: float) -> None:
    assert seconds(schedule, stages, ranks, count) == pytest.approx(expected)


def took_and_busy(passes: Sequence[Timed], ranks: int) -> tuple[float, list[float]]:
    """The end of the last pass, and the computing time of each rank."""
    busy = [sum(item.end - item.begin for item in passes if item.rank == rank) for rank in range(ranks)]
    return max(item.end for item in passes), busy


UNEQUAL = Stages((1.0, 1.5, 0.5, 1.2), (2.0, 3.0, 0.9, 2.2), (0.1, 0.4, 0.2, 0.0))
ALL = {"gpipe": 45.2, "1f1b": 42.2, "interleaved": 66.4, "zero_bubble": 64.3}
TWO_STAGES_A_RANK = ("interleaved", "looped_bfs", "zbv", "dualpipev")


@pytest.mark.parametrize("schedule", ALL)
def test_unequal_stages(schedule: str) -> None:
    """The seconds are those of a second simulation, which went through the order of each rank without a clock."""
    ranks = 4 if schedule in ("gpipe", "1f1b") else 2
    passes = simulate(schedule, UNEQUAL, ranks, 8)
    took, busy = took_and_busy(passes, ranks)
    assert took == passes[-1].end == pytest.approx(ALL[schedule])
    assert busy == pytest.approx([8 * sum(UNEQUAL.busy[rank::ranks]) for rank in range(ranks)])


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", *TWO_STAGES_A_RANK])
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_the_bubble_of_each_schedule_is_that_of_its_formula(schedule: str, ranks: int, count: int) -> None:
    """Forward 1, gradients of inputs 1, of weights 1: waits of the rank that waits most, between its first and its last
    pass (Qi et al. 2023, section 2.2)."""
    local = 2 if schedule in TWO_STAGES_A_RANK else 1
    passes = simulate(schedule, equal(ranks * local), ranks, count)
    spans = [[item for item in passes if item.rank == rank] for rank in range(ranks)]
    longest = max(max(item.end for item in own) - min(item.begin for item in own) for own in spans)
    assert 1 - 3 * local * count / longest == pytest.approx(bubble(schedule, count, ranks, local))


def test_an_overlapped_forward_pass_sends_with_the_backward_pass_after_it() -> None:
    """DualPipeV on two ranks, eight micro batches of 1 + 2: 2 x 2 (p - 1) for what torch sends late; half of it if each
    pass sent its own."""
    assert seconds("dualpipev", equal(4), 2, 8) == pytest.approx(8 * 2 * 3 + 2)
    assert {kind for kind, _, _ in order("dualpipev", 0, 2, 4, 8)} == {"F", "O", "B", "I", "W"}


@pytest.mark.parametrize("schedule", [*ALL, "looped_bfs", "zbv", "dualpipev"])
def test_every_pass_runs_once_and_starts_after_what_it_waits_for(schedule: str) -> None:
    passes = simulate(schedule, UNEQUAL, 4 if schedule in ("gpipe", "1f1b") else 2, 8)
    assert sum(item.kind != "W" for item in passes) == 2 * 4 * 8
    ends = {("B" if item.kind == "I" else item.kind, item.stage, item.micro): item.end for item in passes}
    assert {key for key in ends if key[0] != "W"} == {*product("FB", range(4), range(8))}
    for kind, stage, micro, begin, *_ in passes:
        if kind == "F" and stage:
            assert begin >= ends["F", stage - 1, micro] + UNEQUAL.send[stage - 1] - 1e-9
        if kind in ("B", "I"):
            assert begin >= ends["F", stage, micro] - 1e-9
            assert stage == 3 or begin >= ends["B", stage + 1, micro] + UNEQUAL.send[stage] - 1e-9
        if kind == "W":
            assert begin >= ends["B", stage, micro] - 1e-9


@pytest.mark.parametrize("schedule", [*ALL, "looped_bfs", "zbv", "dualpipev"])
def test_one_core_takes_as_long_as_all_the_work(schedule: str) -> None:
    ranks = 4 if schedule in ("gpipe", "1f1b") else 2
    took, _ = took_and_busy(simulate(schedule, equal(4), ranks, 8, float), ranks)
    assert took == pytest.approx(8 * 4 * 3)


def test_orders_are_those_of_the_library() -> None:
    """1F1B of torch.distributed.pipelining, rank 0 of 2 with 3 micro batches: 0F 1F 0B 2F 1B 2B."""
    assert [f"{micro}{kind}" for kind, _, micro in order("1f1b", 0, 2, 2, 3)] == ["0F", "1F", "0B", "2F", "1B", "2B"]


@pytest.mark.parametrize(("ranks", "local", "count"), [(2, 1, 4), (4, 1, 8), (4, 2, 8), (3, 2, 6)])
def test_halves_of_backward_passes_are_where_the_library_places_them(ranks: int, local: int, count: int) -> None:
    """Beside the plan of torch.distributed.pipelining itself, waits left out."""
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    plan: Any = ScheduleInterleavedZeroBubble.__new__(ScheduleInterleavedZeroBubble)
    plan.n_local_stages, plan.pp_group_size, plan._n_microbatches = local, ranks, count
    plan.microbatches_per_round = count // max(1, count // ranks)
    for rank in range(ranks):
        theirs = [str(action) for action in plan._calculate_single_rank_operations(rank) if action is not None]
        ours = order("zero_bubble", rank, ranks, ranks * local, count)
        assert [f"{stage}{kind}{micro}" for kind, stage, micro in ours] == theirs


@pytest.mark.parametrize(("ranks", "within"), [(3, 1e-9), (5, 1e-9), (8, 3e-3)])
def test_a_long_schedule_of_unequal_stages_and_messages_too(ranks: int, within: float) -> None:
    """The period is not the number of ranks."""
    ahead, back = ([1 + stage * 0.37 % 1 for stage in range(ranks)], [2 + stage * 1.3 % 2 for stage in range(ranks)])
    stages = Stages((*ahead,), (*back,), (*(0.2 + stage * 0.71 % 1.3 for stage in range(ranks - 1)), 0.0))
    for count in range(190, 196):
        simulated = simulate("1f1b", stages, ranks, count)[-1].end
        assert seconds("1f1b", stages, ranks, count) == pytest.approx(simulated, rel=within), count


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("send", [0.0, 0.3, 1.5, None])
def test_a_long_schedule_takes_as_long_as_its_simulation(name: str, send: float | None) -> None:
    """With messages 1F1B waits once in four micro batches, so one further micro batch is no measure of the others."""
    stages = UNEQUAL
    if send is not None:
        stages = Stages((1.0, 1.2, 1.0, 0.9), (2.0, 2.4, 2.0, 1.8), (send, send, send, 0.0))
    for count in range(4, 80):
        assert seconds(name, stages, 4, count) == pytest.approx(simulate(name, stages, 4, count)[-1].end), count
