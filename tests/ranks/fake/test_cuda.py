"""Streams and events of a GPU that is not there: what is queued, in its order."""

from __future__ import annotations

from itertools import islice

import torch

from ddlbench.config.compose import configuration, configurations
from ddlbench.config.job import make_job
from ddlbench.job import Place
from ddlbench.ranks.fake import cuda as fake_cuda
from ddlbench.ranks.fake.fake import fake_world
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.observed import Observed
from ddlbench.rehearsal.rehearse import fed
from tests.support.rehearsals import words

CUDA = torch.device("cuda", 0)


def test_a_batch_is_copied_on_the_side_and_the_compute_stream_waits_for_it() -> None:
    """One ahead: the second copy is queued before the first batch is given."""
    with configurations():
        made = configuration(*words("single", "gpt2_small"))
    job, calls = make_job(made, Launch("alone"), CUDA), list[str]()
    fake_cuda.queued.append(calls.append)
    try:
        with fake_world(0, 1, CUDA), Observed(CUDA).observing():
            batches = list(islice(fed(job, Place(0, 1), pinned=True), 2))
            assert all(batch is not None and batch.inputs.device == CUDA for batch in batches)
    finally:
        fake_cuda.queued.remove(calls.append)
    assert calls == ["side: record", "compute: wait", "side: record", "compute: wait", "side: record"]


def test_calls_go_to_the_stream_that_was_entered() -> None:
    calls = list[str]()
    fake_cuda.queued.append(calls.append)
    try:
        with fake_world(0, 1, CUDA):
            side, event = torch.cuda.Stream(), torch.cuda.Event()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                event.record()
            event.wait()
    finally:
        fake_cuda.queued.remove(calls.append)
    assert calls == ["side: wait for compute", "side: record", "compute: wait"]
