"""The token file: written whole or not at all, opened with its size checked; its name and place."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from ddlbench.data.text.token_file import FORMAT, TokenFile, TokenIndex, is_made, smallest_dtype, token_path
from ddlbench.errors import UserError

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
    assert token_path(text, "abcdefabc", "/cache") == Path("/cache") / name
    assert token_path(tmp_path / "made.bin", "", "/cache") == tmp_path / "made.bin"
    monkeypatch.setenv("DDLBENCH_HOME", "/home")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere, so permissions cannot be set
    assert token_path(text, "abcdefabc", None) == Path("/home/tokens") / name
    (tmp_path / name).touch()  # an administrator's, in a folder that users only read
    assert token_path(text, "abcdefabc", None) == tmp_path / name


def test_token_file_without_index_is_not_made(tmp_path):
    (tmp_path / "text").touch()
    assert not is_made(tmp_path / "text", tmp_path / "a.bin")
    (tmp_path / "a.json").touch()
    assert is_made(tmp_path / "text", tmp_path / "a.bin")
    assert is_made(tmp_path / "b.bin", tmp_path / "b.bin")
