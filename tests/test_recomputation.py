"""Plans of what runs again: the values of the key, the bytes and FLOPs of a plan, and the fastest one for a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nextafter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlbench.errors import Unsupported, UserError
from ddlbench.recomputation import Link, Plan, check_names, choice, fastest, instants, kept, named, plan_of, repeats
from ddlbench.texts import GIB

Chain = tuple[Link, ...]
NAMES = ["a", "b", "c", "d", "e"]


def no_links() -> Chain:
    raise AssertionError("only a budget needs the counts")


def link(flops: int, saved: int, output: int, saves_output: bool, more: tuple[int, int]) -> Link:
    return Link(flops, saved, output, 0 if saves_output else output, saved + more[0], saved + more[1])


def chains(longest: int) -> st.SearchStrategy[Chain]:
    more = st.tuples(st.integers(0, 6), st.integers(0, 9))
    one = st.builds(link, st.integers(1, 9), st.integers(1, 20), st.integers(1, 6), st.booleans(), more)
    return st.lists(one, min_size=1, max_size=longest).map(tuple)


def bytes_of(plan: Plan, links: Chain) -> float:
    return max(run.bytes_ for run in instants(plan, links))


def flops_of(plan: Plan, links: Chain) -> float:
    return sum(times * block.flops for times, block in zip(repeats(plan), links, strict=True))


def every_plan(first: int, end: int, inner: bool = False) -> Iterator[Plan]:
    """Also those that end with a segment. inner: of a segment, which is not again one segment of the same blocks"""
    if first == end:
        yield ()
        return
    for rest in every_plan(first + 1, end):
        yield (first, *rest)
    for cut in range(first + 1, end if inner else end + 1):
        for segment in every_plan(first, cut, inner=True):
            for rest in every_plan(cut, end):
                yield (segment, *rest)


@settings(max_examples=50, deadline=None)
@given(chains(4))
def test_the_optimum_is_that_of_all_plans(links: Chain) -> None:
    result = [(bytes_of(plan, links), flops_of(plan, links)) for plan in every_plan(0, len(links))]
    for budget in {bytes_ for bytes_, _ in result}:
        plan = fastest(links, budget)
        assert plan is not None
        assert bytes_of(plan, links) <= budget
        assert flops_of(plan, links) == min(flops for bytes_, flops in result if bytes_ <= budget)
    assert fastest(links, nextafter(min(result)[0], -inf)) is None


@pytest.mark.parametrize(("blocks", "snapshots"), [(1, 1), (2, 1), (6, 1), (6, 2), (10, 2), (10, 3), (12, 3), (12, 4)])
def test_equal_blocks_run_again_as_often_as_with_revolve(blocks: int, snapshots: int) -> None:
    """Griewank & Walther 2000: r l - C(s + r, r - 1) runs for l steps and s snapshots, C(s + r - 1, s) < l <= C(s + r,
    s). A snapshot is an input of 1 byte; only one block at a time can have the 1000 that autograd saves. The first
    input, a snapshot there, is not counted here, but the input of the block that runs is."""
    r = next(r for r in range(1, 20) if blocks <= math.comb(snapshots + r, snapshots))
    links = (Link(1, 1000, 1, 0, 0, 1000),) * blocks
    plan = fastest(links, 1000 + snapshots)
    assert plan is not None
    assert flops_of(plan, links) == r * blocks - math.comb(snapshots + r, r - 1)


def test_a_plan_by_hand() -> None:
    """Two blocks in a segment, then one: 3 bytes of input are kept, and the first two run again beside a gradient of
    3."""
    one = Link(5, 10, 3, 0, 11, 14)
    links, plan = (one, one, replace(one, flops=7)), ((0, 1), 2)
    assert kept(plan, links) == [0, 3, 13]
    assert repeats(plan) == [1, 1, 0]
    assert repeats((((0, 1), 2), 3)) == [2, 2, 1, 0], "in two segments"
    runs = [(run.block, run.backward, run.bytes_) for run in instants(plan, links)]
    assert runs == [
        (0, False, 11), (1, False, 3 + 11), (2, False, 3 + 11), (2, True, 3 + 14),
        (0, True, 11 + 3), (1, True, 10 + 11 + 3), (1, True, 10 + 14), (0, True, 14),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "plan"),
    [
        ("none", (0, 1, 2, 3, 4)),
        (False, (0, 1, 2, 3, 4)),
        ("blocks", ((0,), (1,), (2,), (3,), (4,))),
        (True, ((0,), (1,), (2,), (3,), (4,))),
        ("every:2", ((0, 1), (2, 3), (4,))),
        ("every:9", ((0, 1, 2, 3, 4),)),
        (["d", "b"], (0, (1,), 2, (3,), 4)),
        ("selective", (0, 1, 2, 3, 4)),
    ],
)
def test_the_values_of_the_key(value: Any, plan: Plan) -> None:
    assert plan_of(choice(value), NAMES, no_links) == plan


def test_records_have_the_values_of_before_and_names_of_segments() -> None:
    assert [choice(value) for value in ("none", "blocks", False, True)] == [False, True, False, True]
    assert named(((0, (1,)), 2), NAMES) == [["a", ["b"]], "c"]


@pytest.mark.parametrize(
    "value",
    ["some", "every:0", "every:-1", "every:two", "every:", "budget:0", "budget:-1", "budget:nan", "budget:inf",
     "budget:x", "budget:", [], ["a", "a"], [1], 3, None, {"a": 1}],
)  # fmt: skip
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"^train\.checkpoint_activations=.* must be none, blocks, selective, .*$"):
        choice(value)


def test_an_unknown_block_is_named() -> None:
    check_names(["a"], NAMES)
    with pytest.raises(Unsupported, match=r"the model has no block h9: its blocks are a, b, c, d, e"):
        check_names(["a", "h9"], NAMES)


def test_a_budget_is_shared_by_the_micro_batches_in_memory() -> None:
    links = (Link(1, GIB, GIB // 4, 0, GIB, GIB),) * 3
    assert plan_of("budget:3", NAMES[:3], lambda: links) == (0, 1, 2)
    assert plan_of("budget:3", NAMES[:3], lambda: links, in_flight=2) != (0, 1, 2)
    # Each of two: a kept input or two, the block that runs, and the gradient of its output.
    with pytest.raises(Unsupported, match=r"budget:1: no set of blocks fits: the least for a to c is 3 GiB with 2"):
        plan_of("budget:1", NAMES[:3], lambda: links, in_flight=2)
