"""Two stages of torch.distributed.pipelining: docs.pytorch.org, "Pipeline parallelism", splitting a model by hand.

The cut is that of ddlbench's run. The token embedding is tied to the head, so both ends add up its gradients, as
Megatron-LM does.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.bare.work import batch, gpt2, loss_of, make_optimizer, samples, size, timed

BLOCKS_IN_FRONT = 3
MICRO_BATCHES = 8


class Front(nn.Module):
    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        body = gpt.transformer
        self.wte, self.wpe, self.drop = body.wte, body.wpe, body.drop
        self.blocks = nn.Sequential(*body.h[:BLOCKS_IN_FRONT])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[-1]))))


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpt = gpt2()
    back = nn.Sequential(*gpt.transformer.h[BLOCKS_IN_FRONT:], gpt.transformer.ln_f, gpt.lm_head)
    model = Front(gpt) if rank == 0 else back
    tied = gpt.lm_head.weight
    samples_each = batch * world // MICRO_BATCHES
    tokens = torch.zeros(samples_each, size, dtype=torch.int64)
    hidden = torch.zeros(samples_each, size, gpt.config.n_embd, requires_grad=True)
    logits = torch.zeros(samples_each, size, gpt.config.vocab_size, requires_grad=True)
    shapes = (tokens, hidden) if rank == 0 else (hidden, logits)
    stage = PipelineStage(model, rank, world, torch.device("cpu"), *shapes)
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = make_optimizer(model)
    inputs, targets = samples(batch * world)

    def step() -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, return_outputs=False)
        dist.all_reduce(tied.grad)
        optimizer.step()
        optimizer.zero_grad()

    timed(step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
