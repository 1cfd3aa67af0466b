"""Horovod (Sergeev & Del Balso 2018): a replica a rank; a background thread all-reduces gradients during backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlbench.checkpoint import OFF
from ddlbench.errors import Unavailable, Unsupported, check_values, importing, refuse
from ddlbench.frameworks.horovod.core import start, started_by_mpi, trace_horovod
from ddlbench.frameworks.shared.groups import all_ranks, batch_norms
from ddlbench.frameworks.shared.refusals import check_alike
from ddlbench.frameworks.shared.replica import Replica, Update, build
from ddlbench.job import Job
from ddlbench.measure.profiling.spans import COMMUNICATE, span
from ddlbench.ranks.control import all_gather
from ddlbench.ranks.launch import is_fake

if TYPE_CHECKING:
    from ddlbench.ranks.fake.cuda import Answer

COMPRESSIONS = ("none", "fp16")
ALL_REDUCE = "horovod_torch_allreduce_async_"


def horovod_torch() -> Any:
    """horovod.torch. Its own import succeeds without the compiled part, so that part is imported first."""
    # It may be missing, built without torch, or for another torch.
    with importing(
        "horovod", f"build it for torch {torch.__version__} with scripts/install_horovod.sh gloo (mpi, nccl)"
    ):
        import_module("horovod.torch.mpi_ops")
        return import_module("horovod.torch")


@dataclass
class Horovod:
    """The knobs of Horovod; conf/framework/horovod.yaml says what each means."""

    library: ClassVar[str] = "horovod"

    name: str = "horovod"
    compression: str = "none"
    fusion_threshold_mb: float = 128.0
    cycle_time_ms: float = 1.0
    adasum: bool = False

    def __post_init__(self) -> None:
        check_values(
            "framework.", self,
            least={"fusion_threshold_mb": 0}, above={"cycle_time_ms": 0}, choices={"compression": COMPRESSIONS},
        )  # fmt: skip

    def check(self, job: Job) -> None:
        self.supports(job)
        hvd = horovod_torch()
        if self.adasum and job.device.type == "cuda" and not (hvd.nccl_built() and hvd.mpi_built()):
            raise Unsupported(
                "horovod: adasum on GPUs needs a Horovod with both NCCL and MPI: build it with "
                "scripts/install_horovod.sh nccl-mpi, or set framework.adasum=false"
            )
        if job.device.type == "cuda" and not hvd.nccl_built():
            raise Unavailable("this Horovod is built for the CPU: scripts/install_horovod.sh nccl")
        if self.adasum and not hvd.mpi_built():
            raise Unavailable("this Horovod is built without MPI, which adasum needs: scripts/install_horovod.sh mpi")
        if self.adasum and not started_by_mpi():
            raise Unsupported("horovod: adasum works over MPI only: start with mpirun or srun --mpi=pmix")

    def supports(self, job: Job) -> None:
        """The refusals of `check` that do not depend on how the library is built and started."""
        self.compression_of(job)
        check_alike(job, job.world_size, built=True)
        reasons = {
            "only contiguous gradients are accepted: set train.channels_last=false": job.channels_last,
            f"adasum works on 2, 4, 8, ... ranks, this launch has {job.world_size}":
                self.adasum and job.world_size & (job.world_size - 1),
            # Adasum adds up updates, not gradients: each is computed as its gradient arrives, during backward.
            "adasum updates weights before all gradients are computed, so it supports neither fp16 nor clipping "
            f"(train.precision={job.precision}, train.clip_norm={job.clip_norm}): set framework.adasum=false":
                self.adasum and (job.precision == "fp16" or job.clip_norm is not None),
        }  # fmt: skip
        refuse("horovod", reasons)

    def compression_of(self, job: Job) -> str:
        """`train.reduce_dtype` means the same for every framework; here the compression does it."""
        if job.reduce_dtype == "bf16":
            raise Unsupported("horovod 0.28.1 does not support bf16: set train.reduce_dtype=fp32 or fp16")
        return "fp16" if job.reduce_dtype == "fp16" else self.compression

    def check_checkpoint(self, job: Job) -> None:
        reason = "Adasum's optimizer keeps weights of its own, which are not saved: set framework.adasum=false"
        refuse("horovod", {f"{reason}, or {OFF}": self.adasum})

    def setup(self, job: Job) -> Replica:
        """Horovod stays up until the process ends: see `start`."""
        hvd = horovod_torch()
        start(hvd, job, self._variables(job))
        trace_horovod()
        op = hvd.Adasum if self.adasum else hvd.Average
        hvd.allreduce(torch.ones(1, device=job.device), op=op)  # makes NCCL's communicator
        model = build(job)
        dp_group = all_ranks(job) if batch_norms(model) else None  # torch averages their statistics
        if not is_fake():  # the weights of a fake rank have no bits
            # Horovod's own broadcast is not needed, because every rank builds from the same seed. Bits are added up as
            # integers, which gives the same sum on every device.
            bits = [int(weight.detach().view(torch.int32).sum()) for weight in model.parameters()]
            assert len({tuple(sums) for sums in all_gather(bits)}) == 1, "the ranks start from different weights"
        inner, compression = job.optimizer(model.named_parameters()), self.compression_of(job)
        optimizer = hvd.DistributedOptimizer(
            inner,
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
            # Horovod counts the backward passes itself and adds them up: `accumulate` divides their losses.
            backward_passes_per_step=job.micro_batches(job.world_size),
            op=op,
        )
        # Horovod makes the optimizer again, with the groups of `inner` but the defaults of its class. Some read their
        # defaults in a step: timm's LAMB would clip the gradient to norm 1.
        optimizer.defaults = inner.defaults
        # Adasum's optimizer has stepped when backward ends, and refuses to be synchronized by hand.
        combined = self.adasum and job.world_size > 1
        update = Update(optimizer, job) if combined else AveragedUpdate(optimizer, job)
        facts = {
            "compression": compression,
            "fusion_threshold_mb": self.fusion_threshold_mb,
            "cycle_time_ms": self.cycle_time_ms,
            "adasum": self.adasum,
            "backward_passes_per_step": job.micro_batches(job.world_size),
            "controller": "mpi" if hvd.mpi_enabled() else "gloo",
            "reduce_dtype": "fp16" if compression == "fp16" else "fp32",
        }
        return Replica(job, model, update, facts, dp_group=dp_group)

    def fake_answers(self, rank: int, world_size: int, device: torch.device) -> Sequence[Answer]:
        """Horovod's compiled part answers from here (ranks/fake/fake.py); its Python part stays: the optimizer, the
        hooks on gradients, compression. One of Horovod's all-reduces becomes one of torch's fake process group, for
        each gradient: which of them Horovod's core would send in one message depends on time."""
        from ddlbench.ranks.fake.cuda import returning

        horovod_torch()
        operations: Any = import_module("horovod.torch.mpi_ops")
        everyone = import_module("horovod.common.process_sets").global_process_set
        # A Horovod that has started and was built for the device; the rest is the library's.
        given = {"is_initialized": 1, "rank": rank, "size": world_size, "nccl_built": int(device.type == "cuda")}
        given |= {"mpi_enabled": 0, "gloo_enabled": 1}
        library = operations._basics.MPI_LIB_CTYPES
        return [
            *((library, f"horovod_{name}", returning(value)) for name, value in given.items()),
            (operations, "mpi_lib", FakeOperations(operations.mpi_lib)),
            (everyone, "ranks", list(range(world_size))),
        ]

    def _variables(self, job: Job) -> dict[str, str]:
        """What Horovod reads from the environment when it starts. Stalls are looked for every `look` seconds."""
        stall = stall_seconds(job)
        look = max(1, stall // 4)
        return {
            "HOROVOD_FUSION_THRESHOLD": str(int(self.fusion_threshold_mb * 2**20)),
            "HOROVOD_CYCLE_TIME": str(self.cycle_time_ms),
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(look),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(stall),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(job.timeout_s))),
        }


