"""benchmarks/loop_cost.py runs the real loop over the steps that it divides by."""

from __future__ import annotations

from benchmarks.loop_cost import Nothing, bare_s, batches, line, loop_s


def test_every_step_of_every_epoch_is_taken(monkeypatch) -> None:
    taken: list[object] = []
    monkeypatch.setattr(Nothing, "step", lambda self, batch: taken.append(batch) or self.loss)
    clock_s, cpu_s = loop_s(steps=60, epochs=2)
    assert len(clock_s) == len(cpu_s) == 2, "the first epoch is left out"
    assert all(each > 0 for each in [*clock_s, *cpu_s])
    assert len(taken) == 3 * 60
    assert bare_s(5)[0] > 0
    assert len(taken) == 3 * 60 + 5
    assert len(list(batches(7))) == 7


def test_microseconds_a_step() -> None:
    said = line("ddlbench", 1000, [0.004, 0.006, 0.02], [0.003, 0.003, 0.005])
    assert said == "ddlbench  us a step: processor   3.00, clock   6.00 (4.00 to 20.00)"
