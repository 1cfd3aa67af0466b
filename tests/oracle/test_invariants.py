"""Rules that hold for any blocks and links: the unit of time, faster links, more bytes, what a step contains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlbench.counts.counts import Block
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.knobs import DeepSpeedOptions
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.oracle.machine.collectives import ALGORITHMS, FORMULAS, path
from ddlbench.oracle.machine.machine import Link, Machine
from ddlbench.oracle.predictor import strategy
from ddlbench.oracle.setting import Outcome
from tests.oracle.made import MACHINE, block, made

quick = settings(max_examples=40, deadline=None)

WORLD, BATCH = 8, 32
FRAMEWORKS: list[Any] = [
    DDP(),
    LocalSGD(),
    FSDP(),
    *(DeepSpeedOptions(zero_stage=stage) for stage in range(4)),
    *(Pipeline(schedule=schedule, dp=2, balance=[1] * 4) for schedule in ("gpipe", "1f1b", "zero_bubble")),
    PipeDream(dp=2, balance=[1] * 4),
]
seconds: Any = st.floats(1e-4, 1.0)
numbers: Any = st.integers(0, 10**8)
blocks: Any = st.lists(st.tuples(seconds, numbers), min_size=4, max_size=4)
links: Any = st.tuples(*[st.tuples(st.floats(0.0, 1e-3), st.floats(1e6, 1e12))] * 2)
framework: Any = st.sampled_from(FRAMEWORKS)
factor: Any = st.floats(1.0, 1e3)


def machine(given_links: Any, slower: float = 1.0) -> Machine:
    """With links on which all seconds are `slower` times as long."""
    made_links = tuple(Link("made", alpha * slower, rate / slower) for alpha, rate in given_links)
    return replace(MACHINE, links=made_links)


def made_blocks(given_blocks: Any, slower: float = 1.0) -> list[Block]:
    """Forward passes of these seconds a sample, backward passes of twice as many; parameters; 1 kB between stages."""
    return [
        block(f"block {index}", slower * forward, 2 * slower * forward, count, output=1000.0)
        for index, (forward, count) in enumerate(given_blocks)
    ]


def step(chosen: Any, given_blocks: list[Block], on: Machine) -> Outcome:
    return strategy(chosen, made(WORLD, given_blocks, BATCH, on, micro_batch=2))


@quick
@given(framework, blocks, links, factor)
def test_the_unit_of_time_changes_nothing(chosen: Any, given_blocks: Any, given_links: Any, slower: float):
    outcome = step(chosen, made_blocks(given_blocks), machine(given_links))
    scaled = step(chosen, made_blocks(given_blocks, slower), machine(given_links, slower))
    for name in ("step_s", "compute_s", "exposed_s", "bubble_s"):
        assert getattr(scaled, name) == pytest.approx(slower * getattr(outcome, name), rel=1e-6, abs=1e-12), name


@quick
@given(framework, blocks, links, factor)
def test_slower_links_or_slower_passes_shorten_no_step(chosen: Any, given_blocks: Any, given_links: Any, slower: float):
    fast = step(chosen, made_blocks(given_blocks), machine(given_links)).step_s
    assert step(chosen, made_blocks(given_blocks), machine(given_links, slower)).step_s >= fast * (1 - 1e-9)
    assert step(chosen, made_blocks(given_blocks, slower), machine(given_links)).step_s >= fast * (1 - 1e-9)


@quick
@given(framework, blocks, links)
def test_a_step_has_its_computing_and_no_more_communication_than_it_sends(
    chosen: Any, given_blocks: Any, given_links: Any
):
    outcome = step(chosen, made_blocks(given_blocks), machine(given_links))
    each_rank = BATCH / WORLD * 3 * sum(forward for forward, _ in given_blocks)  # all ranks busy all the time
    assert outcome.step_s >= each_rank * (1 - 1e-9)
    for message in outcome.messages:
        assert message.exposed <= message.seconds * (1 + 1e-9), message.what


@quick
@given(st.floats(1.0, 1e10), st.integers(1, 4096), links, factor)
def test_collectives(size: float, ranks: int, given_links: Any, more: float):
    """Zero on one rank and for no bytes; more bytes take longer, and not more times as long; no algorithm is faster
    than the chosen one."""
    to = path(machine(given_links), ranks)
    for kind in FORMULAS:
        took = to.seconds(kind, size)
        assert to.seconds(kind, 0) == 0
        assert took == 0 if ranks == 1 else took > 0
        assert took <= to.seconds(kind, more * size) <= more * took * (1 + 1e-9)
    if ranks > 1:
        assert all(to.seconds("all_reduce", size) <= ALGORITHMS[name](size, to) for name in ("ring", "tree"))