class AveragedUpdate(Update):
    """The update after Horovod's all-reduces: gradients are averaged before they are unscaled or clipped."""

    def __init__(self, optimizer: Any, job: Job) -> None:
        super().__init__(optimizer, job)
        self.stall_s = stall_seconds(job)

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        optimizer: Any = self.optimizer
        started = time.monotonic()
        try:
            with span(COMMUNICATE):
                optimizer.synchronize()
        except RuntimeError as error:  # the same for a rank that ended and for one that is late: time tells
            waited = time.monotonic() - started
            if waited < self.stall_s:
                raise
            raise TimeoutError(f"horovod timed out: this rank waited {waited:.0f} s for another one") from error
        with optimizer.skip_synchronize():
            super().apply(parameters)


def stall_seconds(job: Job) -> int:
    """How long Horovod lets a gradient that it knows to be late wait for its last rank. It takes up to as long to
    notice, so half of `train.timeout_s`."""
    return max(1, int(job.timeout_s / 2))


class FakeOperations:
    """Horovod's all-reduces, for the types of tensors that the library has one for."""

    def __init__(self, library: Any) -> None:
        self.library, self.handles = library, count(1)
        # An all-reduce has ended when it begins.
        self.horovod_torch_wait_and_clear, self.horovod_torch_poll = lambda _: None, lambda _: 1

    def __getattr__(self, name: str) -> Callable[..., int]:
        # A library built for the CPU has no others. A fake tensor on "cuda" is on "meta" where C++ names its type.
        on_cpu = name.replace("torch_cuda_", "torch_").replace("torch_meta_", "torch_")
        if not name.startswith(ALL_REDUCE) or not hasattr(self.library, on_cpu):
            raise AttributeError(name)

        def all_reduce(tensor: Tensor, output: Tensor, *_: Any) -> int:
            dist.all_reduce(output.detach())
            return next(self.handles)

        return all_reduce
