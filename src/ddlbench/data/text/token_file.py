"""From a text to one file of tokens, memory-mapped, with a small JSON index beside it.

Random access to any window costs one page fault at most and no tokenizing, however often the text is read: the layout
Megatron-LM's indexed datasets made usual (Shoeybi et al. 2019, "Megatron-LM"), for one continuous text.

    NAME.bin    the tokens, little-endian uint16, or uint32 for vocabularies above 65,536
    NAME.json   TokenIndex: written last: a token file without it is incomplete
    NAME.lines  [lines + 1, 2] little-endian int64: where each line begins, in bytes and in tokens; then the ends

A text is tokenized line by line. A line ends with its "\\n", which belongs to it, and nothing else ends a line. So
the tokens are a function of the text alone: neither the size of a chunk nor the number of threads changes them, and
decoding them gives the text back byte by byte. Tokenized in one piece the same text may give a few tokens less,
because GPT-2's pre-tokenizer takes white space across a line end (an empty line, an indented one) as one piece, which
is cut after each "\\n" here. No token is put between lines, articles or files; WikiText's "<unk>" and "@-@" stay as
they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ddlbench.data.home import home
from ddlbench.errors import UserError, reporting
from ddlbench.files import appeared, replace_json, replacing
from ddlbench.foreign import from_json, read_format, regular_size, sha256_of
from ddlbench.progress import Progress
from ddlbench.texts import digest, first_line

FORMAT = 1
DTYPES = ("uint16", "uint32")
CHUNK_BYTES = 2**20  # text in memory at a time; with its tokens about 70 MiB, and at least one line
PROGRESS_FROM_BYTES = 2**24  # bytes of text; less is done in a few seconds
END_OF_TEXT = "<|endoftext|>"
ROW = np.dtype("<i8")  # of the table of lines
THREADS = "TOKENIZERS_PARALLELISM"  # read by the library at every call


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

    def lines(self) -> NDArray[np.int64] | None:
        """The table of lines, mapped; None where there is none of this text: older token files have none."""
        index, path = self.index, self.path.with_suffix(".lines")
        if not path.is_file() or path.stat().st_size != (index.lines + 1) * ROW.itemsize * 2:
            return None
        table = np.asarray(np.memmap(path, dtype=ROW, mode="r")).reshape(-1, 2)
        return table if table[-1].tolist() == [index.source_bytes, index.tokens] else None


def smallest_dtype(vocab_size: int) -> str:
    """Type of the tokens of a vocabulary."""
    return DTYPES[vocab_size > 2**16]


def token_path(text: Path, tokenizer_hash: str, cache_dir: str | None) -> Path:
    """The token file of a text: the text itself if that is one, else a name for this text and tokenizer in
    `cache_dir`, or beside the text, or in the program's own folder where the text's cannot be written."""
    if text.suffix == ".bin":
        return text
    beside = text.with_name(f"{text.name}-{text.stat().st_size}-{tokenizer_hash[:8]}.bin")
    if cache_dir is None and (beside.exists() or os.access(text.parent, os.W_OK)):
        return beside
    # Texts of several folders may have the same name and size.
    return Path(cache_dir or home() / "tokens") / f"{beside.stem}-{digest(str(text.resolve()))}.bin"


def is_made(text: Path, target: Path) -> bool:
    """Whether there is a token file to open. One without an index is incomplete and does not count."""
    return text == target or appeared(target.with_suffix(".json"))


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
        """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) from its two files, or any kind from one. Raises
        UserError for files that are no tokenizer, and for a BPE that has no token for a byte: the library would
        silently omit such bytes."""
        try:
            if len(self.paths) == 2:
                core = Tokenizer(models.BPE.from_file(*map(str, self.paths)))
                core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
                core.decoder = decoders.ByteLevel()
                tokens = core.get_vocab()
                if missing := len(set(pre_tokenizers.ByteLevel.alphabet()) - set(tokens)):
                    vocab = self.paths[0]
                    raise UserError(
                        f"{vocab} is not GPT-2's: {missing} of the 256 bytes have no token; give GPT-2's vocab.json"
                    )
                if END_OF_TEXT in tokens:
                    core.add_special_tokens([END_OF_TEXT])
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
        digests = (hashlib.sha256(path.read_bytes()).digest() for path in self.paths)
        return hashlib.sha256(b"".join(digests)).hexdigest()

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
        dtype = np.dtype(smallest_dtype(self.vocab_size)).newbyteorder("<")
        return np.fromiter(ids, dtype), [len(encoding) for encoding in encodings]


def tokenize_file(source: Path, tokenizer: TextTokenizer, target: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Make token file `target`, the table of its lines and its index. Memory is flat in the size of the text. Raises
    UserError for text that is not UTF-8; OSError where `target` cannot be written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    state, digest, source_digest = source.stat(), hashlib.sha256(), hashlib.sha256()
    progress = Progress(state.st_size >= PROGRESS_FROM_BYTES)
    progress.say(f"tokenizing {source} ({state.st_size / 1e6:.0f} MB) once, into {target}")
    words, lines, end = 0, 0, np.zeros(2, dtype=ROW)
    os.environ[THREADS] = "true"  # on all cores
    try:
        # In binary only "\n" ends a line.
        with source.open("rb") as text, replacing(target.with_suffix(".lines")) as table, replacing(target) as file:
            table.write(end.tobytes())
            chunks = iter(partial(text.readlines, chunk_bytes), [])
            for raw in progress.steps(chunks, -(-state.st_size // chunk_bytes), f"tokenizing {source.name}, chunk"):
                try:
                    decoded = [line.decode() for line in raw]
                except UnicodeDecodeError as error:
                    number = lines + raw.index(error.object) + 1
                    raise UserError(
                        f"{source}, line {number}, is not UTF-8 text ({error.reason}): convert it"
                    ) from error
                tokens, counts = tokenizer.encode(decoded)
                stored = tokens.tobytes()
                file.write(stored)
                digest.update(stored)
                source_digest.update(b"".join(raw))
                ends = end + np.cumsum([[len(line) for line in raw], counts], axis=1, dtype=ROW).T
                table.write(ends.tobytes())
                words, lines, end = words + sum(len(line.split()) for line in decoded), lines + len(raw), ends[-1]
    finally:
        os.environ[THREADS] = "false"  # the library's threads do not survive a fork: older versions warn of it
    bytes_, count = end.tolist()
    index = TokenIndex(
        format=FORMAT,
        dtype=smallest_dtype(tokenizer.vocab_size),
        tokens=count,
        words=words,
        lines=lines,
        sha256=digest.hexdigest(),
        tokenizer=tokenizer.name,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        source=source.name,
        source_bytes=bytes_,
        source_sha256=source_digest.hexdigest(),
        source_modified_ns=state.st_mtime_ns,
    )
    replace_json(target.with_suffix(".json"), asdict(index))
