"""Plans of what is offloaded: the values of the key, the choice between offloading and recomputation, their bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ddlbench import recomputation
from ddlbench.errors import Unsupported, UserError
from ddlbench.offloading import check, choice, exposed, offloaded, plan_of
from ddlbench.recomputation import Choice, Link, Offloaded, Plan, instants, kept
from ddlbench.texts import GIB

NAMES = ["a", "b", "c", "d"]
# 10 bytes each, of which 2 are casts of weights and 3 the output.
ONE = Link(flops=8, saved=10, output=3, unsaved_output=0, forward=11, backward=14, fixed=2)


FOUR = [ONE] * 4


def planned(
    recompute: Choice, offload: Choice, links: list[Link] | None = None, flops_per_byte: float = 1.0
) -> tuple[Plan, list[int]]:
    """The plan and what it copies. links: None where there is no budget, which alone needs the counts"""

    def counted() -> list[Link]:
        assert links is not None
        return links

    plan = plan_of(recompute, offload, flops_per_byte, NAMES, counted)
    return plan, offloaded(plan)


@pytest.mark.parametrize(
    ("recompute", "offload", "plan", "copied"),
    [
        (False, "none", (0, 1, 2, 3), []),
        (True, "none", ((0,), (1,), (2,), (3,)), []),
        (False, "blocks", (0, 1, 2, 3), [0, 1, 2]),
        (False, ["c", "a"], (0, 1, 2, 3), [0, 2]),
        (["b"], "blocks", (0, (1,), 2, 3), [0, 2]),
        (["b"], ["a"], (0, (1,), 2, 3), [0]),
    ],
)
def test_the_values_of_the_key(recompute: Choice, offload: Any, plan: Plan, copied: list[int]) -> None:
    assert planned(recompute, choice(offload)) == (plan, copied)


@pytest.mark.parametrize("value", ["some", "every:2", "selective", "budget:0", "budget:x", [], ["a", "a"], 3, None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(
        UserError, match=r"^train\.offload_activations=.* must be none, blocks, a list of different .*$"
    ):
        choice(value)


@pytest.mark.parametrize(
    ("recompute", "offload", "reason"),
    [
        (False, ["x"], "train.offload_activations: the model has no block x: its blocks are a, b, c, d"),
        (False, ["a", "d"], "cannot offload d: its backward pass begins when its forward pass ends"),
        (["a"], ["a", "b"], "cannot offload blocks that run again"),
        (True, True, "cannot offload a block: all before d run again"),
        ("every:2", True, "cannot offload a block: all before d run again"),
    ],
)
def test_blocks_that_cannot_be_offloaded_are_refused(recompute: Choice, offload: Choice, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        planned(recompute, offload)


@pytest.mark.parametrize(
    ("recompute", "offload"), [("budget:1", True), ("budget:1", ["a"]), (True, "budget:1"), ("budget:1", "budget:2")]
)
def test_a_budget_is_for_both_keys(recompute: Choice, offload: Choice) -> None:
    with pytest.raises(UserError, match="a budget is for both keys together: give the same budget to both"):
        check(recompute, offload)
    check(False, "budget:1")
    check("budget:1", "budget:1")
    check("budget:1", False)


def test_what_selective_keeps_is_not_offloaded() -> None:
    with pytest.raises(UserError, match="what `selective` keeps cannot be offloaded: set one of them to none"):
        check("selective", True)
    check("selective", False)


def test_bytes_by_hand() -> None:
    """The first two blocks are offloaded: their 8 bytes are there once more in the passes of the next block. The
    output of the second, 3 bytes, stays as the input of the third."""
    plan = planned(False, ["a", "b"])[0]
    assert kept(plan, FOUR) == [0, 2, 2 + 2 + 3, 7 + 10, 17 + 10]
    runs = [(run.block, run.backward, run.bytes_) for run in instants(plan, FOUR)]
    assert runs == [
        (0, False, 11), (1, False, 2 + 8 + 11), (2, False, 7 + 8 - 3 + 11), (3, False, 17 + 11),
        (3, True, 17 + 14), (2, True, 7 + 8 + 14), (1, True, 2 + 8 + 14), (0, True, 14),
    ]  # fmt: skip


def test_an_offloaded_block_before_one_that_runs_again() -> None:
    """Its copies come back before the second run, which has the gradient of its output, 3, beside it."""
    plan: Plan = (Offloaded(0), (1,), 2)
    runs = [(run.block, run.backward, run.bytes_) for run in instants(plan, [ONE] * 3)]
    assert runs == [
        (0, False, 11), (1, False, 5 + 8 - 3 + 11), (2, False, 8 + 11), (2, True, 8 + 14),
        (1, True, 5 + 8 + 11 + 3), (1, True, 5 + 8 + 14), (0, True, 14),
    ]  # fmt: skip


@pytest.mark.parametrize(("bytes_", "copied"), [(44, []), (43, [0]), (39, [0]), (38, [0, 1]), (31, [0, 1])])
def test_a_budget_offloads_the_first_blocks(bytes_: int, copied: list[int]) -> None:
    """The last backward pass has 3 x 10 + 14 bytes beside it; 2 + 3 + 20 + 14 if one block is offloaded; 4 + 3 + 10 +
    14 if two are, which three do not improve: 6 + 3 + 8 + 14, with the copies that come back."""
    assert planned(False, f"budget:{bytes_ / GIB}", FOUR)[1] == copied


def test_a_budget_that_is_too_small_names_the_least() -> None:
    with pytest.raises(Unsupported, match=r"no number of blocks fits: the least for a to d is .* GiB"):
        planned(False, f"budget:{30 / GIB}", FOUR)


@pytest.mark.parametrize(
    ("flops_per_byte", "plan", "copied"),
    [
        (1.0, (0, 1, 2, 3), [0, 1]),  # 8 bytes: copied in the time of one forward pass
        (2.0, (0, 1, 2, 3), [0, 1]),  # 16: 8 are exposed on the way out, none on the way back: as long as 8 FLOPs
        (2.1, ((0,), (1,), 2, 3), []),  # 16.8: more than a second run
    ],
)
def test_a_block_is_swapped_or_recomputed_by_what_costs_less(
    flops_per_byte: float, plan: Plan, copied: list[int]
) -> None:
    budget = f"budget:{31 / GIB}"
    assert planned(budget, budget, FOUR, flops_per_byte) == (plan, copied)


def test_a_second_run_gives_copies_time() -> None:
    """Block b is cheap and runs again. What block a saves comes back in 21 FLOPs: during b's backward pass of 2 x 7,
    and its second run of 7."""
    cheap, large = replace(ONE, flops=7, saved=42), replace(ONE, flops=30, saved=23)
    costly = replace(ONE, flops=30)
    budget = f"budget:{48 / GIB}"
    assert planned(budget, budget, [large, cheap, costly, ONE]) == ((0, (1,), 2, 3), [0])
    assert exposed(21, 7, 21) == 14
    assert exposed(21, 7, 14) == 21


def delay(plan: Plan, links: list[Link], flops_per_byte: float) -> float:
    """What offloading and second runs add to a step, in FLOPs."""
    if not offloaded(plan):
        counts = zip(recomputation.repeats(plan), links, strict=True)
        return sum(count * link.flops for count, link in counts)
    added = 0.0
    for item, following, link in zip(plan, (*plan[1:], None), links, strict=True):
        if isinstance(item, Offloaded):
            passed = links[item + 1].flops
            passes = 3 if isinstance(following, tuple) else 2
            added += exposed(link.offloaded * flops_per_byte, passed, passes * passed)
        elif isinstance(item, tuple):
            added += link.flops
    return added


def peak(plan: Plan, links: list[Link]) -> float:
    return max(run.bytes_ for run in instants(plan, links))


def network() -> list[Link]:
    """A network such as GPT-2: an embedding, equal blocks, a head."""
    embedding = Link(flops=1, saved=5, output=10, unsaved_output=10, forward=20, backward=30)
    block = Link(flops=100, saved=100, output=10, unsaved_output=0, forward=110, backward=130, fixed=5)
    head = Link(flops=300, saved=60, output=50, unsaved_output=0, forward=120, backward=200, fixed=5)
    return [embedding, *[block] * 5, head]


@pytest.mark.parametrize("flops_per_byte", [0.5, 1.5, 2.5, 5.0])
@pytest.mark.parametrize("part", [0.9, 0.75, 0.6])
def test_equal_blocks_have_the_best_of_all_plans(flops_per_byte: float, part: float) -> None:
    """With blocks of very different sizes there may be a better plan."""
    links = network()
    limit = part * peak(tuple(range(7)), links)
    choices = ((number, Offloaded(number), (number,)) for number in range(6))
    plans = [(*before, 6) for before in product(*choices)]
    alone = recomputation.fastest(tuple(links), limit)
    plans += [alone] if alone else []
    best = min(delay(plan, links, flops_per_byte) for plan in plans if peak(plan, links) <= limit)
    budget, names = f"budget:{limit / GIB}", [str(number) for number in range(7)]
    assert delay(plan_of(budget, budget, flops_per_byte, names, lambda: links), links, flops_per_byte) == best


@pytest.mark.parametrize("bytes_", [430, 260])
def test_with_a_budget_in_both_keys_the_step_waits_no_longer_than_with_recomputation_alone(bytes_: int) -> None:
    """Segments of several blocks: with 260 bytes no choice of one treatment for each block fits."""
    links, budget = network(), f"budget:{bytes_ / GIB}"
    names = [str(number) for number in range(7)]
    alone = recomputation.fastest(tuple(links), bytes_)
    assert alone is not None
    plan = plan_of(budget, budget, 2.5, names, lambda: links)
    assert (offloaded(plan), plan) == ([], alone)
    with pytest.raises(Unsupported, match="no number of blocks fits"):
        plan_of(False, f"budget:{260 / GIB}", 2.5, names, lambda: links)
