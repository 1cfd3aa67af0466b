"""Tokenizing gives GPT-2's own tokens, for every size of chunks, and loses nothing. A token file is written completely
or not at all, and opened with its size checked; its name and place."""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ddlbench.data.samples import train_bpe
from ddlbench.data.text.token_file import (
    FORMAT,
    TextTokenizer,
    TokenFile,
    TokenIndex,
    TokenizerFiles,
    smallest_dtype,
    token_path,
    tokenize_file,
)
from ddlbench.errors import UserError
from tests.support.processes import PYTHON, run

# Lines as WikiText has them, and what splits words, lines and bytes in unexpected places.
TEXT = (
    " \n = Robert <unk> = \n \n Robert is an English film , 1 @.@ 5 m long ; it 's not @-@ well .\n\n\n"
    "   indented\tand  spaced \r\n\x85\u2028no line end for us\x0c \u00a0 here\n"
    "na\u00efve \u65e5\u672c\u8a9e \U0001f600\U0001f468\u200d\U0001f469 e\u0301 <|endoftext|> they'll can't \x00\n"
    "no newline at the end"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 kind of tokenizer, trained on half of the text so that the other half needs rare pieces."""
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(TEXT[: len(TEXT) // 2] * 3, 300, folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": len(vocab)}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return TokenizerFiles.find(folder).load()


def lines_of(text):
    return [line + "\n" for line in text.split("\n")[:-1]] + [text.split("\n")[-1]]


def test_tokens_are_those_of_transformers(folder, tokenizer):
    from transformers import GPT2TokenizerFast

    theirs = GPT2TokenizerFast.from_pretrained(str(folder))
    for text in [TEXT, *lines_of(TEXT)]:
        assert tokenizer.encode([text])[0].tolist() == theirs.encode(text)
    end = tokenizer.core.token_to_id("<|endoftext|>")
    assert end == tokenizer.vocab_size - 1
    assert end in tokenizer.encode([TEXT])[0]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 50, 2**20])
def test_chunks_do_not_move_tokens(tmp_path, tokenizer, chunk_bytes):
    source, target = tmp_path / "text", tmp_path / "text.bin"
    source.write_bytes(TEXT.encode())
    tokenize_file(source, tokenizer, target, chunk_bytes)
    file = TokenFile.open(target)
    line_by_line = [token for line in lines_of(TEXT) for token in tokenizer.core.encode(line).ids]
    assert file.read().tolist() == line_by_line
    assert tokenizer.core.decode(line_by_line, skip_special_tokens=False) == TEXT
    assert file.index.sha256 == sha256(np.array(line_by_line, "<u2").tobytes()).hexdigest()


def test_index_describes_text_and_tokenizer(tmp_path, tokenizer):
    source = tmp_path / "text"
    source.write_bytes(b" = One two = \n\n three\tfour .\n")
    tokenize_file(source, tokenizer, tmp_path / "text.bin")
    index = TokenFile.open(tmp_path / "text.bin").index
    assert (index.words, index.lines, index.source_bytes) == (7, 3, 29)
    assert index.source_sha256 == sha256(source.read_bytes()).hexdigest()
    assert (index.source, index.source_modified_ns) == ("text", source.stat().st_mtime_ns)
    assert (index.tokenizer, index.tokenizer_hash) == (tokenizer.name, tokenizer.hash)
    assert index.vocab_size == tokenizer.vocab_size == 301
    assert index.tokenizer == f"BPE-301-{tokenizer.hash[:8]}"


def test_chunks_are_bounded(tmp_path, tokenizer, monkeypatch):
    chunks, encode = [], TextTokenizer.encode
    monkeypatch.setattr(TextTokenizer, "encode", lambda self, lines: chunks.append(len(lines)) or encode(self, lines))
    (tmp_path / "text").write_text("0123456\n" * 1000)
    tokenize_file(tmp_path / "text", tokenizer, tmp_path / "text.bin", chunk_bytes=80)
    assert sum(chunks) == 1000
    assert max(chunks) <= 11


def test_text_that_is_not_utf8_is_refused_by_line(tmp_path, tokenizer):
    (tmp_path / "text").write_bytes("good\nna\u00efve\n".encode() + b"bad \xff\n")
    with pytest.raises(UserError, match=r"text, line 3, is not UTF-8"):
        tokenize_file(tmp_path / "text", tokenizer, tmp_path / "text.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_tokenizer_json_adds_truncates_and_pads_nothing(tmp_path, folder, tokenizer):
    core = Tokenizer.from_str(tokenizer.core.to_str())
    end = ("<|endoftext|>", tokenizer.vocab_size - 1)
    core.post_processor = processors.TemplateProcessing(single=f"{end[0]} $A {end[0]}", special_tokens=[end])
    core.enable_truncation(4)
    core.enable_padding()
    core.save(str(tmp_path / "tokenizer.json"))
    other = TokenizerFiles.find(tmp_path).load()
    assert other.encode(lines_of(TEXT))[0].tolist() == tokenizer.encode(lines_of(TEXT))[0].tolist()
    assert other.hash != tokenizer.hash
    assert TokenizerFiles.find(tmp_path / "tokenizer.json").hash() == other.hash


def test_gpt2_files_go_before_tokenizer_json(tmp_path, folder):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert [path.name for path in TokenizerFiles.find(tmp_path).paths] == ["vocab.json", "merges.txt"]
    (tmp_path / "merges.txt").unlink()
    assert [path.name for path in TokenizerFiles.find(tmp_path).paths] == ["tokenizer.json"]
    (tmp_path / "tokenizer.json").unlink()
    assert TokenizerFiles.find(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "{}", "[1, 2]"])
@pytest.mark.parametrize("broken", ["vocab.json", "tokenizer.json"])
def test_broken_tokenizer_is_refused(tmp_path, broken, content):
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / broken).write_text(content)
    with pytest.raises(UserError, match=broken):
        TokenizerFiles.find(tmp_path).load()


def test_vocabulary_without_every_byte_is_refused(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet[3:])}, [])).model.save(str(tmp_path))
    with pytest.raises(UserError, match="3 of the 256 bytes have no token"):
        TokenizerFiles.find(tmp_path).load()


def write_words(path, words):
    """A text of so many words, in lines of 0 to 100; 50,000 different ones, more than the library remembers."""
    draw = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    known = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(50_000)]
    with path.open("w") as file:
        while words:
            length = min(draw.randint(0, 100), words)
            file.write(" ".join(draw.choices(known, k=length)) + "\n")
            words -= length


TOKENIZE = """
import sys, time
from pathlib import Path
from ddlbench.data.text.token_file import TokenizerFiles, tokenize_file
text, folder = map(Path, sys.argv[1:])
tokenizer, began = TokenizerFiles.find(folder).load(), time.perf_counter()
tokenize_file(text, tokenizer, text.with_suffix(".bin"))
seconds = time.perf_counter() - began
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))  # no parent's, as maxrss
print(int(peak) / 1024, seconds)
"""


@pytest.mark.slow
def test_memory_is_flat_in_ten_million_words(tmp_path):
    """54 MB more of text, 49 MB more of tokens: the peak grows by allocators' leftovers alone (from 103 to 116 MiB), so
    WikiText-103's 100 million words fit as well."""
    peaks = []
    for words in (1_000_000, 10_000_000):
        text = tmp_path / f"{words}.txt"
        write_words(text, words)
        if not peaks:
            train_bpe(text.read_text()[:500_000], 4096, tmp_path)
        done = run(PYTHON, "-c", TOKENIZE, text, tmp_path)
        assert done.returncode == 0, done.stderr
        index = TokenFile.open(text.with_suffix(".bin")).index
        assert index.words == words
        peak_mib, seconds = map(float, done.stdout.split())
        size = text.stat().st_size / 1e6
        print(f"{words} words, {size:.0f} MB: at most {peak_mib:.0f} MiB, {words / seconds:.0f} words/s")
        peaks.append(peak_mib)
    assert peaks[1] - peaks[0] < 32
    assert peaks[1] < 200


