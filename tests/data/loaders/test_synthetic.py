"""Batches without input cost: shapes, masks and counts as a real loader has them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from ddlbench.data.loaders.native import Native
from ddlbench.data.loaders.synthetic import Synthetic
from tests.support.dali_feeds import request
from tests.support.pictures import Shape
from tests.support.tiny import TinyData

DATA = TinyData(train_samples=26, val_samples=7)


@dataclass
class TextShape(Shape):
    kind: str = "text"

    def input_shape(self):
        return (5,)


IMAGES = Shape()


def opened(*args, model=IMAGES, **fields):
    return Synthetic("synthetic").open(DATA, replace(request(*args, **fields), model=model))


@pytest.mark.parametrize("model", [IMAGES, TextShape()])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_same_shapes_and_counts_as_the_native_loader(model, rank, size):
    wanted = replace(request(rank, size, replica_batch=3, steps=2), model=model)
    native, synthetic = (loader.open(DATA, wanted) for loader in (Native("native", workers=0), Synthetic("synthetic")))
    for name in ("steps_per_epoch", "dropped_samples", "val_samples"):
        assert getattr(native, name) == getattr(synthetic, name)
    for real, made in ((native.train(0), synthetic.train(0)), (native.validation(), synthetic.validation())):
        for expected, got in zip(list(real), list(made), strict=True):
            for part in ("inputs", "targets", "valid"):
                assert getattr(got, part).shape == getattr(expected, part).shape
                assert getattr(got, part).dtype == getattr(expected, part).dtype
            assert got.valid.tolist() == expected.valid.tolist()


def test_one_batch_again_and_again():
    feed = opened()
    batches = [*feed.train(0), *feed.train(1)]
    assert len(batches) == 12
    assert len({id(batch) for batch in batches}) == 1
    assert {0 <= target < 10 for target in batches[0].targets.tolist()} == {True}
    assert batches[0].inputs.std() == pytest.approx(1, abs=0.1)


def test_tokens_are_followed_by_their_targets():
    batch = next(opened(model=TextShape(), channels_last=True).train(0))  # which is for images alone
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.inputs.is_contiguous()


def test_replicas_differ_and_runs_do_not():
    first, second = (next(opened(rank, 2).train(0)).inputs for rank in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, next(opened(0, 2).train(0)).inputs)
