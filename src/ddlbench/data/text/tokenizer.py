"""From text to tokens: byte-level BPE tokenizers, and a stream from a text file into a token file.

A text is tokenised line by line. A line ends with its "\\n", which belongs to it, and nothing else ends a line. So
the tokens are a function of the text alone: neither the size of a chunk nor the number of threads can move them, and
decoding them gives the text back byte by byte. Tokenised in one piece the same text may give a few tokens less,
because GPT-2's pre-tokenizer takes white space that runs over a line end (an empty line, an indented one) as one run,
which here is cut behind each "\\n". No token is put between lines, articles or files; WikiText's "<unk>" and "@-@"
stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ddlbench.data.text.token_file import FORMAT, TokenIndex, smallest_dtype, write_index, write_tokens
from ddlbench.errors import UserError
from ddlbench.files import replacing
from ddlbench.progress import Progress
from ddlbench.texts import first_line

CHUNK_BYTES = 2**20  # text in memory at a time; with its tokens about 70 MiB, and at least one line
WORTH_A_WORD = 2**24  # bytes of text; less is done in a few seconds
END_OF_TEXT = "<|endoftext|>"
ROW = np.dtype("<i8")  # of the table of lines
THREADS = "TOKENIZERS_PARALLELISM"  # read by the library at every call


@dataclass(frozen=True)
class TokenizerFiles:
    """The files a tokenizer is made of: vocab.json and merges.txt, or a tokenizer.json."""

    paths: tuple[Path, ...]

    @classmethod
    def find(cls, place: Path) -> TokenizerFiles | None:
        """In a folder, vocab.json with merges.txt before tokenizer.json; a file is taken as a tokenizer.json."""
        if place.is_file():
            return cls((place,))
        for names in (("vocab.json", "merges.txt"), ("tokenizer.json",)):
            paths = tuple(place / name for name in names)
            if all(path.is_file() for path in paths):
                return cls(paths)
        return None

    def load(self) -> TextTokenizer:
        """Raises UserError for files that are no tokenizer."""
        try:
            if len(self.paths) == 2:
                core = gpt2_tokenizer(*self.paths)
            else:
                json.loads(self.paths[0].read_bytes())  # says where it is broken, which the library does not
                core = Tokenizer.from_file(str(self.paths[0]))
                core.no_truncation()
                core.no_padding()
            vocab_size = max(core.get_vocab(with_added_tokens=True).values()) + 1
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"cannot read a tokenizer from {self}: {first_line(error)}") from error
        digest = self.hash()
        return TextTokenizer(core, f"{type(core.model).__name__}-{vocab_size}-{digest[:8]}", digest, vocab_size)

    def hash(self) -> str:
        """sha256 of the files' bytes: other files, another tokenizer."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def __str__(self) -> str:
        return " and ".join(str(path) for path in self.paths)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer in memory. name: kind, size and short hash, e.g. BPE-50257-1a2b3c4d; all tokens < vocab_size."""

    core: Tokenizer
    name: str
    hash: str
    vocab_size: int

    def encode(self, lines: list[str]) -> tuple[NDArray[Any], list[int]]:
        """The tokens of all lines, one after another, and how many are each line's."""
        encodings = self.core.encode_batch_fast(lines, add_special_tokens=False)
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        return np.fromiter(ids, dtype=smallest_dtype(self.vocab_size)), [len(encoding) for encoding in encodings]


def gpt2_tokenizer(vocab: Path, merges: Path) -> Tokenizer:
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) from its two files.

    Raises UserError where a byte has no token: the library would silently omit such bytes.
    """
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = tokenizer.get_vocab()
    missing = len(set(pre_tokenizers.ByteLevel.alphabet()) - set(tokens))
    if missing:
        raise UserError(f"{vocab} is not GPT-2's: {missing} of the 256 bytes have no token; give GPT-2's vocab.json")
    if END_OF_TEXT in tokens:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def tokenize_file(source: Path, tokenizer: TextTokenizer, target: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Make token file `target`, the table of its lines and its index. Memory is flat in the size of the text.

    Raises UserError for text that is not UTF-8; OSError where `target` cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    text, state = Lines(source, chunk_bytes), source.stat()
    progress = Progress(state.st_size >= WORTH_A_WORD)
    progress.say(f"tokenising {source} ({state.st_size / 1e6:.0f} MB) once, into {target}")
    chunks = progress.steps(text, -(-state.st_size // chunk_bytes), f"tokenising {source.name}, chunk")
    dtype = smallest_dtype(tokenizer.vocab_size)
    os.environ[THREADS] = "true"  # on all cores
    try:
        with replacing(table_path(target)) as table:
            tokens, sha256 = write_tokens(target, encoded(chunks, tokenizer, table), dtype)
    finally:
        os.environ[THREADS] = "false"  # the library's threads do not survive a fork: older versions warn of it
    index = TokenIndex(
        format=FORMAT,
        dtype=dtype,
        tokens=tokens,
        words=text.words,
        lines=text.lines,
        sha256=sha256,
        tokenizer=tokenizer.name,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        source=source.name,
        source_bytes=text.bytes,
        source_sha256=text.digest.hexdigest(),
        source_modified_ns=state.st_mtime_ns,
    )
    write_index(target, index)


def encoded(chunks: Iterable[list[str]], tokenizer: TextTokenizer, table: BinaryIO) -> Iterator[NDArray[Any]]:
    """The tokens of each chunk; the table of lines is written to `table` at the same time (windows.py)."""
    end = np.zeros(2, dtype=ROW)
    table.write(end.tobytes())
    for lines in chunks:
        ids, counts = tokenizer.encode(lines)
        ends = end + np.cumsum([[len(line.encode()) for line in lines], counts], axis=1, dtype=ROW).T
        table.write(ends.tobytes())
        end = ends[-1]
        yield ids


def table_path(target: Path) -> Path:
    """The table of lines of a token file."""
    return target.with_suffix(".lines")


class Lines:
    """The lines of a text file in chunks of about `chunk_bytes`, counted and hashed as they pass.

    words: what whitespace (Unicode's) separates. The sizes published for WikiText (103,227,021 words of training and
    217,646 of validation text) are larger than this: they count an end of line as a word, so compare words + lines.
    torchtext, which put one "<eos>" behind each line, came to the 2,088,628 published for WikiText-2.
    """

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path, self.chunk_bytes = path, chunk_bytes
        self.words = self.lines = self.bytes = 0
        self.digest = hashlib.sha256()

    def __iter__(self) -> Iterator[list[str]]:
        with self.path.open("rb") as file:  # in binary only "\n" ends a line
            while raw := file.readlines(self.chunk_bytes):
                try:
                    lines = [line.decode() for line in raw]
                except UnicodeDecodeError as error:
                    number = self.lines + raw.index(error.object) + 1
                    raise UserError(
                        f"{self.path}, line {number}, is not UTF-8 text ({error.reason}): convert it"
                    ) from error
                self.words += sum(len(line.split()) for line in lines)
                self.lines += len(lines)
                for line in raw:
                    self.bytes += len(line)
                    self.digest.update(line)
                yield lines
