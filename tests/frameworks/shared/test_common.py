"""What frameworks share: micro batches, the weight update, checkpointing, BatchNorm's statistics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddlbench.frameworks.shared.batchnorm import average_statistics
from ddlbench.frameworks.shared.common import Update, accumulate, checkpoint_blocks, evaluate, micro_batches, on_meta
from ddlbench.job import Batch, Job
from ddlbench.models.resnet import ResNet
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
MODEL = ResNet(name="resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=32, num_classes=5)


def job(precision: str = "fp32", clip_norm: float | None = None) -> Job:
    return Job(
        model=MODEL,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        device=CPU,
        rank=0,
        local_rank=0,
        world_size=1,
        seed=0,
        global_batch=4,
        micro_batch=2,
        precision=precision,
        clip_norm=clip_norm,
    )


def batch(samples: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(samples, 3, generator=generator), torch.randn(samples, 2, generator=generator)
    return Batch(inputs, targets, torch.ones(samples, dtype=torch.bool))


def test_a_model_without_weights_is_built_once() -> None:
    first = on_meta(job())
    assert all(parameter.is_meta for parameter in first.parameters())
    assert on_meta(replace(job(), model=replace(MODEL))) is first
    assert on_meta(replace(job(), model=replace(MODEL, num_classes=6))) is not first


def test_micro_batches_are_contiguous_slices() -> None:
    whole = batch(6)
    parts = list(micro_batches(whole, 3))
    assert [len(part.inputs) for part in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_accumulated_gradients_and_loss_are_the_whole_batchs() -> None:
    whole, model = batch(), nn.Linear(3, 2)
    nn.functional.mse_loss(model(whole.inputs), whole.targets).backward()
    expected = model.weight.grad
    model.zero_grad()
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1), job())
    loss = accumulate(model, whole, job(), 2, update)
    torch.testing.assert_close(model.weight.grad, expected)
    torch.testing.assert_close(loss, nn.functional.mse_loss(model(whole.inputs), whole.targets).detach())
    assert not loss.requires_grad


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


def test_clipping_bounds_the_whole_gradient() -> None:
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    update = Update(torch.optim.SGD(model.parameters(), lr=1.0), job(clip_norm=0.5))
    (1000 * model(batch().inputs).sum()).backward()
    update.apply(model.parameters())
    assert (model.weight.detach() - before).norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_fp16_is_no_update(fused: bool) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), job("fp16"))
    update.scale(model(batch().inputs).sum() * float("inf")).backward()
    update.apply(model.parameters())
    assert update.count == 0
    assert torch.equal(model.weight.detach(), before)
    update.scale(model(batch().inputs).sum()).backward()
    update.apply(model.parameters())
    assert update.count == 1
    # The gradient of the sum by the weight is the sum of the inputs, whatever the loss was scaled by.
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * batch().inputs.sum(0).expand(2, 3))


def test_checkpointing_changes_nothing_but_memory() -> None:
    images = torch.randn(4, 3, 32, 32)
    plain, checkpointed = job().build(), job().build()
    checkpoint_blocks(checkpointed)
    for model in (plain, checkpointed):
        model(images).square().mean().backward()
    for (name, one), (other, two) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(one.grad, two.grad)  # pyright: ignore
    # BatchNorm ran twice and must have counted once.
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(checkpointed.named_buffers())[name]), name


def test_evaluation_leaves_the_model_training() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    output = evaluate(model, model, batch(), job(), 2)
    assert model.training
    assert output.shape == (4, 2)
    assert torch.equal(output, model[0](batch().inputs).detach())


def averaged() -> tuple[float, float]:
    norm = nn.BatchNorm1d(1)
    norm.running_mean.fill_(dist.get_rank() + 1.0)  # pyright: ignore
    norm.running_var.fill_(10.0 * dist.get_rank())  # pyright: ignore
    average_statistics(nn.Sequential(norm))
    return norm.running_mean.item(), norm.running_var.item()  # pyright: ignore


def test_statistics_are_averaged_over_ranks() -> None:
    assert run_ranks(2, averaged) == [(1.5, 5.0), (1.5, 5.0)]
