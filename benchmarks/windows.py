"""Windows of a text, from a token file that was made once and tokenized anew for each window, turn by turn.

Both sides run in this process with one thread, so what is printed is of one core.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain, count, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.bare.tokenize_text import loader
from benchmarks.turns import ratio_text, show
from ddlbench.data.feed import Request
from ddlbench.data.loaders.native import Native
from ddlbench.data.samples import SampleText
from ddlbench.data.text.dataset import TokenText
from ddlbench.job import Place
from ddlbench.models.gpt2 import GPT2

BATCH, SEQ_LEN, TURN_S = 8, 1024, 0.3
Batches = Iterator[tuple[Tensor, Tensor]]


def from_tokens(data: TokenText, batch: int, seq_len: int) -> tuple[Batches, int]:
    """Epoch after epoch through ddlbench, and the windows of one."""
    model = GPT2("gpt2", n_layer=1, n_embd=64, n_head=1, vocab_size=50257, seq_len=seq_len, dropout=0.0)
    data.prepare()
    request = Request(model, Place(0, 1), torch.device("cpu"), seed=0, replica_batch=batch)
    feed = Native("native").open(data, request)
    batches = chain.from_iterable(map(feed.train, count()))
    return ((batch.inputs, batch.targets) for batch in batches if batch), len(data.split(True, model, 0))


def on_the_fly(folder: Path, batch: int, seq_len: int, windows: int) -> Batches:
    return endless(repeat(loader(folder, batch, seq_len, windows)))


def endless(epochs: Iterable[Iterable[Any]]) -> Batches:
    return ((inputs, targets) for inputs, targets in chain.from_iterable(epochs))


def tokens_a_second(batches: Batches, seconds: float) -> float:
    tokens, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        tokens += next(batches)[0].numel()
    return tokens / passed


def compare(name: str, pairs: int) -> None:
    torch.set_num_threads(1)
    text = SampleText("sample_text")
    text.prepare()
    made_once, windows = from_tokens(TokenText("text", root=str(text.folder())), BATCH, SEQ_LEN)
    made_anew = on_the_fly(text.folder(), BATCH, SEQ_LEN, windows)
    for side in (made_once, made_anew):
        next(side)
    rates = [(tokens_a_second(made_once, TURN_S), tokens_a_second(made_anew, TURN_S)) for _ in range(pairs)]
    speeds = " and ".join(f"{median(side) / 1e6:.2f}" for side in zip(*rates, strict=True))
    ratio = ratio_text([a / b for a, b in rates])
    show(f"{name}/on the fly", f"ratio {ratio}, {speeds} M tokens/s; aims: 10, 1 M tokens/s")
