"""The groups that a pipeline makes; its measured bubble, with steps of invented lengths.

What the groups do is tested with the frameworks that use them.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Any, cast

import pytest
import torch.distributed as dist

from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.pipeline.rank import RECENT_STEPS, BusyClock, Groups
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.job import Framework, Job
from ddlbench.ranks.fake.fake import fake_world
from tests.equality.cases import MODELS
from tests.support.equal import make_job, ready
from tests.support.fake_cuda import DEVICE, FakeCuda
from tests.support.jobs import CASE as TIED
from tests.support.jobs import CPU, job
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case


@pytest.fixture(scope="module")
def made() -> dict[str, int]:
    """How many groups each mesh of four ranks makes."""
    parts, stages = Layout(dp=2, tp=2), Layout(pp=4)
    with fake_world(0, 4, CPU):
        return {
            "parts": groups_made(parts, job()),
            "clipped": groups_made(parts, job(clip_norm=1.0)),
            "fp16": groups_made(parts, job("fp16")),
            "stages": groups_made(stages, job()),
            "tied": groups_made(stages, replace(job(), model=TIED.model)),
            "full": groups_made(stages, job(), stays_full=True),
            "full and tied": groups_made(stages, replace(job(), model=TIED.model), stays_full=True),
        }


def groups_made(layout: Layout, given: Job, stays_full: bool = False) -> int:
    """stays_full: by a complete trainer of PipeDream-2BW"""
    before = len(dist.distributed_c10d._world.pg_map)
    given = replace(given, rank=dist.get_rank(), world_size=dist.get_world_size(), global_batch=16)
    if stays_full:
        PipeDream(double_buffered=True).setup(given)
    else:
        Groups(given, layout)
    return len(dist.distributed_c10d._world.pg_map) - before


def test_the_ranks_of_a_replica_have_a_group_only_where_an_update_asks_for_it(made: dict[str, int]) -> None:
    assert (made["clipped"], made["fp16"]) == (made["parts"] + 1, made["parts"] + 1)


def test_both_ends_of_a_pipeline_have_a_group_only_where_they_share_a_weight(made: dict[str, int]) -> None:
    assert (made["stages"], made["tied"]) == (0, 1)  # the stages' own is that of all ranks
    assert (made["full"], made["full and tied"]) == (0, 1)


@pytest.mark.parametrize(("rank", "ends"), [(0, [0, 8]), (3, [3, 11]), (10, [2, 10]), (5, None)])
def test_first_and_last_stage_of_a_pipeline_share_the_group_of_a_tied_weight(rank: int, ends: list[int] | None) -> None:
    with fake_world(rank, 12, CPU):
        given = replace(job(), model=TIED.model, rank=rank, world_size=12, global_batch=16)
        group = Groups(given, Layout(dp=2, tp=2, pp=3)).embedding_group
        assert (None if group is None else dist.get_process_group_ranks(group)) == ends


def clock_of(*steps: tuple[float, list[tuple[float, float]]]) -> BusyClock:
    clock = BusyClock(CPU)
    clock.steps.extend(((0.0, end), list(spans)) for end, spans in steps)
    return clock


def bubble_of(*steps: tuple[float, list[tuple[float, float]]]) -> float | None:
    clock = clock_of(*steps)
    clock.add_up()
    return clock.bubble()


def test_what_is_not_computing_is_bubble() -> None:
    assert bubble_of() is None
    assert bubble_of((10.0, [(0.0, 2.0), (5.0, 7.5)])) == pytest.approx(0.55)


def test_one_slow_step_does_not_count() -> None:
    usual = (10.0, [(0.0, 8.0)])
    assert bubble_of((100.0, [(0.0, 1.0)]), usual, usual) == pytest.approx(0.2)


def test_the_last_epoch_counts_alone() -> None:
    """Epoch 0 warms up; an epoch without a step leaves what is known."""
    clock = clock_of((10.0, [(0.0, 1.0)]), (10.0, [(0.0, 1.0)]))
    clock.add_up()
    clock.steps.append(((0.0, 10.0), [(0.0, 8.0)]))
    clock.add_up()
    clock.add_up()
    assert clock.bubble() == pytest.approx(0.2)
    assert clock.bubble() == pytest.approx(0.2), "as often as it is asked"


def two_ranks() -> tuple[float | None, bool]:
    """The bubble; and whether rank 0 had added up before rank 1 began to, which waits for that."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    clock = clock_of((10.0, [(0.0, 9.0 if rank else 6.0)]))
    prompt = True
    if rank == 1:
        try:
            store.wait(["rank 0 has added up"], timedelta(seconds=10))
        except RuntimeError:
            prompt = False
    clock.add_up()
    store.set("rank 0 has added up" if rank == 0 else "rank 1 too", "")
    return clock.bubble(), prompt


