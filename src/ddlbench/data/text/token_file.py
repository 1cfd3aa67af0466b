"""A text as one file of tokens, memory-mapped, with a small JSON index beside it.

Random access to any window costs one page fault at most and no tokenizing, however often the text is read: the layout
Megatron-LM's indexed datasets made usual (Shoeybi et al. 2019, "Megatron-LM"), for one continuous text.

    NAME.bin    the tokens, little-endian uint16, or uint32 for vocabularies above 65,536
    NAME.json   TokenIndex: written last: a token file without it is incomplete
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlbench.data.home import home
from ddlbench.errors import UserError, reporting
from ddlbench.foreign import from_json, read_format, regular_size, sha256_of

FORMAT = 1
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class TokenIndex:
    """What the JSON file holds.

    tokens, words, lines: sizes of the text; words: what whitespace (Unicode's) separates. The sizes published for
        WikiText (103,227,021 words of training and 217,646 of validation text) are larger than this: they count an end
        of line as a word, so compare words + lines. torchtext, which put one "<eos>" after each line, came to the
        2,088,628 published for WikiText-2.
    sha256: of the tokens' bytes
    tokenizer, tokenizer_hash, vocab_size: what made the tokens, which are all below vocab_size
    source, source_bytes, source_sha256, source_modified_ns: the text file, when it was read
    """

    format: int
    dtype: str
    tokens: int
    words: int
    lines: int
    sha256: str
    tokenizer: str
    tokenizer_hash: str
    vocab_size: int
    source: str
    source_bytes: int
    source_sha256: str
    source_modified_ns: int


@dataclass(frozen=True)
class TokenFile:
    """A token file whose size is right. `read` maps it."""

    path: Path
    index: TokenIndex

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Raises UserError for a missing or unreadable index and for a file that was cut short."""
        about = path.with_suffix(".json")
        again = f"if it is a copy, copy it again; else delete it and {about.name}, and it is made again"
        with reporting(f"token file {path} has no index {about}", again):
            content = read_format(about, FORMAT, again)
        try:
            index = from_json(TokenIndex, content)
            if index.dtype not in DTYPES:
                raise ValueError(f"dtype is {index.dtype[:40]!a}")
        except ValueError as error:
            raise UserError(f"{about} is not the index of a token file ({error}): {again}") from error
        expected, size = index.tokens * np.dtype(index.dtype).itemsize, regular_size(path)
        if size != expected:
            raise UserError(f"token file {path} has {size or 0} bytes, its index says {expected}: {again}")
        return cls(path, index)

    def read(self) -> NDArray[Any]:
        """The tokens [tokens], uint16 or uint32, mapped read-only."""
        return np.memmap(self.path, dtype=np.dtype(self.index.dtype).newbyteorder("<"), mode="r")


def smallest_dtype(vocab_size: int) -> str:
    """Type of the tokens of a vocabulary."""
    return DTYPES[vocab_size > 2**16]


def token_path(text: Path, tokenizer_hash: str, cache_dir: str | None) -> Path:
    """The token file of a text: the text itself if that is one, else a name for this text and tokenizer in
    `cache_dir`, or beside the text, or in the program's own folder where the text's cannot be written."""
    if text.suffix == ".bin":
        return text
    # The size keeps texts of the same name apart in one cache.
    name = f"{text.name}-{text.stat().st_size}-{tokenizer_hash[:8]}.bin"
    if cache_dir is not None:
        return Path(cache_dir).expanduser() / name
    beside = text.with_name(name)
    return beside if beside.exists() or os.access(text.parent, os.W_OK) else home() / "tokens" / name


def is_made(text: Path, target: Path) -> bool:
    """Whether there is a token file to open. One without an index is incomplete and does not count."""
    return text == target or target.with_suffix(".json").exists()


def is_current(text: Path, target: Path) -> bool:
    """Whether the token file is of this very text. The text is read only if its modification time has changed."""
    if text == target or not is_made(text, target):
        return text == target
    index = TokenFile.open(target).index
    return index.source_modified_ns == text.stat().st_mtime_ns or index.source_sha256 == sha256_of(text)


def token_files(place: Path) -> list[Path]:
    """`place` if it is a token file by its name, else the token files in that folder."""
    if place.suffix == ".bin":
        return [place]
    return [path for path in sorted(place.glob("*.bin")) if path.with_suffix(".json").is_file()]
