"""Micro batches, the update of the weights, evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddlbench.frameworks.shared.replica import Update, accumulate, evaluate, micro_batches
from ddlbench.job import Batch
from tests.support.jobs import batch, job


def test_micro_batches_are_contiguous_slices() -> None:
    whole = batch(6)
    parts = list(micro_batches(whole, 3))
    assert [len(part.inputs) for part in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_only_the_last_micro_batch_communicates() -> None:
    entered: list[str] = []

    class NoSync:
        def __enter__(self) -> None:
            entered.append("silent")

        def __exit__(self, *_: object) -> None: ...

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        entered.append("forward")
        return model(inputs)

    model = nn.Linear(3, 2)
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1), job())
    accumulate(forward, batch(), job(), 4, update, NoSync)
    assert entered == ["silent", "forward"] * 3 + ["forward"]


def test_an_update_is_counted_and_clears_the_gradients() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1), job())
    accumulate(model, batch(), job(), 1, update)
    gradient = model.weight.grad
    assert gradient is not None
    update.apply(model.parameters())
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * gradient)
    assert update.count == 1
    assert model.weight.grad is None


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_fp16_is_no_update(fused: bool) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), job("fp16"))
    update.scaler.scale(model(batch().inputs).sum() * float("inf")).backward()
    update.apply(model.parameters())
    assert update.count == 0
    assert torch.equal(model.weight.detach(), before)
    update.scaler.scale(model(batch().inputs).sum()).backward()
    update.apply(model.parameters())
    assert update.count == 1
    # The gradient of the sum by the weight is the sum of the inputs, whatever the loss was scaled by.
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * batch().inputs.sum(0).expand(2, 3))


def test_evaluation_leaves_the_model_training() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    parts = list[tuple[Tensor, Batch]]()
    evaluate(model, model, batch(), job(), 2, lambda *part: parts.append(part))
    assert model.training
    assert [output.shape for output, _ in parts] == [(2, 2)] * 2
    assert torch.equal(torch.cat([output for output, _ in parts]), model[0](batch().inputs).detach())
    assert torch.equal(torch.cat([micro.targets for _, micro in parts]), batch().targets)
