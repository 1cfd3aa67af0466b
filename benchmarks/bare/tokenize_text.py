"""A text tokenized as it is read: nothing is made beforehand, and each window is tokenized anew in every epoch."""

from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    """Windows of seq_len tokens that begin at lines, evenly spread over the text; targets are one token further."""

    def __init__(self, text: Path, vocabulary: Path, merges: Path, seq_len: int, windows: int) -> None:
        self.lines = text.read_text().splitlines(keepends=True)
        self.tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.seq_len, self.windows = seq_len, windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start, tokens = index * len(self.lines) // self.windows, []
        for line in chain(self.lines[start:], self.lines):
            tokens += self.tokenizer.encode(line).ids
            if len(tokens) > self.seq_len:
                break
        window = torch.tensor(tokens[: self.seq_len + 1])
        return window[:-1], window[1:]


def loader(folder: Path, batch: int, seq_len: int, windows: int) -> DataLoader:
    text = Windows(folder / "train.txt", folder / "vocab.json", folder / "merges.txt", seq_len, windows)
    return DataLoader(text, batch, shuffle=True, drop_last=True)
