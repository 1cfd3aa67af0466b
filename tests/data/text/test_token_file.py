"""The token file: written whole or not at all, opened with its size checked."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from hashlib import sha256

import numpy as np
import pytest

from ddlbench.data.text.token_file import FORMAT, TokenFile, TokenIndex, smallest_dtype, write_index, write_tokens
from ddlbench.errors import UserError
from ddlbench.files import replacing

INDEX = TokenIndex(FORMAT, "uint16", 5, 2, 1, "-", "BPE-9-x", "x", 9, "text", 12, "-", 0)


def made(path, dtype="uint16"):
    tokens, digest = write_tokens(path, [np.array([1, 2]), np.array([3, 2**16 - 1, 4])], dtype)
    write_index(path, replace(INDEX, tokens=tokens, sha256=digest, dtype=dtype))
    return path


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 2), ("uint32", 4)])
def test_file_holds_the_chunks_one_after_another(tmp_path, dtype, size):
    file = TokenFile.open(made(tmp_path / "a.bin", dtype))
    assert file.read().tolist() == [1, 2, 3, 65535, 4]
    assert file.path.stat().st_size == 5 * size
    assert file.index.sha256 == sha256(b"".join(n.to_bytes(size, "little") for n in (1, 2, 3, 65535, 4))).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.json"]


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


def test_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")

    def write():
        with replacing(target) as file:
            file.write(b"half of the n")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.bin", b"old")]
