"""The windows of a text by random access: over the tokens of its token file, or over the raw text, whose lines are read
and tokenized again at each access. The tokens are equal, because both are made line by line (token_file.py).

A table that is made with the token file has the position of each line:

    NAME.lines    [lines + 1, 2] little-endian int64: where each line begins, in bytes and in tokens; then the ends

Complete lines are tokenized, so a window costs what its lines cost: of a text of one line it costs the complete text.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from ddlbench.data.feed import Fetched
from ddlbench.data.text.token_file import ROW, THREADS, TextTokenizer, TokenFile, TokenizerFiles, table_path
from ddlbench.errors import UserError, reporting
from ddlbench.recipe.recipe import IGNORED


@dataclass(frozen=True)
class TokenSplit:
    """Window i has tokens [i*T, (i+1)*T) as inputs and the tokens one further as targets, T = seq_len.

    In training every window is full and the rest of the text, at most T tokens, is left out. In validation every
    token after the first is scored exactly once: the last window may be short, its inputs are filled up with the last
    token and its targets with -100, which is not scored. Windows do not depend on epoch or seed.

    raw: the text to tokenize at each access and its tokenizer, where the tokens are not read from `file`
    """

    file: TokenFile
    seq_len: int
    windows: int
    raw: tuple[Path, TokenizerFiles] | None = None

    def __len__(self) -> int:
        return self.windows

    def __getitems__(self, keys: list[tuple[int, int]]) -> Fetched:
        """inputs, targets [B, seq_len] int64, valid [B] all True."""
        indices = np.array([index for _, index in keys], dtype=np.int64)
        assert ((indices >= 0) & (indices < self.windows)).all(), f"window outside [0, {self.windows}): {indices}"
        positions = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        last = self.file.index.tokens - 1
        window = torch.from_numpy(self.tokens[np.minimum(positions, last)].astype(np.int64))
        beyond = torch.from_numpy(positions[:, 1:] > last)
        return Fetched(
            inputs=window[:, :-1].contiguous(),
            targets=window[:, 1:].masked_fill(beyond, IGNORED),
            valid=torch.ones(len(keys), dtype=torch.bool),
        )

    @cached_property
    def tokens(self) -> NDArray[Any] | RawTokens:
        """All of the text, mapped, or tokenized at each access: [tokens]. Raises UserError where raw text has no table
        of lines."""
        if self.raw is None:
            return self.file.read()
        text, tokenizer = self.raw
        table = line_table(self.file)
        if table is None:
            raise UserError(
                f"there is no table {table_path(self.file.path)} of the lines of {text} on this node: "
                f"set data.cache_dir=FOLDER to one that all nodes share"
            )
        os.environ[THREADS] = "false"  # from now on: a rank, and each of its loader workers, uses one core
        return RawTokens(text, table, tokenizer.load())

    def __getstate__(self) -> dict[str, Any]:
        """Without the text, because every worker opens the text itself."""
        return {key: value for key, value in self.__dict__.items() if key != "tokens"}


@dataclass(frozen=True)
class RawTokens:
    """All tokens of a text, to be indexed as an array of them is, by the positions of windows."""

    path: Path
    table: NDArray[np.int64]
    tokenizer: TextTokenizer

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """positions [windows, positions of a window], ascending in each; the tokens there. Raises UserError where the
        text is no longer what it was when the table was made."""
        moved = reporting(f"cannot read {self.path}", "check whether it was moved")
        with moved, self.path.open("rb", buffering=0) as text:
            return np.stack([self._stretch(text, row[0], row[-1])[row - row[0]] for row in positions])

    def _stretch(self, text: BinaryIO, first: int, last: int) -> NDArray[Any]:
        """The tokens first..last, cut from those of the lines that hold them."""
        begins: Sequence[int] = self.table[:, 1]  # pyright: ignore[reportAssignmentType]  # of each line, in tokens
        lines = bisect_right(begins, first) - 1, bisect_left(begins, last + 1)
        (start, before), (stop, after) = self.table[list(lines)].tolist()
        if not 0 <= start <= stop <= self.table[-1, 0]:
            raise UserError(f"the table of the lines of {self.path} is damaged: delete it, and it is made again")
        text.seek(start)
        try:
            tokens, _ = self.tokenizer.encode([line.decode() for line in BytesIO(text.read(stop - start))])
        except UnicodeDecodeError:  # it was UTF-8 when the table was made
            tokens = np.empty(0)
        if len(tokens) != after - before:
            raise UserError(
                f"{self.path} has {len(tokens)} tokens in bytes {start} to {stop}, it had {after - before}: "
                f"the text changed after it was indexed: restart to index it again"
            )
        return tokens[first - before : last + 1 - before]


def line_table(file: TokenFile) -> NDArray[np.int64] | None:
    """The table of lines, mapped; None where there is none of this text: older token files have none."""
    index, path = file.index, table_path(file.path)
    if not path.is_file() or path.stat().st_size != (index.lines + 1) * ROW.itemsize * 2:
        return None
    table = np.asarray(np.memmap(path, dtype=ROW, mode="r")).reshape(-1, 2)
    return table if table[-1].tolist() == [index.source_bytes, index.tokens] else None
