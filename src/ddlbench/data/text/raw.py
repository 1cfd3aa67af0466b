"""A text that is tokenised while it is read: each read of a window reads its lines from the raw text and tokenises them
again. The tokens equal those of the token file, since both are made line by line (tokenize.py).

A table that is made with the token file has the position of each line:

    NAME.lines    [lines + 1, 2] little-endian int64: where each line begins, in bytes and in tokens; then the ends

Whole lines are tokenised, so a window costs what its lines cost: a text that is one line costs the whole text a window.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddlbench.data.text.tokenfile import TokenFile, TokenIndex
from ddlbench.data.text.tokenize import ROW, TextTokenizer, TokenizerFiles, on_one_thread, table_path
from ddlbench.errors import UserError


def has_line_table(target: Path) -> bool:
    """Whether a token file, which must be there, has a table of its lines: older ones have none."""
    return _table(TokenFile.open(target)) is not None


@dataclass(frozen=True)
class RawText:
    """A raw text in the place of `file`, the token file made of it. Small to send: it opens where it is read."""

    path: Path
    file: TokenFile
    tokenizer: TokenizerFiles

    @property
    def index(self) -> TokenIndex:
        return self.file.index

    def read(self) -> RawTokens:
        """Raises UserError where there is no table."""
        table = _table(self.file)
        if table is None:
            raise UserError(
                f"there is no table {table_path(self.file.path)} of the lines of {self.path} on this node: "
                f"set data.cache_dir=FOLDER to one that all nodes share"
            )
        on_one_thread()
        return RawTokens(self.path, table, self.tokenizer.load())


@dataclass(frozen=True)
class RawTokens:
    """All tokens of a text, to be indexed as an array of them is, by the positions of windows."""

    path: Path
    table: NDArray[np.int64]
    tokenizer: TextTokenizer

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """positions [windows, positions of a window], ascending in each; the tokens there. Raises UserError where the
        text is no longer what it was when the table was made."""
        try:
            with self.path.open("rb", buffering=0) as text:
                return np.stack([self._stretch(text, row[0], row[-1])[row - row[0]] for row in positions])
        except OSError as error:
            raise UserError(f"cannot read {self.path} ({error.strerror}): check whether it was moved") from error

    def _stretch(self, text: BinaryIO, first: int, last: int) -> NDArray[Any]:
        """The tokens first..last, cut from those of the lines that hold them."""
        begins: Sequence[int] = self.table[:, 1]  # pyright: ignore[reportAssignmentType]  # of each line, in tokens
        lines = bisect_right(begins, first) - 1, bisect_left(begins, last + 1)
        (start, before), (stop, after) = self.table[list(lines)].tolist()
        if not 0 <= start <= stop <= self.table[-1, 0]:
            raise UserError(f"the table of the lines of {self.path} is damaged: delete it, and it is made again")
        text.seek(start)
        tokens = self._tokens(text.read(stop - start))
        if len(tokens) != after - before:
            raise UserError(
                f"{self.path} has {len(tokens)} tokens in bytes {start} to {stop}, it had {after - before}: "
                f"the text changed after it was indexed: restart to index it again"
            )
        return tokens[first - before : last + 1 - before]

    def _tokens(self, raw: bytes) -> NDArray[Any]:
        """None of what is not UTF-8: it was, when the table was made."""
        try:
            return self.tokenizer.encode([line.decode() for line in BytesIO(raw)])
        except UnicodeDecodeError:
            return np.empty(0)


def _table(file: TokenFile) -> NDArray[np.int64] | None:
    """Mapped; None where there is none of this text."""
    index, path = file.index, table_path(file.path)
    if not path.is_file() or path.stat().st_size != (index.lines + 1) * ROW.itemsize * 2:
        return None
    table = np.asarray(np.memmap(path, dtype=ROW, mode="r")).reshape(-1, 2)
    return table if table[-1].tolist() == [index.source_bytes, index.tokens] else None
