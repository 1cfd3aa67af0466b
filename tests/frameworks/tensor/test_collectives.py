"""What three ranks send each other and the gradients of it, by hand; the loss of logits that they share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ddlbench.frameworks.tensor.collectives import (
    Part,
    copy_to,
    gather_from,
    gather_from_sequence,
    parallel_cross_entropy,
    rank_random,
    reduce_from,
    reduce_scatter_to_sequence,
    share,
)
from ddlbench.job import Batch
from tests.support import ranks
from tests.support.jobs import job
from tests.support.ranks import run_ranks

ROW, WEIGHTS = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 10.0, 100.0]])
SEVEN = torch.arange(7.0)[None]

LOGITS = torch.randn(4, 2, 7, generator=torch.Generator().manual_seed(0)) * 3
TARGETS = torch.tensor([[0, 6], [3, -100], [2, 4], [-100, 5]])


def part() -> Part:
    return Part(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def through(function: Callable[[Tensor], Tensor], own: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What comes out, and the gradient of the weighted sum of it."""
    own = own.clone().requires_grad_()
    output = function(own)
    (output * weights).sum().backward()
    assert own.grad is not None
    return output.detach(), own.grad


def collectives() -> dict[str, tuple[Tensor, Tensor]]:
    here, rank = part(), dist.get_rank()
    seven = SEVEN.narrow(-1, *here.span(7))
    return {
        "reduce_from": through(lambda x: reduce_from(x, here), ROW * (rank + 1), WEIGHTS),
        "copy_to": through(lambda x: copy_to(x, here), ROW, WEIGHTS * (rank + 1)),
        "gather_from": through(lambda x: gather_from(x, -1, 7, here), seven, SEVEN * 10),
        "gather_from_sequence": through(
            lambda x: gather_from_sequence(x, 1, here), ROW[:, [rank]], WEIGHTS * (rank + 1)
        ),
        "reduce_scatter_to_sequence": through(
            lambda x: reduce_scatter_to_sequence(x, 1, here), ROW * (rank + 1), WEIGHTS[:, [rank]]
        ),
    }


def layouts() -> tuple[bool, torch.dtype, list[float]]:
    here = part()
    images = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    whole = gather_from(images, 1, 9, here)
    halves = reduce_from(torch.full((2,), 0.5, dtype=torch.bfloat16), here)
    return whole.is_contiguous(memory_format=torch.channels_last), halves.dtype, halves.tolist()


def losses() -> list[tuple[Tensor, Tensor]]:
    here = part()
    return [
        through(
            partial(parallel_cross_entropy, targets=TARGETS, classes=7, smoothing=smoothing, part=here),
            own,
            torch.ones(()),
        )
        for own in (LOGITS.narrow(-1, *here.span(7)), LOGITS.narrow(-1, *here.span(7)).bfloat16())
        for smoothing in (0.0, 0.1)
    ]


def unscored() -> float:
    here = part()
    own = LOGITS.narrow(-1, *here.span(7))
    return parallel_cross_entropy(own, torch.full_like(TARGETS, -100), 7, 0.0, here).item()


def random_numbers() -> tuple[list[float], list[float], list[float]]:
    """Numbers of a rank's own stream, then of the shared stream, then of its own again from the state before."""
    torch.manual_seed(5)
    state, cpu = torch.get_rng_state(), torch.device("cpu")
    with rank_random(part(), cpu):
        first = torch.rand(3).tolist()
    after = torch.rand(3).tolist()
    torch.set_rng_state(state)
    with rank_random(part(), cpu):
        again = torch.rand(3).tolist()
    return first, after, again


def batches() -> tuple[Tensor, Tensor]:
    batch = None
    if dist.get_rank() == 0:
        images = torch.arange(2 * 3 * 32 * 32.0).view(2, 3, 32, 32)
        batch = Batch(images, torch.tensor([3, 1]), torch.ones(2, dtype=torch.bool))
    shared = share(batch, job(), 2, part())
    return shared.inputs, shared.targets


WORK: dict[str, Callable[[], Any]] = {
    "collectives": collectives, "layouts": layouts, "losses": losses, "unscored": unscored,
    "random_numbers": random_numbers, "batches": batches,
}  # fmt: skip


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(3, ranks.results, WORK)


def test_slices_differ_by_one_at_most() -> None:
    here = Part(None, 1, 3)
    assert [here.span(7, rank) for rank in range(3)] == [(0, 3), (3, 2), (5, 2)]
    assert here.span(6) == (2, 2)


def test_each_collective_has_its_output_and_gradient(results: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(results):
        first, count = Part(None, rank, 3).span(7)
        expected = {
            "reduce_from": (ROW * 6, WEIGHTS),
            "copy_to": (ROW, WEIGHTS * 6),
            "gather_from": (SEVEN, SEVEN[:, first : first + count] * 10),
            "gather_from_sequence": (ROW, WEIGHTS[:, [rank]] * 6),
            "reduce_scatter_to_sequence": (ROW[:, [rank]] * 6, WEIGHTS),
        }
        for name, (output, gradient) in expected.items():
            assert torch.equal(each["collectives"][name][0], output), name
            assert torch.equal(each["collectives"][name][1], gradient), name


def test_layout_and_type_are_kept(results: list[dict[str, Any]]) -> None:
    assert results[0]["layouts"] == (True, torch.bfloat16, [1.5, 1.5])


def test_the_loss_is_that_of_whole_logits(results: list[dict[str, Any]]) -> None:
    for index, (dtype, smoothing) in enumerate((d, s) for d in (torch.float32, torch.bfloat16) for s in (0.0, 0.1)):
        whole = LOGITS.to(dtype, copy=True).requires_grad_()
        loss = F.cross_entropy(whole.float().flatten(0, -2), TARGETS.flatten(), label_smoothing=smoothing)
        loss.backward()
        gradient = torch.cat([each["losses"][index][1] for each in results], -1)
        torch.testing.assert_close(gradient, whole.grad)
        for each in results:
            torch.testing.assert_close(each["losses"][index][0], loss.detach())


def test_a_loss_of_nothing_is_not_a_number(results: list[dict[str, Any]]) -> None:
    assert results[0]["unscored"] != results[0]["unscored"]


def test_ranks_draw_own_and_shared_random_numbers(results: list[dict[str, Any]]) -> None:
    first, after, again = zip(*(each["random_numbers"] for each in results), strict=True)
    assert len(set(map(tuple, first))) == 3
    assert after[0] == after[1] == after[2]
    assert list(first) == list(again)


def test_every_rank_has_the_batch_that_rank_0_of_its_group_read(results: list[dict[str, Any]]) -> None:
    for each in results:
        inputs, targets = each["batches"]
        assert inputs.shape == (2, 3, 32, 32)
        assert inputs.flatten()[-1] == 2 * 3 * 32 * 32 - 1
        assert targets.tolist() == [3, 1]
