"""The loop's own promises; that it trains right is tests/equality/test_equal_training.py."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import ddlbench.loop
from ddlbench.data.feed import Feed
from ddlbench.errors import Failure, Stopped
from ddlbench.job import Batch, Job, Place, Trainer
from ddlbench.loop import Run, train
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary, StopRequest
from ddlbench.recipe.recipe import Rates
from ddlbench.run import scenarios
from tests.support.equal import Rows
from tests.support.runs import RESNET, composed


@dataclass
class Weight:
    """Trains one number and keeps the learning rate of each step."""

    rates: list[float] = field(default_factory=list[float])
    updates: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=9.0)

    def step(self, batch: object) -> torch.Tensor:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.updates += 1
        return torch.tensor(1.0)

    def flush(self) -> None: ...


def run_of(epochs: int, steps: int) -> tuple[Run, Rows]:
    batch = Batch(torch.zeros(4), torch.zeros(4), torch.ones(4, dtype=torch.bool))
    feed = SimpleNamespace(
        train=lambda epoch: iter([batch] * steps), steps_per_epoch=steps, facts=lambda: {"bad_samples": {}}
    )
    rows = Rows()
    job = SimpleNamespace(device=torch.device("cpu"), rank=0, global_batch=4)
    run = Run(
        cast(Job, job), Place(0, 1), cast(Feed, feed), epochs, 0, rows, Progress(False), Boundary(job.device),
        validate=False,
    )  # fmt: skip
    return run, rows


def test_memory_peaks_start_anew_before_the_first_step_of_every_epoch_and_after_the_warm_up_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (run, _), trainer, calls = run_of(epochs=2, steps=2), Weight(), list[str]()
    run.warmup_steps = 1
    monkeypatch.setattr(ddlbench.loop, "reset_peaks", lambda device: calls.append("reset"))
    step = trainer.step
    monkeypatch.setattr(trainer, "step", lambda batch: calls.append("step") or step(batch))
    train(run, cast(Trainer, trainer), Rates(lambda step: 0.1))
    assert calls == ["reset", "step", "reset", "step", "reset", "step", "step"]


@pytest.mark.parametrize("first", [0, 30])
def test_steps_are_counted_over_epochs_from_where_the_run_begins(first: int) -> None:
    (run, rows), trainer, rates = run_of(epochs=2, steps=3), Weight(), Rates(lambda step: step / 10, first)
    train(run, cast(Trainer, trainer), rates)
    expected = [(first + step) / 10 for step in range(6)]
    assert trainer.rates == expected
    assert [list(row.ranks[0].rates) for row in rows.rows] == [expected[:3], expected[3:]]  # its own epoch's alone
    assert [row.lr_last for row in rows.rows] == [expected[2], expected[5]]
    assert (rates.step, rates.first, rates.last) == (first + 6, expected[0], expected[-1])


def test_warmup_steps_begin_the_attempt_s_first_epoch_and_are_never_all_of_it() -> None:
    run, _ = run_of(epochs=5, steps=3)
    run.warmup_steps, run.first_epoch = 1, 3
    assert [run.begin(epoch).warmup_steps for epoch in (3, 4)] == [1, 0]
    run.warmup_steps = 9
    assert run.begin(3).warmup_steps == 2


def test_no_tensor_of_a_step_outlives_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks that stay between the large ones of a step make the process grow at every step."""
    (run, rows), trainer = run_of(epochs=1, steps=60), Weight()  # more than one vote
    made, own, alive = list[weakref.ref[torch.Tensor]](), trainer.step, list[int]()

    def step(batch: object) -> torch.Tensor:
        alive.append(sum(each() is not None for each in made))
        loss = own(batch)
        made.append(weakref.ref(loss))
        return loss

    monkeypatch.setattr(trainer, "step", step)
    train(run, cast(Trainer, trainer), Rates(lambda _: 0.1))
    assert max(alive) == 1  # that of the step before, until this one has its own
    assert list(rows.rows[0].ranks[0].losses) == [1.0] * 60


def test_a_run_that_is_stopped_keeps_the_epochs_that_are_done() -> None:
    (run, rows), trainer = run_of(epochs=3, steps=3), Weight()
    stop, own = StopRequest(0), trainer.step
    run.boundary.stop = stop.pass_boundary

    def step(batch: object) -> torch.Tensor:
        if trainer.updates == 4:  # within epoch 1
            stop.decide(stop.announce(Failure("killed", "rank 0 received SIGTERM", 143, 0)) + 1)
        return own(batch)

    trainer.step = step
    with pytest.raises(Stopped, match="rank 0 received SIGTERM; stopped after step 1 of epoch 1"):
        train(run, cast(Trainer, trainer), Rates(lambda _: 0.1))
    assert trainer.updates == 5
    assert [row.epoch for row in rows.rows] == [0]


def test_what_follows_an_epoch_comes_once_it_is_recorded_and_no_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Clock(ddlbench.loop.EpochClock):
        def steps(self, batches):
            calls.append("begin")
            return super().steps(batches)

        def stop(self):
            calls.append("end")
            return super().stop()

    (run, rows), trainer = run_of(epochs=3, steps=2), Weight()
    monkeypatch.setattr(ddlbench.loop, "EpochClock", Clock)
    run.first_epoch = 1
    run.after_epoch = lambda epoch: calls.append(f"saved {epoch} of {len(rows.rows)}")
    train(run, cast(Trainer, trainer), Rates(lambda _: 0.1))
    assert calls == ["begin", "end", "saved 1 of 1", "begin", "end", "saved 2 of 2"]
    assert [row.warmup for row in rows.rows] == [True, False]


@pytest.mark.parametrize(("mode", "metrics"), [("train", []), ("loader", ["read_bytes"])])
def test_an_epoch_whose_validation_is_stopped_is_recorded_without_it(
    monkeypatch: pytest.MonkeyPatch, mode: str, metrics: list[str]
) -> None:
    (run, rows), trainer = run_of(epochs=2, steps=2), cast(Trainer, Weight())
    run.validate = True

    def stopped(*_: object) -> dict[str, float]:
        raise Stopped(Failure("killed", "rank 0 received SIGTERM", 143, 0), "between two epochs")

    monkeypatch.setattr(ddlbench.loop, "validate", stopped)
    monkeypatch.setattr(scenarios, "read_validation", stopped)
    loading = scenarios.Loading(composed(*RESNET, "loader=synthetic", "mode=loader"), run.job)
    with pytest.raises(Stopped):
        train(run, trainer, Rates(lambda _: 0.1)) if mode == "train" else loading.run(run)
    assert [(row.epoch, [*row.metrics]) for row in rows.rows] == [(0, metrics)]