# Four micro batches a minibatch.
CASE = Case("gpt2", replace(MODELS["gpt2"], tie_weights=False), micro_batch=3)  # pyright: ignore
FRAMEWORKS: dict[str, Framework] = {
    "1f1b": Pipeline(schedule="1f1b", balance=[2, 3]),
    "pipedream": PipeDream(balance=[2, 3]),
    "pipedream_2bw": PipeDream("pipedream_2bw", True, balance=[2, 3]),
}


def trained() -> dict[str, tuple[int, Any]]:
    """How many parts of a step of each are computing, on this rank, once the pipeline is full; and its staleness."""
    result: dict[str, tuple[int, Any]] = {}
    for name, framework in FRAMEWORKS.items():
        framework.check(make_job(CASE))
        with ready(framework, make_job(CASE)) as (trainer, batch):
            for _ in range(4):
                trainer.step(batch)
            computing = len(trainer.clock.steps[-1][1])
            trainer.flush()
            result[name] = computing, trainer.facts()["staleness"]
    return result


@cache
def on_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, results, {"bubble": two_ranks, "trained": trained})


def test_it_is_the_share_of_all_ranks_time_and_no_rank_waits_within_the_epoch() -> None:
    """An epoch that ended with a collective would be equally long on all ranks, and no straggler could be seen."""
    assert [rank["bubble"] for rank in on_two_ranks()] == [(pytest.approx(0.25), True)] * 2


def test_passes_losses_and_updates_within_a_schedule_are_computing() -> None:
    """Four forward and four backward passes; on the last stage four losses; PipeDream's update between two of them."""
    first, last = ({name: parts for name, (parts, _) in rank["trained"].items()} for rank in on_two_ranks())
    assert first == {"1f1b": 4 + 4, "pipedream": 4 + 4 + 1, "pipedream_2bw": 4 + 4 + 1}
    assert last == {"1f1b": 4 + 4 + 4, "pipedream": 4 + 4 + 4 + 1, "pipedream_2bw": 4 + 4 + 4 + 1}


def test_the_staleness_of_each_stage_is_counted() -> None:
    """The first stage of two is one minibatch behind; with two versions of the weights both see the older one."""
    for rank in on_two_ranks():
        result = {name: staleness for name, (_, staleness) in rank["trained"].items()}
        assert result == {"1f1b": 0, "pipedream": [1, 0], "pipedream_2bw": [1, 1]}


def test_on_a_gpu_the_device_is_idle_before_its_stamps_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule of 10 s, of which 6 compute; the host has launched all of it at once."""
    cuda = FakeCuda(monkeypatch)
    clock = BusyClock(DEVICE)
    compute = clock.computing()(cuda.launch)
    with clock.schedule():
        compute(2.0, "forward")
        cuda.launch(4.0, "receive")
        compute(4.0, "backward")
    clock.add_up()
    assert clock.bubble() == pytest.approx(0.4)
    assert cuda.calls[-4:] == ["synchronize", *["elapsed"] * 3]


def test_only_what_runs_within_a_schedule_counts() -> None:
    clock = BusyClock(CPU)
    double = clock.computing()(lambda number: 2 * number)
    assert double(2) == 4  # as in validation
    for _ in range(RECENT_STEPS + 1):
        with clock.schedule():
            double(double(1))
        double(1)
    assert [len(spans) for _, spans in clock.steps] == [2] * RECENT_STEPS
    for (begin, end), spans in clock.steps:
        stamps = cast(list[float], [begin, *chain(*spans), end])
        assert stamps == sorted(stamps)
