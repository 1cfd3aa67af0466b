"""Validation metrics computed by hand, and independent of how the samples are split."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddlbench.data.loaders.replica_feed import validation_batches
from ddlbench.job import Batch
from ddlbench.measure.formulas.metrics import batch_sums, empty_sums, finish, without_scores

# softmax of (ln 1, ln 2, ln 5) is (1, 2, 5) / 8
ROW = [0.0, math.log(2), math.log(5)]


def batch(targets, valid):
    return Batch(torch.zeros(len(valid)), torch.tensor(targets), torch.tensor(valid))


def test_images_by_hand():
    # Six classes: class 0 is the worst score of the second row, so it is not among the five best.
    scores = torch.log(torch.tensor([[6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]))
    output = torch.cat([scores, scores, torch.full((1, 6), math.nan)])
    sums = batch_sums(output, batch([0, 0, 3, 5, 0], [True, True, True, True, False]))
    nats = math.log(21 / 6) + math.log(21 / 1) + math.log(21 / 3) + math.log(21 / 6)
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx([nats, 4, 2, 3, 4])
    assert finish(sums, "images", None) == {
        "val_loss": pytest.approx(nats / 4), "val_samples": 4, "val_top1": 0.5, "val_top5": 0.75,
    }  # fmt: skip


def test_top5_of_fewer_than_five_classes_is_always_right():
    sums = batch_sums(torch.tensor([ROW, ROW]), batch([0, 2], [True, True]))
    assert finish(sums, "images", None)["val_top1"] == 0.5
    assert finish(sums, "images", None)["val_top5"] == 1.0


def test_equal_scores_are_no_hits_for_every_class():
    sums = batch_sums(torch.zeros(10, 10), batch(list(range(10)), [True] * 10))
    assert sums[2:4].tolist() == [1, 5]  # equal scores are right by chance


def test_text_by_hand():
    output = torch.tensor([[ROW, ROW], [ROW, ROW], [ROW, ROW]])
    sums = batch_sums(output, batch([[0, -100], [1, 2], [2, 2]], [True, True, False]))
    nats = math.log(8) + math.log(8 / 2) + math.log(8 / 5)
    assert sums.tolist() == pytest.approx([nats, 3, 0, 0, 2])
    assert finish(sums, "text", words=2) == {
        "val_loss": pytest.approx(nats / 3),
        "val_samples": 2,
        "val_perplexity_token": pytest.approx((8 * 4 * 8 / 5) ** (1 / 3)),
        "val_perplexity_word": pytest.approx((8 * 4 * 8 / 5) ** (1 / 2)),
    }


def test_unknown_is_none():
    assert finish(empty_sums(torch.device("cpu")), "images", None) == {
        "val_loss": None, "val_samples": 0, "val_top1": None, "val_top5": None,
    }  # fmt: skip
    sums = torch.tensor([1e4, 10, 0, 0, 1], dtype=torch.float64)
    metrics = finish(sums, "text", None)
    assert metrics["val_loss"] == 1000.0
    assert metrics["val_perplexity_token"] is None  # e^1000 is beyond a float
    assert metrics["val_perplexity_word"] is None


@pytest.mark.parametrize("kind", ["images", "text"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_sums_over_replicas_are_the_whole_sets(kind, replicas):
    samples, size, classes = 11, 2, 7
    generator = torch.Generator().manual_seed(0)
    length = () if kind == "images" else (4,)
    outputs = torch.randn(samples, *length, classes, generator=generator)
    targets = torch.randint(classes, (samples, *length), generator=generator)
    total = empty_sums(torch.device("cpu"))
    for rank in range(replicas):
        for indices in validation_batches(samples, size, rank, replicas):
            padded = torch.full((size, *length, classes), math.nan)
            labels = torch.zeros((size, *length), dtype=torch.long)
            padded[: len(indices)], labels[: len(indices)] = outputs[indices], targets[indices]
            total += batch_sums(padded, Batch(padded, labels, torch.arange(size) < len(indices)))
    whole = batch_sums(outputs, Batch(outputs, targets, torch.ones(samples, dtype=torch.bool)))
    assert whole[4] == samples
    assert total.tolist() == pytest.approx(whole.tolist(), rel=1e-12)


def test_half_precision_scores_are_counted_in_float32():
    torch.manual_seed(0)
    output, target = torch.randn(3, 4, 50).bfloat16(), torch.randint(50, (3, 4))
    samples = Batch(target, target, torch.ones(3, dtype=torch.bool))
    assert torch.equal(batch_sums(output, samples), batch_sums(output.float(), samples))


@pytest.mark.parametrize("length", [(), (4,)])
def test_nothing_waits_for_the_device(length):
    output = torch.empty(3, *length, 7, device="meta")  # reading a value of a meta tensor raises
    targets = torch.empty(3, *length, device="meta", dtype=torch.long)
    valid = targets.flatten(1)[:, 0] > 0 if length else targets > 0
    assert batch_sums(output, Batch(output, targets, valid)).shape == (5,)


def test_text_never_holds_all_scores_in_float32():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                self.elements = max(self.elements, result.numel())
            return result

    output, targets = torch.zeros(6, 4, 50, dtype=torch.bfloat16), torch.zeros(6, 4, dtype=torch.long)
    with Largest() as largest:
        batch_sums(output, Batch(targets, targets, torch.ones(6, dtype=torch.bool)))
    assert largest.elements == 4 * 50


def test_random_samples_have_no_scores_but_may_diverge() -> None:
    images = {"val_samples": 5, "val_loss": 1.5, "val_top1": 1.0, "val_top5": 1.0}
    assert without_scores(images) == {"val_samples": 5}
    assert without_scores({"val_samples": 5, "val_loss": math.inf}) == {"val_samples": 5, "val_loss": math.inf}
    assert without_scores({"val_samples": 0, "val_loss": None}) == {"val_samples": 0}
