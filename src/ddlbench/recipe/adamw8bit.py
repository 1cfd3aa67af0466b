"""AdamW that keeps its two moments in 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization")."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from ddlbench.recipe.optimizers import BLOCK, SMALLEST

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its import warns where it is built for another CUDA version
from bitsandbytes.functional import create_dynamic_map  # noqa: E402

CPU_PIECE = 2**20  # numbers that are updated at once on the CPU, where the kernel unpacks the moments into fp32
MOMENTS, SCALES = ("exp_avg", "exp_avg_sq"), ("exp_avg_scale", "exp_avg_sq_scale")


class AdamW8bit(Optimizer):
    """AdamW with bitsandbytes' kernel for the update of one tensor (docs/adr/0027).

    A moment m has a code of 8 bits per number and, for each block of 256 numbers in the order of the memory, a scale in
    fp32. For a table Q of 256 values from [-1, 1], from [0, 1] for the second moment (section 2.1 of the paper):
        m = scale Q[code];   m <- Adam's update of m;   scale <- max |m|;   code <- argmin_j |Q[j] - m / scale|
    The weight moves by the new moments before they are rounded. The blocks of a shard begin with the shard.
    """

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        """defaults: lr, betas, eps and weight_decay of groups that lack them"""
        super().__init__(params, defaults)
        with unset_fake_temporarily():  # in a rehearsal tensors have no values
            self.tables: list[Tensor] = [create_dynamic_map(signed) for signed in (True, False)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            small: list[list[Tensor]] = []  # weights, gradient, moments and number of updates of each
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                if not self.state[parameter]:
                    self.state[parameter] = self.new_state(parameter)
                state = self.state[parameter]
                moments = [state[name] for name in (*MOMENTS, *SCALES) if name in state]
                tensors = [
                    tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    for tensor in (parameter, parameter.grad, *moments)
                ]
                if len(moments) == len(MOMENTS):
                    small.append([*tensors, state["step"]])
                else:
                    state["step"] += 1
                    self._update(group, int(state["step"]), *tensors)
            if small:
                weights, gradients, first, second, steps = map(list, zip(*small, strict=True))
                beta1, beta2 = group["betas"]
                options = {name: group[name] for name in ("lr", "eps", "weight_decay")}
                adamw(
                    weights, gradients, first, second, [], steps,
                    amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, **options,
                )  # fmt: skip

    def _update(self, group: dict[str, Any], step: int, weights: Tensor, gradient: Tensor, *moments: Tensor) -> None:
        """Update one tensor in place. moments: codes of both moments, scales of both"""
        weights.mul_(1 - group["lr"] * group["weight_decay"])  # the kernel for CUDA does it after the step
        if gradient.stride() != weights.stride():
            gradient = torch.empty_like(weights).copy_(gradient)
        self.tables = [table.to(weights.device) for table in self.tables]
        count, scales = weights.numel(), moments[2:]
        flat = [tensor.as_strided((count,), (1,)) for tensor in (gradient, weights, *moments[:2])]
        piece = CPU_PIECE if weights.device.type == "cpu" else max(1, count)
        for start in range(0, count, piece):
            end = min(start + piece, count)
            torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
                "adam", *(tensor[start:end] for tensor in flat), *group["betas"], 0.0, 0.0, group["eps"], step,
                group["lr"], *self.tables, *(scale[start // BLOCK : ceil(end / BLOCK)] for scale in scales), 0.0, 1.0,
            )  # fmt: skip

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first update. The scales of a shard are a shard, too, of the same size on
        each rank: as many as the largest shard needs."""
        size = parameter.numel()
        if isinstance(parameter, DTensor):  # cut into rows
            mesh, rows = parameter.device_mesh, parameter.shape[0]
            axes = [axis for axis, placement in enumerate(parameter.placements) if placement.is_shard()]
            size = ceil(rows / prod(mesh.size(axis) for axis in axes)) * (size // rows)
        dtype = torch.uint8 if size >= SMALLEST else None
        state = {name: torch.zeros_like(parameter.detach(), dtype=dtype) for name in MOMENTS}
        for name in SCALES if dtype else ():
            scale = torch.zeros(ceil(size / BLOCK), device=parameter.device)
            if isinstance(parameter, DTensor):
                scale = DTensor.from_local(scale, parameter.device_mesh, parameter.placements, run_check=False)
            state[name] = scale
        return {"step": torch.tensor(0.0), **state}
