"""parallelize_module: docs.pytorch.org, "Large scale transformer training with Tensor Parallel".

It takes nn.Linear, and transformers' GPT-2 has another class, so this is a GPT-2 of nn.Linear. Queries, keys and
values are one matrix whose rows go head by head, as in Megatron-LM, so that a slice has whole heads.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.bare.work import batch, loss_of, make_optimizer, samples, size, timed

WIDTH, HEADS, LAYERS, VOCAB, DROPOUT = 512, 8, 4, 8192, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act, self.drop = nn.GELU(approximate="tanh"), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        own_heads = self.qkv(self.ln_1(x)).view(*x.shape[:2], -1, 3, WIDTH // HEADS).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*own_heads.unbind(3), dropout_p=DROPOUT, is_causal=True)
        x = x + self.drop(self.proj(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.out(self.act(self.fc(self.ln_2(x)))))


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Embedding(size, WIDTH), nn.Dropout(DROPOUT)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[-1])))
        return self.head(self.ln_f(self.blocks(hidden)))


def main() -> None:
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (world,))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"blocks.{index}.{name}": columns for index in range(LAYERS) for name in ("qkv", "fc")}
    plan |= {f"blocks.{index}.{name}": rows for index in range(LAYERS) for name in ("proj", "out")}
    plan["wte"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(GPT2(), mesh, plan)
    model.head.weight = model.wte.weight
    optimizer = make_optimizer(model)
    inputs, targets = samples(batch * world)

    def step() -> None:
        with loss_parallel():
            loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    timed(step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
