"""The tensors of a DeepSpeed engine that training changes, for a checkpoint (ddlbench/checkpoint/live.py).

DeepSpeed's own `load_checkpoint` unpickles what it reads, which could run any code. Each rank's partitions are saved
instead: flat tensors in fp32, which are what its optimizer updates. The weights that the model computes with are made
of them again, as after an update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddlbench.checkpoint.live import Live


def live_of(engine: Any, zero_stage: int, rank: int) -> Live:
    buffers = dict(engine.module.named_buffers())
    if not zero_stage:
        return Live(dict(engine.module.named_parameters()), engine.basic_optimizer, buffers)
    partitions = {f"partition{number}": tensor for number, tensor in enumerate(_partitions(engine, zero_stage))}
    return Live(partitions, engine.optimizer.optimizer, buffers, part=f"replica{rank}")


def _partitions(engine: Any, zero_stage: int) -> list[Tensor]:
    zero = engine.optimizer
    return zero.fp32_partitioned_groups_flat if zero_stage == 3 else zero.single_partition_of_fp32_groups


@torch.no_grad()
def take_restored(engine: Any, zero_stage: int) -> None:
    """The partitions have been overwritten: let the model compute with them. Collective."""
    if not zero_stage:
        return
    zero = engine.optimizer
    if zero_stage < 3:
        zero.update_lp_params()
        for group in range(len(zero.bit16_groups)):
            zero._update_model_bit16_weights(group)
        return
    zero._partition_all_parameters()
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:  # too small to be shared out between uses
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
