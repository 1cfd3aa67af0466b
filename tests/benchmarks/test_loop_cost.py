"""benchmarks/loop_cost.py runs the real loop over the steps that it divides by."""

from __future__ import annotations

from benchmarks.loop_cost import Nothing, bare_s, batches, loop_s


def test_every_step_of_every_epoch_is_taken(monkeypatch) -> None:
    taken: list[object] = []
    monkeypatch.setattr(Nothing, "step", lambda self, batch: taken.append(batch) or self.loss)
    seconds = loop_s(steps=60, epochs=2)
    assert len(seconds) == 2, "the first epoch is left out"
    assert all(each > 0 for each in seconds)
    assert len(taken) == 3 * 60
    assert bare_s(5) > 0
    assert len(taken) == 3 * 60 + 5
    assert len(list(batches(7))) == 7
