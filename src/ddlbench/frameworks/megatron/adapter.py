"""Megatron-LM's own layers (megatron-core): tp ranks share every layer of GPT-2, dp such groups are replicas.

Shoeybi et al. 2019, "Megatron-LM", section 3; Narayanan et al. 2021, "Efficient large-scale language model training on
GPU clusters". Layers, their collectives and the loss are the library's; weights, samples, optimizer and the average
over replicas are those of every framework (docs/adr/0031).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from ddlbench.errors import Unsupported, check_values, importing, refuse
from ddlbench.frameworks.megatron.layers import (
    LOCAL,
    TRANSFORMER_ENGINE,
    build_layers,
    from_original,
    original_name,
    parallel_loss,
    splits_of,
    to_original,
)
from ddlbench.frameworks.shared.checkpointing import apply_plan
from ddlbench.frameworks.shared.groups import subgroup
from ddlbench.frameworks.shared.layout import Layout, fill
from ddlbench.frameworks.shared.refusals import check_alike, check_reduction
from ddlbench.frameworks.tensor.adapter import NO_COMPILE, TensorReplica, check_parts
from ddlbench.frameworks.tensor.collectives import connect_parts, gather_from
from ddlbench.frameworks.tensor.layers import full_state, local_state
from ddlbench.job import Job, on_meta
from ddlbench.models.gpt2 import GPT2
from ddlbench.recipe.recipe import CrossEntropy
from ddlbench.recomputation import KEY, SELECTIVE, budgeted


def import_megatron(device: torch.device) -> None:
    """Unavailable where it cannot be imported."""
    with importing("megatron-core", "pip install 'ddlbench[megatron]'"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional libraries that are not installed
        import_module("megatron.core.models.gpt.gpt_layer_specs")
    warnings.filterwarnings("ignore", "MLP requires ffn_hidden_size", DeprecationWarning)  # its own call
    if device.type == "cpu":  # of CUDA_DEVICE_MAX_CONNECTIONS
        warnings.filterwarnings("ignore", "When using async grad allreduce", UserWarning)


@dataclass
class Megatron:
    """conf/framework/megatron.yaml says what each knob means."""

    library: ClassVar[str] = "megatron.core"

    name: str = "megatron"
    dp: int | None = 1
    tp: int | None = None
    layers: str = LOCAL

    def __post_init__(self) -> None:
        check_values("framework.", self, least={"dp": 1, "tp": 1}, choices={"layers": (LOCAL, TRANSFORMER_ENGINE)})

    def layout(self, world_size: int) -> Layout:
        return Layout(**fill(world_size, dp=self.dp, tp=self.tp))

    def check(self, job: Job) -> None:
        self.supports(job)
        import_megatron(job.device)
        if self.layers == TRANSFORMER_ENGINE:
            remedy = "pip install 'transformer-engine[pytorch]', or set framework.layers=local"
            with importing("transformer_engine", remedy):
                import_module("transformer_engine.pytorch")

    def supports(self, job: Job) -> None:
        """The refusals of `check` that do not depend on the installed library."""
        layout, model = self.layout(job.world_size), job.model
        if not isinstance(model, GPT2):
            raise Unsupported(f"megatron: its layers are those of transformers, not of {model.name}: choose GPT-2")
        if layout.tp > 1:
            check_parts(self.name, job, layout.tp)
        on_cpu = job.device.type == "cpu"
        smoothing = isinstance(job.loss, CrossEntropy) and job.loss.label_smoothing
        reasons = {
            NO_COMPILE: job.compile,
            f"train.precision={job.precision} on the CPU: the library's layers know autocast on CUDA only, and gloo "
            "cannot sum bf16: use train.precision=fp32":
                on_cpu and job.precision != "fp32",
            "framework.layers=transformer_engine needs CUDA: use framework.layers=local":
                on_cpu and self.layers == TRANSFORMER_ENGINE,
            f"recipe.label_smoothing={smoothing}: the library's loss would spread it over the classes of each rank: "
            "set it to 0":
                smoothing,
            f"a budget counts the blocks of transformers' GPT-2: set {KEY}=every:2, for example":
                budgeted(job.checkpoint_activations),
            f"{KEY}={SELECTIVE}: the library adds up the outputs of its matrix products in place: set {KEY}=blocks":
                job.checkpoint_activations == SELECTIVE,
        }  # fmt: skip
        refuse(self.name, reasons)
        check_reduction(self.name, job)
        check_alike(job, layout.dp)

    def setup(self, job: Job) -> MegatronReplica:
        import_megatron(job.device)
        from megatron.core import parallel_state

        assert isinstance(job.model, GPT2)
        layout, on_cuda = self.layout(job.world_size), job.device.type == "cuda"
        part, *_ = mesh = connect_parts(job, layout)
        tp_group = part.group or subgroup(layout.groups("tp"), job)  # the library needs one of a single rank, too
        assert tp_group is not None
        # The library's loss takes no group and reads this one; its layers take theirs as an argument.
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = tp_group  # pyright: ignore[reportPrivateUsage]
        model = build_layers(job.model, part, tp_group, self.layers, fused=on_cuda)
        model.to(job.device)
        apply_plan(model, job, layout.dp)
        splits = splits_of(dict(model.named_parameters(remove_duplicate=False)), job.model.tensor_plan())
        facts = {"layers": self.layers, "fused_kernels": on_cuda}
        replica = MegatronReplica(replace(job, loss=parallel_loss), model, mesh, splits, facts)
        replica.load(replace(job, device=torch.device("cpu")).build().state_dict())
        return replica


class MegatronReplica(TensorReplica):
    """A part whose parameters have the library's names and layout; states have those of transformers."""

    def state(self) -> dict[str, Tensor] | None:
        self.synchronize()
        if self.place.data_rank:
            return None
        tensors = self.model.named_parameters(remove_duplicate=False)  # a tied parameter has two names
        local = {name: tensor.detach().cpu().clone() for name, tensor in tensors}
        full = full_state(local, self.splits, self.part)
        if full is None:
            return None
        named = {original_name(name): tensor for name, tensor in full.items()}
        return {name: to_original(name, named[name], self._gpt2) for name in on_meta(self.job).state_dict()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        tensors = dict(self.model.named_parameters(remove_duplicate=False))
        names = {original_name(name): name for name in tensors}
        full = {names[name]: from_original(name, tensor, self._gpt2, self.part.size) for name, tensor in state.items()}
        for name, tensor in local_state(full, self.splits, self.part).items():
            tensors[name].copy_(tensor)

    def complete_output(self, output: Tensor) -> Tensor:
        """Without the classes that the library adds, so that every rank has as many."""
        if self.part.size > 1:
            output = gather_from(output, -1, output.shape[-1] * self.part.size, self.part)
        return output[..., : self._gpt2.outputs()]

    @property
    def _gpt2(self) -> GPT2:
        assert isinstance(self.job.model, GPT2)
        return self.job.model
