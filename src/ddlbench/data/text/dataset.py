"""Text to train on: windows over memory-mapped token files, made once from raw text and a tokenizer, or over the raw
text itself, whose lines are read and tokenized again at each access. The tokens are equal, because both are made line
by line (token_file.py). Complete lines are tokenized, so a window costs what its lines cost, and every window of a text
of one line costs the complete text.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddlbench.data.feed import Fetched
from ddlbench.data.home import SPLITS
from ddlbench.data.staging import StagedFiles, node_folder
from ddlbench.data.text.token_file import (
    THREADS,
    TextTokenizer,
    TokenFile,
    TokenizerFiles,
    is_current,
    is_made,
    token_path,
    tokenize_file,
)
from ddlbench.errors import UserError, check_values, reporting
from ddlbench.job import Model
from ddlbench.recipe.recipe import IGNORED

TOKENIZE = ("ahead", "on_the_fly")
# Training and validation text as WikiText and others name them; the first complete pair counts.
PAIRS = (("wiki.train.raw", "wiki.valid.raw"), ("wiki.train.tokens", "wiki.valid.tokens"), ("train.txt", "valid.txt"))


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
        tokens = self.tokens[np.minimum(positions, last)].astype(np.int64)
        if (largest := int(tokens.max(initial=0))) >= (words := self.file.index.vocab_size):
            raise UserError(
                f"{self.file.path} has token {largest}, its index says {words} words: check it with python -m "
                "ddlbench.data verify, and make it again"
            )
        window = torch.from_numpy(tokens)
        beyond = torch.from_numpy(positions[:, 1:] > last)
        return Fetched(
            inputs=window[:, :-1].contiguous(),
            targets=window[:, 1:].masked_fill(beyond, IGNORED),
            valid=torch.ones(len(keys), dtype=torch.bool),
        )

    @cached_property
    def tokens(self) -> NDArray[Any] | RawTokens:
        """The text, mapped, or tokenized at each access: [tokens]. UserError where raw text has no table of lines."""
        if self.raw is None:
            return self.file.read()
        text, tokenizer = self.raw
        table = self.file.lines()
        if table is None:
            raise UserError(
                f"there is no table {self.file.path.with_suffix('.lines')} of the lines of {text} on this node: "
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
        begins: Sequence[int] = self.table[:, 1]  # pyright: ignore[reportAssignmentType]  # of each line, in tokens
        windows: list[NDArray[Any]] = []
        moved = reporting(f"cannot read {self.path}", "check whether it was moved")
        with moved, self.path.open("rb", buffering=0) as text:
            for window in positions:  # cut from the tokens of the lines that hold it
                lines = bisect_right(begins, window[0]) - 1, bisect_left(begins, window[-1] + 1)
                (start, before), (stop, after) = self.table[list(lines)].tolist()
                if not 0 <= start <= stop <= self.table[-1, 0]:
                    raise UserError(
                        f"the table of the lines of {self.path} is damaged: delete it, and it is made again"
                    )
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
                windows.append(tokens[window - before])
        return np.stack(windows)


@dataclass
class TokenText:
    """Raw text in a folder.

    root: its folder, with wiki.train.raw and wiki.valid.raw, or .tokens, or train.txt and valid.txt
    tokenizer: folder with vocab.json and merges.txt (GPT-2's) or with tokenizer.json, or that file; null: root
    stage_to: folder of each node's own storage to copy what is read to before the clock starts; null: none
    cache_dir: where the token files go; null: root if it can be written, else the program's own folder
    train, valid: other names in root; a name that ends in .bin is a token file made before
    tokenize: ahead, on first use into token files | on_the_fly, again whenever a sample is read; the same samples
    val_limit: maximum number of validation windows (the first ones), whose number of words is then not available
    """

    name: str
    root: str | None = None
    tokenizer: str | None = None
    cache_dir: str | None = None
    stage_to: str | None = None
    train: str | None = None
    valid: str | None = None
    tokenize: str = "ahead"
    val_limit: int | None = None

    kind = "text"

    def __post_init__(self) -> None:
        check_values("data.", self, above={"val_limit": 0}, choices={"tokenize": TOKENIZE})
        self.mapped = self.tokenize == "ahead"
        self.costly = not self.mapped
        if (self.train is None) != (self.valid is None):
            raise UserError(f"data.train={self.train} and data.valid={self.valid}: give both names or none")
        made = [name for name in (self.train, self.valid) if name and name.endswith(".bin")]
        if made and not self.mapped:
            raise UserError(
                f"data.tokenize=on_the_fly needs raw text, {' and '.join(made)} is a token file: "
                f"choose data.tokenize=ahead, or give data.train= and data.valid= the raw text"
            )

    def check(self, model: Model, validate: bool = True) -> None:
        """Opens token files that exist already; whether others are long enough, `split` finds out."""
        if files := self.tokenizer_files():
            tokenizer = files.load()
            _fits_vocabulary(tokenizer.name, tokenizer.vocab_size, model)
        for train, (text, target) in self.paths().items():
            if is_made(text, target):
                replace(self, stage_to=None).split(train, model, seed=0)

    def paths(self) -> dict[bool, tuple[Path, Path]]:
        """Text and its token file, of training (True) and validation (False)."""
        files = self.tokenizer_files()
        digest = files.hash() if files else ""
        texts = zip(SPLITS, self.texts(), strict=True)
        return {train: (text, token_path(text, digest, self.cache_dir)) for train, text in texts}

    def texts(self) -> tuple[Path, Path]:
        """Training and validation text in `root`, under the names given or else a pair of PAIRS. Raises UserError with
        the expected files where something is missing."""
        pairs = [(self.train, self.valid)] if self.train and self.valid else list(PAIRS)
        layout = "; or ".join(" and ".join(pair) for pair in pairs)
        if self.root is None:
            raise UserError(f"data.root is not set: give data.root=FOLDER, a folder that holds {layout}")
        folder = Path(self.root)
        if not folder.is_dir():
            raise UserError(f"data.root={self.root} is not a folder: it must hold {layout}")
        for pair in pairs:
            train, valid = (folder / name for name in pair)
            if train.is_file() and valid.is_file():
                return train, valid
        present = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise UserError(
            f"data.root={self.root} holds {present}: it must hold {layout} (other names: data.train=, data.valid=)"
        )

    def tokenizer_files(self) -> TokenizerFiles | None:
        """None where there are two token files and no tokenizer to compare them with."""
        raw = any(text.suffix != ".bin" for text in self.texts())
        place = self.tokenizer or str(self.root)
        files = TokenizerFiles.find(Path(place))
        if files is None and (raw or self.tokenizer is not None):
            raise UserError(
                f"no tokenizer in {place}: put GPT-2's vocab.json and merges.txt there (they come with the published "
                f"GPT-2 model), or a tokenizer.json, or give data.tokenizer=FOLDER that holds them"
            )
        return files

    def prepare(self) -> None:
        """Tokenize texts without a current token file, or without the table of lines that raw text is read with.
        Processes that do so at the same time write the same files."""
        files = self.tokenizer_files()
        for text, target in self.paths().values():
            if is_current(text, target) and (self.mapped or TokenFile.open(target).lines() is not None):
                continue
            assert files, "raw text needs a tokenizer"
            with reporting(f"cannot make token file {target}", "choose data.cache_dir=FOLDER"):
                tokenize_file(text, files.load(), target)

    def open(self, train: bool) -> TokenFile:
        """Raises UserError where the token file is not of the configured tokenizer, or of another than its pair."""
        files, paths = self.tokenizer_files(), self.paths()
        text, target = paths[train]
        if not is_made(text, target):
            raise UserError(
                f"there is no token file {target} of {text} on this node: "
                f"set data.cache_dir=FOLDER to one that all nodes share"
            )
        file = TokenFile.open(target)
        if files:
            configured, expected = f"the configured tokenizer is {files}", files.hash()
        else:
            pair = TokenFile.open(paths[True][1])
            configured, expected = f"{pair.path} with {pair.index.tokenizer}", pair.index.tokenizer_hash
        if file.index.tokenizer_hash != expected:
            raise UserError(
                f"token file {file.path} was made with tokenizer {file.index.tokenizer}, {configured} "
                f"(hash {expected[:8]}): give data.tokenizer= the same one, or data.train= and data.valid= the raw text"
            )
        return file

    def split(self, train: bool, model: Model, seed: int) -> TokenSplit:
        """`seed` changes nothing: text has no augmentation. Raises UserError where file and model do not fit."""
        file = self.open(train)
        (seq_len,) = model.input_shape()
        _fits_vocabulary(f"{file.path} ({file.index.tokenizer})", file.index.vocab_size, model)
        scored = max(file.index.tokens - 1, 0)
        windows = scored // seq_len if train else -(-scored // seq_len)
        if not windows:
            shorter = f"model.seq_len={seq_len} needs {seq_len + 1}: choose a smaller model.seq_len= or"
            needs = shorter if train else "validation needs 2: give"
            raise UserError(f"{file.path} has {file.index.tokens} tokens, {needs} a longer text")
        if not train and self.val_limit is not None:
            windows = min(windows, self.val_limit)
        text, _ = self.paths()[train]
        file = replace(file, path=self._here(train, file.path))
        files = None if self.mapped else self.tokenizer_files()
        return TokenSplit(file, seq_len, windows, files and (self._here(train, text), files))

    def describe(self) -> dict[str, Any]:
        """hash: of the tokens and the tokenizer. All sizes are of the full text, so under a val_limit, which is in
        windows of the model, those of the validation text are None: a perplexity per word would be of other words."""
        train, val = (self.open(part).index for part in (True, False))
        sizes, complete = ("tokens", "words", "lines"), self.val_limit is None
        hashes = " ".join((train.sha256, val.sha256, train.tokenizer_hash))
        return {
            "name": self.name,
            "kind": self.kind,
            "hash": hashlib.sha256(hashes.encode(errors="backslashreplace")).hexdigest(),
            **{f"train_{size}": getattr(train, size) for size in sizes},
            **{f"val_{size}": getattr(val, size) if complete else None for size in sizes},
            "tokenizer": train.tokenizer,
            "vocab_size": train.vocab_size,
        }

    def files_to_stage(self) -> list[StagedFiles]:
        return [
            StagedFiles(file.parent, self._here(train, file).parent, [file.name], 1, file.stat().st_size)
            for train, (text, target) in self.paths().items()
            for file in ([target] if self.mapped else [text, target.with_suffix(".lines")])
        ]

    def files_read(self) -> list[Path]:
        """Without the tables of lines, which stay mapped."""
        paths = self.paths().items()
        return [self._here(train, target if self.mapped else text) for train, (text, target) in paths]

    def _here(self, train: bool, file: Path) -> Path:
        """A file of the split where this node reads it."""
        if self.stage_to is None:
            return file
        return node_folder(self.stage_to, self.name, self.describe()["hash"]) / SPLITS[train] / file.name


def _fits_vocabulary(what: str, needed: int, model: Model) -> None:
    if needed > model.outputs():
        raise UserError(
            f"{what} has a vocabulary of {needed}, the model's is {model.outputs()}: "
            f"give model.vocab_size={needed} or more, or another data.tokenizer="
        )
