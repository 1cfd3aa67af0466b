"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): replicas that share out optimizer state, gradients and parameters.

Stage 0 shares nothing out, stage 1 the optimizer state, stage 2 the gradients too, stage 3 the parameters too. The
library's engine owns backward and step; the optimizer is torch's, as in every framework.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddlbench.checkpoint import Live
from ddlbench.errors import UserError
from ddlbench.frameworks.deepspeed.knobs import DeepSpeedOptions, import_deepspeed
from ddlbench.frameworks.shared.environment import environment
from ddlbench.frameworks.shared.groups import all_ranks
from ddlbench.frameworks.shared.replica import RankTrainer, Update, build, evaluate, micro_batches
from ddlbench.job import Batch, Job, Score, type_of_dtype
from ddlbench.measure.profiling.spans import BACKWARD, FORWARD, UPDATE, span
from ddlbench.ranks.control import all_gather
from ddlbench.ranks.launch import is_fake
from ddlbench.ranks.launchers import OPEN_MPI

if TYPE_CHECKING:
    from ddlbench.ranks.fake.cuda import Answer

RECORDED = ("zero_stage", "offload_optimizer", "offload_parameters", "offload_to", "cpu_adam", "gather_bucket_mb")


@dataclass
class DeepSpeed(DeepSpeedOptions):
    """deepspeed.initialize over a configuration made of the job and the knobs."""

    def setup(self, job: Job) -> ZeroTrainer:
        deepspeed = import_deepspeed(job.device)
        if self.nvme_path is not None:  # all ranks raise: the others would wait for one that raised alone
            here = None if Path(self.nvme_path).is_dir() else socket.gethostname()
            if node := next(filter(None, [here] if is_fake() else all_gather(here)), None):
                path = f"framework.nvme_path={self.nvme_path}"
                raise UserError(f"{path} is no folder of {node}: make it on every node, or give another")
        model = build(job)
        if job.channels_last:  # DeepSpeed needs contiguous weights; the input decides how a convolution runs
            model.to(memory_format=torch.contiguous_format)
        with ExitStack() as until_close:
            until_close.enter_context(device_index(job.device, job.local_rank))
            group = all_ranks(job)
            # In this group the engine reduces: it would make a second one, with torch's default timeout, at its first
            # operation. An earlier engine of this process that ran under autocast does not decide the types of this
            # engine's buckets.
            deepspeed.utils.groups._WORLD_GROUP = group
            deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
            optimizer = job.optimizer(model.named_parameters())
            if self.cpu_adam:  # Ren et al. 2021, "ZeRO-Offload", section 5
                keys = ("params", "lr", "betas", "eps", "weight_decay")
                groups = [{key: group[key] for key in keys} for group in optimizer.param_groups]
                optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True)
            engine, *_ = deepspeed.initialize(
                args=SimpleNamespace(device_rank=job.device.index or 0),
                model=model,
                optimizer=optimizer,
                config=self.config(job),
                dist_init_required=False,
            )
            if self.zero_stage == 3 and not self.needs_norm(job):
                # It has no switch. With no clipping a norm only rejects updates that are not finite, which no other
                # framework does.
                engine.optimizer._get_norm_groups = lambda: [0.0]
            if self.zero_stage == 2 and job.device.type == "cuda" and engine.zero_overlap_comm():
                keep_until_reduced(engine.optimizer)
            if job.precision == "fp16" and self.casts(job):
                # A run whose loss is not finite ends with the status diverged, as with torch's scaler.
                engine.optimizer.loss_scaler.raise_error_at_min_scale = False
            if job.compile:
                engine.compile()
            return ZeroTrainer(job, self, engine, group, until_close.pop_all())

    def fake_answers(self, rank: int, world_size: int, device: torch.device) -> Sequence[Answer]:
        """A GPU without a driver, and ranks that agree (ranks/fake/fake.py).

        Only DeepSpeed's accelerator object, which it asks everything about devices, and the comparison of numbers with
        those of rank 0 are replaced. torch.cuda.is_available stays as it is, because other libraries choose kernels by
        it."""
        from ddlbench.ranks.fake.cuda import returning

        # Without a GPU its import for "cuda" looks for CUDA's compiler.
        import_deepspeed(device if torch.cuda.is_available() else torch.device("cpu"))
        utils = import_module("deepspeed.runtime.zero.utils")
        given: list[Answer] = [
            (utils, "get_lst_from_rank0", list),  # its own numbers
            (utils, "assert_lst_len_same_as_other_ranks", returning(None)),
            # Stage 3 replaces it by its own function and leaves it there: the next framework that is rehearsed must get
            # torch's.
            (functional, "linear", functional.linear),
        ]
        if device.type == "cuda":
            # DeepSpeed's own accelerator for CUDA, into whose memory everything fits. Stage 3 divides by the number of
            # devices of a node, and uses the result for quantized gradients only.
            gpu = import_module("deepspeed.accelerator.cuda_accelerator").CUDA_Accelerator()
            says = {"is_available": True, "available_memory": sys.maxsize, "device_count": 1}
            ignored = ("empty_cache", "range_push", "range_pop", "reset_peak_memory_stats")
            for name, value in {**says, **dict.fromkeys(ignored)}.items():
                setattr(gpu, name, returning(value))
            given.append((import_module("deepspeed.accelerator.real_accelerator"), "ds_accelerator", gpu))
        return given


