"""FSDP2, a group a block: docs.pytorch.org, "Getting started with Fully Sharded Data Parallel (FSDP2)"."""

import os

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.bare.work import gpt2, loss_of, make_optimizer, samples, timed


def main() -> None:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    model = gpt2()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    inputs, targets = samples()

    def step() -> None:
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    timed(step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
