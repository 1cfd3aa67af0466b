"""DeepSpeed's CPU Adam trains as torch's AdamW, and so do states on a disk."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ddlbench.errors import Unavailable, Unsupported
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.deepspeed.knobs import check_op, import_deepspeed
from tests.frameworks.deepspeed.zero import train_each
from tests.support.jobs import CPU, two_ranks
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def compiled() -> None:
    """DeepSpeed compiles the operation at its first use, which takes a minute, and ranks must not wait for it."""
    try:
        check_op("CPUAdamBuilder", "framework.cpu_adam=true", "install g++ and ninja")
    except Unavailable as error:
        pytest.skip(str(error))
    load = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    subprocess.run([sys.executable, "-c", load], check=True, timeout=1200, capture_output=True)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_trains_as_torch_does(stage: int) -> None:
    """Four updates, two parameter groups, falling learning rates. The vectorized update rounds otherwise: after four
    updates of about 0.01 the weights differ by less than 1e-5 of that."""
    both = [DeepSpeed(zero_stage=stage, offload_optimizer=True, cpu_adam=chosen) for chosen in (False, True)]
    torch_s, own = run_ranks(2, train_each, both, ["fp32", "fp32"])[0]
    assert (torch_s - own).abs().max() < 1e-5
    assert (torch_s - own).abs().max() > 0  # it was another optimizer


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"framework\.cpu_adam=true with SGD: it computes AdamW alone"):
        DeepSpeed(zero_stage=1, offload_optimizer=True, cpu_adam=True).check(two_ranks())


def test_an_operation_that_does_not_work_here_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    import_deepspeed(CPU)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda _: False)
    with pytest.raises(Unavailable, match=r"framework\.offload_to=nvme: DeepSpeed's async_io does not work .* libaio"):
        DeepSpeed(zero_stage=3, offload_optimizer=True, offload_to="nvme", nvme_path="/").check(two_ranks())
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda _: True)
    check_op("AsyncIOBuilder", "framework.offload_to=nvme", "install libaio")