INDEX = TokenIndex(FORMAT, "uint16", 5, 2, 1, "-", "BPE-9-x", "x", 9, "text", 12, "-", 0)


def made(path, dtype="uint16"):
    np.array([1, 2, 3, 2**16 - 1, 4], np.dtype(dtype).newbyteorder("<")).tofile(path)
    path.with_suffix(".json").write_text(json.dumps(asdict(replace(INDEX, dtype=dtype))))
    return path


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 2), ("uint32", 4)])
def test_file_holds_little_endian_tokens(tmp_path, dtype, size):
    file = TokenFile.open(made(tmp_path / "a.bin", dtype))
    assert file.read().tolist() == [1, 2, 3, 65535, 4]
    assert file.path.read_bytes() == b"".join(n.to_bytes(size, "little") for n in (1, 2, 3, 65535, 4))


def test_vocabulary_decides_the_type():
    assert smallest_dtype(65536) == "uint16"
    assert smallest_dtype(65537) == "uint32"


def test_cut_short_file_is_refused_with_both_sizes(tmp_path):
    path = made(tmp_path / "a.bin")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"a\.bin has 7 bytes, its index says 10: .* delete it and a\.json"):
        TokenFile.open(path)
    path.unlink()
    with pytest.raises(UserError, match=r"a\.bin has 0 bytes, its index says 10"):
        TokenFile.open(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no index"),
        ("{", r"a\.json is not JSON \(Expecting .*: if it is a copy, copy it again; else delete it and a\.json"),
        ("[]", "has format None, this version reads 1"),
        (json.dumps(asdict(INDEX) | {"format": 2}), "has format 2, this version reads 1"),
        (json.dumps({"format": FORMAT, "tokens": 5}), "is not the index of a token file"),
    ],
)
def test_unusable_index_is_refused(tmp_path, content, message):
    path = made(tmp_path / "a.bin")
    index = tmp_path / "a.json"
    index.unlink() if content is None else index.write_text(content)
    with pytest.raises(UserError, match=message):
        TokenFile.open(path)


def test_token_file_is_named_by_text_and_tokenizer(tmp_path, monkeypatch):
    text = tmp_path / "wiki.train.raw"
    text.write_text("12345")
    name = "wiki.train.raw-5-abcdefab.bin"
    assert token_path(text, "abcdefabc", None) == tmp_path / name
    other = tmp_path / "valid" / "wiki.train.raw"  # another text of the same name and size
    other.parent.mkdir()
    other.write_text("54321")
    cached, others = (token_path(one, "abcdefabc", "/cache") for one in (text, other))
    assert (cached.parent, cached.name[:24], cached.suffix) == (Path("/cache"), "wiki.train.raw-5-abcdefa", ".bin")
    assert cached != others
    assert token_path(tmp_path / "made.bin", "", "/cache") == tmp_path / "made.bin"
    monkeypatch.setenv("DDLBENCH_HOME", "/home")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere, so permissions cannot be set
    assert token_path(text, "abcdefabc", None) == Path("/home/tokens") / cached.name
    (tmp_path / name).touch()  # an administrator's, in a folder that users only read
    assert token_path(text, "abcdefabc", None) == tmp_path / name
