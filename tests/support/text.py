"""A text of 39 + 12 bytes, so that tokens can be counted by hand, and a model that reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddlbench.data.samples import train_bpe
from ddlbench.data.text.dataset import TokenText
from ddlbench.models.gpt2 import GPT2

TEXT = "one two three\n\nfour five , six seven .\n"


def write_text(folder: Path) -> None:
    """The text, and a tokenizer of single bytes."""
    (folder / "wiki.train.raw").write_text(TEXT)
    (folder / "wiki.valid.raw").write_text("a b\n\nc dd .\n")
    train_bpe("", 256, folder)


def model(seq_len: int, vocab_size: int = 300) -> GPT2:
    return GPT2("gpt2", n_layer=1, n_embd=4, n_head=1, vocab_size=vocab_size, seq_len=seq_len)


def tokens_of(text: TokenText, train: bool) -> Tensor:
    return torch.from_numpy(text.split(train, model(1), 0).tokens.astype(np.int64))


def every_window(text: TokenText, train: bool, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    split = text.split(train, model(seq_len), 0)
    fetched = split.__getitems__([(0, index) for index in range(len(split))])
    return fetched.inputs, fetched.targets, fetched.valid
