"""Which learning rates were used, however long a run is."""

from __future__ import annotations

import pickle

from ddlbench.recipe.schedules import Rates


def a_tenth(step: int) -> float:
    return step / 10


def test_first_and_last_rate_of_a_run_of_some_steps() -> None:
    rates = Rates(a_tenth)
    assert (rates.first, rates.last) == (None, None)
    assert [rates.used(rates.next) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]
    assert (rates.step, rates.first, rates.last) == (4, 0.0, 0.3)


def test_the_optimizers_rate_counts_not_the_schedules() -> None:
    rates = Rates(a_tenth)
    rates.used(0.7)
    assert (rates.first, rates.last, rates.next) == (0.7, 0.7, 0.1)


def test_a_resumed_run_begins_at_another_step() -> None:
    rates = Rates(a_tenth, step=20)
    assert [rates.used(rates.next) for _ in range(2)] == [2.0, 2.1]
    assert (rates.first, rates.last) == (2.0, 2.1)


def test_a_checkpoint_keeps_all_but_the_schedule() -> None:
    saved, resumed = Rates(a_tenth, step=4, first=0.0, last=0.3), Rates(a_tenth)
    assert saved.state().keys() == vars(saved).keys() - {"of_step"}
    resumed.load(saved.state())
    assert resumed == saved


def test_it_does_not_grow_with_the_run() -> None:
    short, long = Rates(a_tenth), Rates(a_tenth)
    for rates, steps in ((short, 10), (long, 10_000)):
        for _ in range(steps):
            rates.used(0.5)
    assert len(pickle.dumps(long)) <= len(pickle.dumps(short)) + 8  # a wider integer
