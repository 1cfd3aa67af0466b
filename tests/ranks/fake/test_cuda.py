"""Streams and events of a GPU that is not there."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from ddlbench.config.compose import configuration
from ddlbench.config.job import make_job
from ddlbench.job import Place
from ddlbench.ranks.fake import cuda as fake_cuda
from ddlbench.ranks.fake.fake import fake_world
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.observed import Observed
from ddlbench.rehearsal.rehearse import fed
from tests.support.rehearsals import words

CUDA = torch.device("cuda", 0)


def test_a_batch_is_copied_on_the_side_and_the_compute_stream_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ahead: the second copy is queued before the first batch is given."""
    calls = list[str]()
    for call in ("record", "wait"):

        def note(event: object, stream: object = None, call: str = call) -> None:
            on_compute = (stream or torch.cuda.current_stream()) is fake_cuda.COMPUTE
            calls.append(f"{'compute' if on_compute else 'side'}: {call}")

        monkeypatch.setattr(fake_cuda.Event, call, note)
    made = configuration(*words("single", "gpt2_small"))
    job = make_job(made, Launch("alone"), CUDA)
    with fake_world(0, 1, CUDA), Observed(CUDA).observing():
        batches = list(islice(fed(job, Place(0, 1), pinned=True), 2))
        assert all(batch is not None and batch.inputs.device == CUDA for batch in batches)
    assert calls == ["side: record", "compute: wait", "side: record", "compute: wait", "side: record"]


def test_the_current_stream_is_the_one_that_was_entered() -> None:
    with fake_world(0, 1, CUDA):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() is side
        assert torch.cuda.current_stream() is fake_cuda.COMPUTE
