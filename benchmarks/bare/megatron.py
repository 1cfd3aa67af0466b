"""Tensor parallelism with plain tensors, as Megatron-LM does it (Shoeybi et al. 2019, section 3): no DTensor.

Two sums a block forward and two backward; embedding and head by the vocabulary, tied; the loss of own classes. Rank 0
sends the batch to the others, and each rank drops attention weights of its heads by random numbers of its own. Matrices
are transposed as in transformers' GPT-2, which the other scripts train: their products have another speed.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from benchmarks.bare.work import batch, make_optimizer, samples, size, timed

WIDTH, HEADS, LAYERS, VOCAB, DROPOUT = 512, 8, 4, 8192, 0.1
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FIRST, OWN = RANK * VOCAB // RANKS, VOCAB // RANKS


class Copied(torch.autograd.Function):
    """f of the paper: whole in, gradients of all ranks summed."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """g of the paper: summed over ranks, the gradient as it is."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient


class Row(Conv1D):
    """Own features in, the sum over ranks out; the bias once."""

    def forward(self, x: Tensor) -> Tensor:
        return Summed.apply(x @ self.weight) + self.bias


class OwnRandom:
    """Random numbers of this rank; all others are the same on every rank."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(1 + RANK).get_state()

    @contextmanager
    def __call__(self) -> Generator[None]:
        shared = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(shared)


own_random = OwnRandom()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = Conv1D(3 * WIDTH // RANKS, WIDTH), Row(WIDTH, WIDTH // RANKS)
        self.fc, self.out = Conv1D(4 * WIDTH // RANKS, WIDTH), Row(WIDTH, 4 * WIDTH // RANKS)
        self.act, self.drop = nn.GELU(approximate="tanh"), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(Copied.apply(self.ln_1(x))).view(*x.shape[:2], 3, HEADS // RANKS, -1).transpose(1, 3)
        with own_random():
            attended = F.scaled_dot_product_attention(*qkv.unbind(2), dropout_p=DROPOUT, is_causal=True)
        x = x + self.drop(self.proj(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.out(self.act(self.fc(Copied.apply(self.ln_2(x))))))


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(OWN, WIDTH), nn.Embedding(size, WIDTH), nn.Dropout(DROPOUT)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of own classes."""
        elsewhere = (tokens < FIRST) | (tokens >= FIRST + OWN)
        embedded = self.wte((tokens - FIRST).masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        hidden = self.drop(Summed.apply(embedded) + self.wpe(torch.arange(tokens.shape[-1])))
        return F.linear(Copied.apply(self.ln_f(self.blocks(hidden))), self.wte.weight)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy: the largest logit, the sum of exponentials and the target's logit from all ranks."""
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    shifted = logits - largest.unsqueeze(-1)
    elsewhere = (targets < FIRST) | (targets >= FIRST + OWN)
    of_target = shifted.gather(-1, (targets - FIRST).masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    sums, of_target = Summed.apply(torch.stack([shifted.exp().sum(-1), of_target.masked_fill(elsewhere, 0.0)]))
    return (sums.log() - of_target).mean()


def main() -> None:
    model = GPT2()
    optimizer = make_optimizer(model)
    inputs, targets = samples(batch * RANKS)

    def step() -> None:
        for tensor in (inputs, targets):
            dist.broadcast(tensor, 0)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    timed(step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
