"""Finding text, and where token files go."""

from __future__ import annotations

import os

import pytest

from ddlbench.data.foreign_data import sha256_of
from ddlbench.data.text import files as textfiles
from ddlbench.data.text.files import find_texts, is_made, token_path
from ddlbench.errors import UserError


def fill(folder, *names):
    for name in names:
        (folder / name).write_text(name)


def test_first_complete_pair_counts(tmp_path):
    fill(tmp_path, "wiki.train.raw", "wiki.train.tokens", "wiki.valid.tokens", "train.txt", "valid.txt", "a", "b")
    names = [path.name for path in find_texts(str(tmp_path), None, None)]
    assert names == ["wiki.train.tokens", "wiki.valid.tokens"]
    assert [path.name for path in find_texts(str(tmp_path), "a", "b")] == ["a", "b"]


def test_missing_text_is_refused_with_the_expected_layout(tmp_path):
    layout = r"wiki\.train\.raw and wiki\.valid\.raw; or .* or train\.txt and valid\.txt"
    with pytest.raises(UserError, match=f"give data.root=FOLDER, a folder that holds {layout}"):
        find_texts(None, None, None)
    with pytest.raises(UserError, match=f"{tmp_path}/no is not a folder: it must hold {layout}"):
        find_texts(f"{tmp_path}/no", None, None)
    with pytest.raises(UserError, match=f"holds nothing: it must hold {layout}"):
        find_texts(str(tmp_path), None, None)
    fill(tmp_path, "wiki.train.raw")
    with pytest.raises(UserError, match=r"holds wiki\.train\.raw: it must hold a and b"):
        find_texts(str(tmp_path), "a", "b")


def test_token_file_is_named_by_text_and_tokenizer(tmp_path, monkeypatch):
    text = tmp_path / "wiki.train.raw"
    text.write_text("12345")
    name = "wiki.train.raw-5-abcdefab.bin"
    assert token_path(text, "abcdefabc", None) == tmp_path / name
    assert token_path(text, "abcdefabc", "/cache") == textfiles.Path("/cache") / name
    assert token_path(tmp_path / "made.bin", "", "/cache") == tmp_path / "made.bin"
    monkeypatch.setenv("DDLBENCH_HOME", "/home")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere, so permissions cannot be set
    assert token_path(text, "abcdefabc", None) == textfiles.Path("/home/tokens") / name
    fill(tmp_path, name)  # an administrator's, in a folder that users only read
    assert token_path(text, "abcdefabc", None) == tmp_path / name


def test_token_file_without_index_is_not_made(tmp_path):
    fill(tmp_path, "text", "a.bin")
    assert not is_made(tmp_path / "text", tmp_path / "a.bin")
    fill(tmp_path, "a.json")
    assert is_made(tmp_path / "text", tmp_path / "a.bin")
    assert is_made(tmp_path / "b.bin", tmp_path / "b.bin")


def test_sha256_of_a_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    assert sha256_of(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
