"""benchmarks/turns.py: pairs are found by time, lost ones are counted, and a stopped program makes no step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.turns import Pairs, Program, pair_by_time, ratio_text, seconds_a_step, take_turns

STEPS = "import time\nwhile True: time.sleep(0.02); print(time.monotonic(), flush=True)"
# The first program has turns from 0 to 10, 20 to 30 and 40 to 50; the second one has those between.
TURNS = [((0.0, 10.0), (10.0, 20.0)), ((20.0, 30.0), (30.0, 40.0)), ((40.0, 50.0), (50.0, 60.0))]


def program(folder: Path, source: str) -> Program:
    return Program(folder, [sys.executable, "-c", source])


def test_step_that_a_stop_interrupted_does_not_count():
    ends = [1.0, 3.0, 5.0, 27.0, 28.0]  # the step that ended at 27 began before the stop
    assert seconds_a_step(ends, (0.0, 10.0)) == (5.0 - 1.0) / 2
    assert seconds_a_step(ends, (20.0, 30.0)) == 28.0 - 27.0
    assert seconds_a_step(ends, (2.0, 4.0)) is None
    assert seconds_a_step(ends, (10.0, 20.0)) is None


def test_pairs_are_found_by_time_where_a_turn_is_lost():
    first = [1.0, 3.0, 5.0, 25.0, 41.0, 42.0, 43.0]  # its second turn has one end: no whole step
    second = [11.0, 15.0, 31.0, 39.0, 51.0, 54.0]
    pairs = pair_by_time(first, second, TURNS)
    assert pairs.complete == [(2.0, 4.0), (1.0, 3.0)]
    assert pairs.ratios() == [4.0 / 2.0, 3.0 / 1.0]  # by number the last would be 8 / 1
    assert pairs.lost == [2]
    assert pairs.remark() == "1 of 3 pairs lost (2)"


def test_pair_is_lost_on_either_side_and_once():
    assert pair_by_time([1.0, 2.0, 21.0, 22.0], [11.0, 12.0], TURNS) == Pairs([(1.0, 1.0)], [2, 3])
    assert pair_by_time([], [], TURNS) == Pairs([], [1, 2, 3])
    assert ratio_text([]) == "unknown: no pair of turns is complete"


def test_programs_that_have_swapped_places_have_the_inverse_ratios():
    pairs = Pairs([(2.0, 4.0), (1.0, 3.0)], [3])
    assert pairs.swapped() == Pairs([(4.0, 2.0), (3.0, 1.0)], [3])
    assert pairs.swapped().ratios() == [0.5, 1 / 3]


def test_stopped_program_makes_no_step(tmp_path):
    first, second = (program(tmp_path / name, STEPS) for name in ("first", "second"))
    try:
        for each in (first, second):
            each.wait_until_warm()
        warm = max(each.times()[-1] for each in (first, second))
        own = first.turn(0.5)
        other = second.turn(0.5)
        later = first.turn(0.5)
        steps, others = ([at for at in each.times() if at > warm] for each in (first, second))
        assert len(others) > 1
        # A signal takes a moment to arrive.
        assert [at for at in others if not other[0] <= at <= other[1] + 0.05] == []
        assert [at for at in steps if other[0] + 0.05 < at < other[1]] == []
        assert sum(own[0] <= at <= own[1] for at in steps) > 1
        assert sum(later[0] <= at <= later[1] for at in steps) > 1
        pairs = take_turns((first, second), 2, 0.5)
        assert len(pairs.complete) + len(pairs.lost) == 2
        assert pairs.complete
        assert all(seconds >= 0.02 for pair in pairs.complete for seconds in pair)
    finally:
        for each in (first, second):
            each.kill()


def test_every_second_pair_has_the_other_order():
    order: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def turn(self, seconds: float) -> tuple[float, float]:
            order.append(self.name)
            return float(len(order)), len(order) + seconds

        def times(self) -> list[float]:
            """Two ends in each own turn; the second program's steps are twice as long."""
            own = [at for at, name in enumerate(order, start=1) if name == self.name]
            return [at + part for at in own for part in (0.0, 0.2 if self.name == "a" else 0.4)]

    pairs = take_turns((Noted("a"), Noted("b")), 4, 0.5)  # type: ignore[arg-type]
    assert "".join(order) == "abbaabba"
    assert pairs.ratios() == pytest.approx([2.0] * 4)


def test_times_are_read_beside_other_output(tmp_path):
    lines = ["print('building')", "print('[1,0]<stdout>:12.5')", "print('13.25')", "print('14.1', end='')"]
    each = program(tmp_path / "program", "\n".join(lines))
    each.process.wait(60)
    assert each.times() == [12.5, 13.25]  # 14.1 may be the beginning of 14.125


def test_program_that_ends_is_an_error(tmp_path):
    each = program(tmp_path / "program", "import sys; print(1.5); sys.exit('no memory')")
    with pytest.raises(SystemExit, match=r"(?s)did not begin its steps.*no memory"):
        each.wait_until_warm()
