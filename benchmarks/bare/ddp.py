"""One process, or DistributedDataParallel: docs.pytorch.org, "Getting started with Distributed Data Parallel"."""

import os

import torch
import torch.distributed as dist

from benchmarks.bare.work import build, chosen, loss_of, make_optimizer, samples, timed


def main() -> None:
    model = build()
    optimizer = make_optimizer(model)
    inputs, targets = samples()
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=not chosen("buffers"), gradient_as_bucket_view=chosen("buckets")
        )

    def step() -> None:
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    timed(step)


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    main()
