"""Streams and events of a GPU that is not there. And whole steps on fake "cuda": Python finds "cuda" everywhere, and
C++ asks no driver."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from ddlbench.config.compose import configuration, make_job
from ddlbench.errors import RunError
from ddlbench.job import Place
from ddlbench.ranks.fake import cuda as fake_cuda
from ddlbench.ranks.fake.fake import fake_world
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.observed import Observed
from ddlbench.rehearsal.rehearse import fed
from tests.support.rehearsals import words

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_batch_is_copied_on_the_side_and_the_compute_stream_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ahead: the second copy is queued before the first batch is given."""
    calls = list[str]()
    for call in ("record", "wait"):

        def note(event: object, stream: object = None, call: str = call) -> None:
            on_compute = (stream or torch.cuda.current_stream()) is fake_cuda.COMPUTE
            calls.append(f"{'compute' if on_compute else 'side'}: {call}")

        monkeypatch.setattr(fake_cuda.Event, call, note)
    made = configuration(*words("single", "gpt2_small"))
    job = make_job(made, Launch("alone"), CUDA)
    with fake_world(0, 1, CUDA), Observed(CUDA).observing():
        batches = list(islice(fed(job, Place(0, 1), pinned=True), 2))
        assert all(batch is not None and batch.inputs.device == CUDA for batch in batches)
    assert calls == ["side: record", "compute: wait", "side: record", "compute: wait", "side: record"]


def test_the_current_stream_is_the_one_that_was_entered() -> None:
    with fake_world(0, 1, CUDA):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() is side
        assert torch.cuda.current_stream() is fake_cuda.COMPUTE


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(0, 8, CUDA):
        yield


def on_device(*tensors: Any) -> bool:
    return all(tensor.device == CUDA and tensor.is_cuda and not tensor.is_meta for tensor in tensors)


def test_a_backward_pass_also_after_one_on_the_cpu() -> None:
    """The first backward pass of a process looks for devices, and what it finds stays."""
    (2 * torch.ones(1, requires_grad=True)).backward()
    with fake_world(0, 8, CUDA):
        layer = nn.Linear(4, 3).to(CUDA)
        layer(torch.randn(2, 4, device=CUDA)).sum().backward()
        assert on_device(layer.weight, layer.weight.grad, layer.bias.grad)
        assert layer.weight.get_device() == 0


@pytest.mark.usefixtures("world")
def test_gradients_of_autocast_are_of_the_type_and_device_of_the_weights() -> None:
    """The way back through a cast names, in C++, the device of what was cast."""
    layer = nn.Linear(4, 3).to(CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(torch.randn(2, 4, device=CUDA))
    out.float().sum().backward()
    assert layer.weight.grad is not None
    assert (out.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert on_device(out, layer.weight.grad)


class Both(torch.autograd.Function):
    """Two outputs; the gradient of one that nobody uses is made in C++."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        return 2 * one, 2 * other

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        assert on_device(one, other)
        return one, other


@pytest.mark.usefixtures("world")
def test_what_autograd_makes_itself_is_on_the_device() -> None:
    one, other = (torch.randn(3, device=CUDA, requires_grad=True) for _ in range(2))
    first: Any = Both.apply(one, other)
    first[0].sum().backward()
    assert on_device(one.grad, other.grad)


@pytest.mark.usefixtures("world")
def test_a_copy_to_the_own_device_is_none() -> None:
    tensor = torch.ones(3, device=CUDA)
    assert all(same is tensor for same in (tensor.to(CUDA), tensor.to("cuda"), tensor.cuda(), tensor.to(device=CUDA)))
    assert tensor.to(CUDA, torch.float16).dtype == torch.float16
    assert on_device(tensor.to(CUDA, torch.float16), torch.ones(2).to(tensor), torch.ones(2).cuda())
    assert on_device(tensor.new_zeros(2), torch.zeros_like(tensor))
    assert tensor.cpu().device == tensor.to("cpu").device == CPU


@pytest.mark.usefixtures("world")
def test_what_python_puts_on_meta_stays_there() -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 3)
    named = torch.empty(2, device="meta")
    assert all(each.device.type == "meta" for each in (layer.weight, named, named + 1))
    assert on_device(layer.to_empty(device=CUDA).weight)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_clipping_and_optimizer(fused: bool) -> None:
    layer = nn.Linear(4, 3).to(CUDA)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", torch.float16):
        loss = layer(torch.randn(2, 4, device=CUDA)).float().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    moments = [optimizer.state[weight][name] for weight in layer.parameters() for name in ("exp_avg", "exp_avg_sq")]
    assert on_device(loss, norm, *moments)


@pytest.mark.usefixtures("world")
def test_a_block_that_is_computed_again_is_computed_within_the_world() -> None:
    """In the backward pass of a loss: hooks and recomputed blocks name devices, too."""
    seen = list[Tensor]()

    def block(tensor: Tensor) -> Tensor:
        seen.append(tensor.to(CUDA))
        seen.append(torch.empty(1, device="meta"))
        return layer(tensor)

    layer = nn.Linear(4, 4).to(CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        out: Any = checkpoint(block, torch.randn(2, 4, device=CUDA, requires_grad=True), use_reentrant=False)
    out.sum().backward()
    assert [each.device.type for each in seen] == ["cuda", "meta"] * 2


def test_torch_is_as_it_was_afterwards() -> None:
    before = Tensor._make_subclass, torch._C._group_tensors_by_device_and_dtype, torch.clear_autocast_cache  # pyright: ignore
    with fake_world(0, 8, CUDA):
        assert Tensor._make_subclass is not before[0]  # pyright: ignore
    after = Tensor._make_subclass, torch._C._group_tensors_by_device_and_dtype, torch.clear_autocast_cache  # pyright: ignore
    assert before == after
    assert "is_cuda" not in vars(FakeTensor)
    registered = torch._C._dispatch_dump("aten::dropout")  # pyright: ignore
    assert "fake_kernels" not in registered


def test_another_way_of_making_fake_tensors_is_one_line() -> None:
    with pytest.raises(RunError, match=r"no rehearsal of device cuda with torch .*: it makes fake tensors without"):
        fake_cuda._make_subclass(FakeTensor, torch.empty(1, device="meta"), False)  # pyright: ignore
