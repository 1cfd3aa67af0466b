"""Horovod's DistributedOptimizer: horovod.readthedocs.io, "Horovod with PyTorch". Started by horovodrun."""

import horovod.torch as hvd

from benchmarks.bare.work import build, loss_of, make_optimizer, samples, timed


def main() -> None:
    model = build()
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    inputs, targets = samples()

    def step() -> None:
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    timed(step)


if __name__ == "__main__":
    hvd.init()
    main()