def keep_until_reduced(zero: Any) -> None:
    """A gradient that is larger than a bucket is reduced in its place, on another stream, and DeepSpeed 0.19.8 drops it
    at once on ranks that have no share of it: let its memory wait for that stream before it is used again."""
    clear = zero.clear_grad_attribute

    def clear_later(parameter: nn.Parameter) -> None:
        gradient: Tensor | None = zero.get_gradient_for_reduction(parameter)
        if gradient is not None:
            gradient.record_stream(zero.reduction_stream)
        clear(parameter)

    zero.clear_grad_attribute = clear_later


class ZeroTrainer(RankTrainer):
    """One rank's live engine: a `Trainer` (ddlbench/job.py).

    update: counts the updates of stage 0, where a loss scaler of torch's decides, unseen by the engine
    gathers: the stream on which stage 3 gathers weights. DeepSpeed 0.19.8 lets it wait for the update only where small
        parameters persist (framework.persistence_threshold)
    until_close: the environment that the engine reads
    """

    def __init__(
        self, job: Job, knobs: DeepSpeedOptions, engine: Any, dp_group: dist.ProcessGroup, until_close: ExitStack
    ) -> None:
        self.knobs, self.engine, self.until_close = knobs, engine, until_close
        self.micro_batches = job.micro_batches(job.world_size)
        zero = engine.config["zero_optimization"]
        scheme = "deepspeed weights" if knobs.casts(job) else "autocast"
        facts = {
            **{knob: getattr(knobs, knob) for knob in RECORDED},
            "reduce_bucket_elements": zero.get("reduce_bucket_size"),
            "overlap_comm": bool(knobs.zero_stage and engine.zero_overlap_comm()),
            "gradient_norm": knobs.needs_norm(job),
            "persistence_threshold": knobs.persistence_threshold if knobs.zero_stage == 3 else None,
            "precision_scheme": "fp32" if job.precision == "fp32" else scheme,
            "reduce_dtype": job.reduce_dtype,
        }
        super().__init__(job, engine.module, Update(engine.basic_optimizer, job), facts, dp_group=dp_group)
        self.gathers: torch.cuda.Stream | None = None
        if knobs.zero_stage == 3 and job.device.type == "cuda":
            self.gathers = engine.optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream

    @property
    def updates(self) -> int:
        if self.knobs.zero_stage:
            return self.engine.global_steps - self.engine.skipped_steps
        return self.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        total = torch.zeros((), device=self.job.device)
        for micro in micro_batches(batch, self.micro_batches):
            with span(FORWARD):  # under the engine's own autocast
                loss = self.job.loss(self.engine(self._cast(micro.inputs)), micro.targets)
            with span(BACKWARD):
                self.engine.backward(loss)  # which divides by the number of micro batches
            with span(UPDATE):
                self.update.made = False
                self.engine.step()  # counts the micro batches, updates after the last
                self.update.count += self.update.made
                if self.gathers is not None:
                    self.gathers.wait_stream(torch.cuda.current_stream(self.job.device))
            total += loss.detach() / self.micro_batches
        self.synchronized = False
        return total

    def _cast(self, inputs: Tensor) -> Tensor:
        """Images in the type of weights that the library cast."""
        casts = self.knobs.casts(self.job) and inputs.is_floating_point()
        return inputs.to(type_of_dtype[self.job.precision]) if casts else inputs

    def evaluate(self, batch: Batch | None, score: Score) -> None:
        assert batch is not None
        self.synchronize()
        job = replace(self.job, precision="fp32") if self.knobs.casts(self.job) else self.job  # then without autocast
        evaluate(self.model, lambda inputs: self.model(self._cast(inputs)), batch, job, self.micro_batches, score)

    def state(self) -> dict[str, Tensor] | None:
        """Tensor by tensor, so that no device holds the full model; in fp32, also where the model is in 16 bits."""
        from deepspeed.utils import safe_get_full_fp32_param

        self.synchronize()
        state: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            sharded = self.knobs.zero_stage and isinstance(tensor, nn.Parameter)
            full: Tensor = cast(Any, safe_get_full_fp32_param(tensor)) if sharded else tensor
            if self.job.rank == 0:
                state[name] = full.detach().cpu().clone()
        return state if self.job.rank == 0 else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Rounded to the model's type where the library cast it."""
        gathered = import_deepspeed(self.job.device).zero.GatheredParameters  # at stages 0 to 2 it gathers nothing
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            with gathered([tensor], modifier_rank=0), torch.no_grad():
                tensor.copy_(state[name])
        if self.knobs.zero_stage:  # the optimizer has its own copy of what it updates
            self.engine.optimizer.refresh_fp32_params()

    def live(self) -> Live:
        """Each rank's partitions: flat tensors in fp32, which its optimizer updates. DeepSpeed's own `load_checkpoint`
        is not used, because it unpickles what it reads, which could run any code."""
        buffers, zero = dict(self.model.named_buffers()), self.engine.optimizer
        if not self.knobs.zero_stage:
            return Live(dict(self.model.named_parameters()), self.engine.basic_optimizer, buffers)
        stage_3 = self.knobs.zero_stage == 3
        partitions = zero.fp32_partitioned_groups_flat if stage_3 else zero.single_partition_of_fp32_groups
        named = {f"partition{number}": tensor for number, tensor in enumerate(partitions)}
        return Live(named, zero.optimizer, buffers, part=f"replica{self.job.rank}")

    def numbers(self) -> dict[str, Any]:
        steps = {"global_steps": self.engine.global_steps, "skipped_steps": self.engine.skipped_steps}
        return {**steps, "applied": self.update.count, "synchronized": self.synchronized}

    @torch.no_grad()
    def restore(self, numbers: Mapping[str, Any]) -> None:
        """The partitions have been overwritten: make the model's weights from them, as after an update. Collective."""
        self.engine.global_steps, self.engine.skipped_steps = numbers["global_steps"], numbers["skipped_steps"]
        self.update.count, self.synchronized = numbers["applied"], numbers["synchronized"]
        zero, stage = self.engine.optimizer, self.knobs.zero_stage
        if stage in (1, 2):
            zero.update_lp_params()
            for group in range(len(zero.bit16_groups)):
                zero._update_model_bit16_weights(group)
        elif stage == 3:
            zero._partition_all_parameters()
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)

    def close(self) -> None:
        self.engine.destroy()
        self.until_close.close()
        super().close()


def device_index(device: torch.device, local_rank: int) -> AbstractContextManager[None]:
    """The environment in which LOCAL_RANK is the index of this rank's device, as the engine reads it in set-up and in
    steps; the launcher's number differs where each task sees one GPU (--gpus-per-task=1). Under Open MPI the engine
    wants the launcher's variable to have the same value."""
    names = [name for name in ("LOCAL_RANK", OPEN_MPI[2]) if name == "LOCAL_RANK" or name in os.environ]
    return environment(dict.fromkeys(names, str(device.index if device.type == "cuda" else local_rank)))
