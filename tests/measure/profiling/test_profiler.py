"""torch's events as plain ones: those of a real profiler on the CPU, and of a fake one with a device."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch
from torch import nn

from ddlbench.measure.profiling.profile import Event, Profiler, divide, plain_events
from ddlbench.measure.profiling.spans import BACKWARD, FORWARD, UPDATE, WINDOW, profiling, span
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer


class DeviceType(Enum):
    CPU = 0
    CUDA = 1


@dataclass
class Kineto:
    """As much of torch's _KinetoEvent as is read."""

    called: str
    begin: int
    lasted: int
    number: int = 0
    linked: int = 0
    device: DeviceType = DeviceType.CPU
    annotation: bool = False

    def name(self) -> str:
        return self.called

    def start_ns(self) -> int:
        return self.begin

    def duration_ns(self) -> int:
        return self.lasted

    def correlation_id(self) -> int:
        return self.number

    def linked_correlation_id(self) -> int:
        return self.linked

    def device_type(self) -> DeviceType:
        return self.device

    def is_user_annotation(self) -> bool:
        return self.annotation


def test_a_kernel_has_the_launch_time_of_its_operator() -> None:
    """torch gives each operator a number; kernels name it. The driver's own numbers mean something else."""
    result = plain_events(
        [
            Kineto(FORWARD, 0, 50, number=1, annotation=True),
            Kineto("aten::mm", 10, 5, number=2),
            Kineto("cudaLaunchKernel", 12, 1, number=2000, linked=2),
            Kineto("sm90_gemm", 40, 20, number=2000, linked=2, device=DeviceType.CUDA),
            Kineto("ncclDevKernel", 60, 20, number=2001, device=DeviceType.CUDA),  # of a thread that torch does not see
            Kineto(FORWARD, 40, 20, number=1, device=DeviceType.CUDA, annotation=True),  # drawn on the device again
        ]
    )
    assert result == [
        Event(FORWARD, 0, 50),
        Event("aten::mm", 10, 15),
        Event("cudaLaunchKernel", 12, 13),
        Event("sm90_gemm", 40, 60, device=True, launched=10),
        Event("ncclDevKernel", 60, 80, device=True),
    ]


@pytest.mark.parametrize("call", ["cudaEventRecord", "cuStreamWaitEvent", "hipEventRecord"])
def test_a_call_of_the_driver_outside_of_operators_is_not_the_operator_of_its_number(call: str) -> None:
    """The driver counts its calls, torch its operators."""
    operator = Kineto("aten::mm", 10, 5, number=2)
    kernel = Kineto("sm90_gemm", 40, 20, number=2000, linked=2, device=DeviceType.CUDA)
    assert plain_events([operator, Kineto(call, 30, 1, number=2), kernel])[2].launched == 10


def test_a_kernel_without_an_operator_has_no_launch_time_whatever_the_profiler_itself_does() -> None:
    """The overhead that the profiler reports of itself has no number either."""
    kernel = Kineto("ncclDevKernel", 60, 20, number=2001, device=DeviceType.CUDA)
    assert plain_events([Kineto("Lazy Function Loading", 20, 5), kernel])[1].launched is None


def test_a_real_window_on_the_cpu(tmp_path: Path) -> None:
    assert not profiling()
    wait = torch.distributed.Work.wait
    with Profiler(torch.device("cpu")) as profiler:
        assert profiling()
        with span(WINDOW), span(FORWARD):
            torch.ones(64, 64) @ torch.ones(64, 64)
    assert not profiling()
    assert torch.distributed.Work.wait is wait
    events = {event.name: event for event in profiler.events()}
    window, product = events[WINDOW], events["aten::mm"]
    assert window.begin <= events[FORWARD].begin <= product.begin < product.end <= window.end
    profiler.save(tmp_path / "trace.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert {FORWARD, "aten::mm"} <= {event.get("name") for event in trace["traceEvents"]}


def test_an_update_of_8_bit_states_is_computing() -> None:
    """Kernels of bitsandbytes, below which torch has no operators."""
    weight = nn.Parameter(torch.ones(2**20))
    weight.grad = torch.ones(2**20)
    optimizer = make_optimizer(OptimizerConfig("adamw8bit", lr=0.1), [("weight", weight)])
    optimizer.step()  # makes the states
    with Profiler(torch.device("cpu")) as profiler, span(WINDOW), span(UPDATE):
        optimizer.step()
    events = profiler.events()
    (kernel,) = (event for event in events if event.name == "bitsandbytes::optimizer_update_8bit_blockwise")
    assert divide(events, on_device=False).update_s >= (kernel.end - kernel.begin) / 1e9


def test_a_span_without_a_profiler_is_nothing() -> None:
    assert span(FORWARD) is span(WINDOW)


@pytest.mark.gpu
def test_a_real_window_on_a_gpu() -> None:
    """Kernels of the backward pass, which torch launches in a thread of its own, count as backward."""
    device = torch.device("cuda")
    weight = torch.ones(2048, 2048, device=device, requires_grad=True)
    with Profiler(device) as profiler, span(WINDOW):
        with span(FORWARD):
            loss = (weight @ weight).sum()
        with span(BACKWARD):
            loss.backward()
        torch.cuda.synchronize()
    results = divide(profiler.events(), on_device=True)
    assert results.backward_s > results.forward_s > 0
    assert results.other_s < results.forward_s
