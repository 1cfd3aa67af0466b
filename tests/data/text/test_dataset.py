"""Text is found by its names. Token files are made once, made anew where they are stale, and refused where they do not
belong together. Windows over a text: which tokens are inputs, which are scored, and what does not fit together."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ddlbench.data.loaders.replica_feed import validation_batches
from ddlbench.data.samples import train_bpe
from ddlbench.data.text.dataset import TokenText
from ddlbench.data.text.token_file import TokenFile
from ddlbench.errors import UserError
from tests.support.text import TEXT, model, tokens_of, write_text


@pytest.fixture
def root(tmp_path):
    """A short text in a folder."""
    write_text(tmp_path)
    return tmp_path


@pytest.fixture
def text(root):
    """The text, tokenized."""
    text = TokenText("text", root=str(root))
    text.prepare()
    return text


def test_text_is_tokenized_once_and_again_only_if_it_changed(root, text):
    target = text.paths()[True][1]
    before = target.stat().st_mtime_ns, target.stat().st_ino
    os.utime(root / "wiki.train.raw")  # touched, not changed
    text.prepare()
    assert (target.stat().st_mtime_ns, target.stat().st_ino) == before
    (root / "wiki.train.raw").write_text(TEXT.replace("one", "two"))  # of the same size
    text.prepare()
    assert target.stat().st_ino != before[1]
    core = text.tokenizer_files().load().core
    assert core.decode(tokens_of(text, True).tolist()).startswith("two two three")


def test_cut_short_token_file_is_refused_before_the_start(text):
    target = text.paths()[False][1]
    target.write_bytes(target.read_bytes()[:10])
    with pytest.raises(UserError, match=rf"{target.name} has 10 bytes, its index says 24"):
        text.check(model(4))


def test_token_file_of_an_interrupted_maker_is_completed(text):
    text.paths()[True][1].with_suffix(".json").unlink()
    text.check(model(4))
    text.prepare()
    assert text.describe()["train_tokens"] == 39


@pytest.fixture
def made(text, root, tmp_path_factory):
    """A folder with the two token files alone."""
    folder = tmp_path_factory.mktemp("made")
    for name, train in (("train", True), ("valid", False)):
        for suffix in (".bin", ".json"):
            shutil.copyfile(text.paths()[train][1].with_suffix(suffix), folder / f"{name}{suffix}")
    return TokenText("made", root=str(folder), train="train.bin", valid="valid.bin")


def test_token_files_made_before_are_opened_as_they_are(text, root, made):
    made.check(model(4))
    made.prepare()
    assert made.describe() == text.describe() | {"name": "made"}
    replace(made, tokenizer=str(root)).check(model(4))


def test_token_file_of_another_tokenizer_is_refused(made, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    train_bpe(TEXT * 2, 260, other)
    with pytest.raises(UserError, match=rf"train\.bin was made with tokenizer BPE-256-\w+, .*is {other}/vocab\.json"):
        replace(made, tokenizer=str(other)).check(model(4))


def test_token_files_of_two_tokenizers_are_refused(made):
    index = Path(made.root) / "valid.json"
    old = TokenFile.open(index.with_suffix(".bin")).index.tokenizer_hash
    index.write_text(index.read_text().replace(old, "ab" * 32))
    with pytest.raises(UserError, match=r"valid\.bin was made with .*train\.bin with BPE-256-"):
        made.check(model(4))


def test_missing_pieces_are_refused(root, made):
    with pytest.raises(UserError, match=r"data\.root is not set"):
        TokenText("text").check(model(4))
    with pytest.raises(UserError, match=r"data\.train=a and data\.valid=None: give both"):
        TokenText("text", train="a")
    (root / "merges.txt").unlink()
    with pytest.raises(UserError, match=f"no tokenizer in {root}: put GPT-2's vocab.json and merges.txt there"):
        TokenText("text", root=str(root)).check(model(4))
    with pytest.raises(UserError, match="no tokenizer in /nowhere"):
        replace(made, tokenizer="/nowhere").check(model(4))


def test_token_file_that_another_node_made_is_missed(root):
    with pytest.raises(UserError, match=r"no token file .*train\.raw-39-\w+\.bin of .* on this node: .*cache_dir="):
        TokenText("text", root=str(root)).split(True, model(4), 0)


def test_token_file_that_rank_0_has_made_since_the_check_is_seen_over_nfs(root, monkeypatch):
    """A client of NFS remembers which names were missing, until their folder is opened again."""
    missing, exists, scandir = set[Path](), Path.exists, os.scandir

    def remembered(path):
        if path not in missing and not exists(path):
            missing.add(path)
        return path not in missing

    def opened(folder):
        missing.difference_update([path for path in missing if path.parent == folder])
        return scandir(folder)

    text = TokenText("text", root=str(root))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", remembered)
        patch.setattr(os, "scandir", opened)
        text.check(model(4))  # every rank
        with monkeypatch.context() as rank_0:
            rank_0.setattr(Path, "exists", exists)
            TokenText("text", root=str(root)).prepare()
        assert len(text.split(True, model(4), 0)) > 0


def fill(folder, *names):
    for name in names:
        (folder / name).write_text(name)


def test_first_complete_pair_counts(tmp_path):
    fill(tmp_path, "wiki.train.raw", "wiki.train.tokens", "wiki.valid.tokens", "train.txt", "valid.txt", "a", "b")
    names = [path.name for path in TokenText("text", str(tmp_path)).texts()]
    assert names == ["wiki.train.tokens", "wiki.valid.tokens"]
    assert [path.name for path in TokenText("text", str(tmp_path), train="a", valid="b").texts()] == ["a", "b"]


def test_missing_text_is_refused_with_the_expected_layout(tmp_path):
    layout = r"wiki\.train\.raw and wiki\.valid\.raw; or .* or train\.txt and valid\.txt"
    with pytest.raises(UserError, match=f"give data.root=FOLDER, a folder that holds {layout}"):
        TokenText("text", None).texts()
    with pytest.raises(UserError, match=f"{tmp_path}/no is not a folder: it must hold {layout}"):
        TokenText("text", f"{tmp_path}/no").texts()
    with pytest.raises(UserError, match=f"holds nothing: it must hold {layout}"):
        TokenText("text", str(tmp_path)).texts()
    fill(tmp_path, "wiki.train.raw")
    with pytest.raises(UserError, match=r"holds wiki\.train\.raw: it must hold a and b"):
        TokenText("text", str(tmp_path), train="a", valid="b").texts()


def all_of(split, epoch=0):
    return split.__getitems__([(epoch, index) for index in range(len(split))])


def test_training_windows_are_whole_and_shifted_by_one(text):
    tokens = tokens_of(text, True)
    split = text.split(True, model(5), seed=0)
    assert len(split) == 7  # (39 - 1) // 5: targets need one more token than inputs
    fetched = split.__getitems__([(0, 6), (3, 0)])
    assert fetched.inputs.dtype == fetched.targets.dtype == torch.int64
    assert fetched.inputs.tolist() == [tokens[30:35].tolist(), tokens[0:5].tolist()]
    assert fetched.targets.tolist() == [tokens[31:36].tolist(), tokens[1:6].tolist()]
    assert fetched.valid.tolist() == [True, True]
    assert fetched.bad == ()
    assert fetched.inputs.is_contiguous()
    assert fetched.targets.is_contiguous()


def test_last_validation_window_is_filled_up_and_not_scored(text):
    tokens = tokens_of(text, False)
    split = text.split(False, model(4), seed=0)
    fetched = all_of(split)
    assert len(split) == 3
    assert fetched.inputs.flatten().tolist() == tokens.tolist()
    assert fetched.targets.flatten().tolist() == [*tokens[1:].tolist(), -100]
    short = all_of(text.split(False, model(9), 0))
    assert short.inputs[1].tolist() == [*tokens[9:].tolist(), *[tokens[-1]] * 6]
    assert short.targets[1].tolist() == [*tokens[10:].tolist(), *[-100] * 7]
    assert short.valid.tolist() == [True, True]


@pytest.mark.parametrize("data_size", [1, 2, 3])
@pytest.mark.parametrize("seq_len", [1, 2, 4, 5, 11, 64])
def test_every_validation_token_is_scored_once_over_all_replicas(text, data_size, seq_len):
    """Reference: the pairs (token, next token) of the text, straight from the file."""
    tokens = tokens_of(text, False).tolist()
    split = text.split(False, model(seq_len), seed=0)
    scored = []
    for rank in range(data_size):
        for batch in validation_batches(len(split), 2, rank, data_size):
            fetched = split.__getitems__([(0, int(index)) for index in batch])
            kept = fetched.targets != -100
            scored += zip(fetched.inputs[kept].tolist(), fetched.targets[kept].tolist(), strict=True)
    assert sorted(scored) == sorted(pairwise(tokens))
    assert len(scored) == 11


def test_limit_takes_the_first_windows(root, text):
    limited = TokenText("text", root=str(root), val_limit=2)
    whole = all_of(text.split(False, model(4), 0))
    assert all_of(limited.split(False, model(4), 0)).targets.tolist() == whole.targets[:2].tolist()
    assert len(limited.split(True, model(4), 0)) == len(text.split(True, model(4), 0))
    assert limited.describe()["val_words"] is None
    assert limited.describe()["val_tokens"] is None
    assert len(replace(limited, val_limit=9).split(False, model(4), 0)) == 3
    with pytest.raises(UserError, match=r"data\.val_limit=0 must be greater than 0"):
        TokenText("text", val_limit=0)


def test_a_token_beyond_the_vocabulary_of_its_index_is_named(text):
    split = text.split(True, model(5), seed=0)
    words = split.file.index.vocab_size
    changed = split.file.read().copy()
    changed[12] = words
    split.__dict__["tokens"] = changed
    with pytest.raises(UserError, match=rf"has token {words}, its index says {words} words: check it with .* verify"):
        all_of(split)


def test_index_outside_the_split_is_a_programming_error(text):
    for index in (-1, 7):
        with pytest.raises(AssertionError, match=r"window outside \[0, 7\)"):
            text.split(True, model(5), 0).__getitems__([(0, index)])


def test_description(text):
    described = text.describe()
    hashes = [TokenFile.open(text.paths()[train][1]).index.sha256 for train in (True, False)]
    tokenizer = text.tokenizer_files().hash()
    assert described == {
        "name": "text", "kind": "text", "hash": sha256(" ".join([*hashes, tokenizer]).encode()).hexdigest(),
        "train_tokens": 39, "train_words": 9, "train_lines": 3, "val_tokens": 12, "val_words": 5, "val_lines": 3,
        "tokenizer": f"BPE-256-{tokenizer[:8]}", "vocab_size": 256,
    }  # fmt: skip


def test_hash_is_of_the_content_alone(root, text, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name in ("wiki.train.raw", "wiki.valid.raw", "vocab.json", "merges.txt"):
        shutil.copyfile(root / name, other / name)
    copied = TokenText("text", root=str(other), cache_dir=str(other / "deep" / "cache"))
    copied.prepare()
    made = sorted(path.suffix for path in (other / "deep" / "cache").iterdir())
    assert made == [".bin", ".bin", ".json", ".json", ".lines", ".lines"]
    assert copied.describe() == text.describe()
    (other / "wiki.valid.raw").write_text("a b\n\nc de .\n")
    copied.prepare()
    assert copied.describe()["hash"] != text.describe()["hash"]


def test_larger_vocabulary_than_the_models_is_refused_even_before_tokenizing(root):
    text = TokenText("text", root=str(root))
    with pytest.raises(UserError, match=r"BPE-256-\w+ has a vocabulary of 256, the model's is 255: .*vocab_size=256"):
        text.check(model(4, vocab_size=255))
    text.check(model(4, vocab_size=256))
    assert not list(root.glob("*.bin"))


def test_a_text_that_just_fits_is_taken_and_a_shorter_one_refused(root, text):
    assert len(text.split(True, model(38), 0)) == 1
    assert len(text.split(True, model(19), 0)) == 2
    with pytest.raises(UserError, match=r"has 39 tokens, model\.seq_len=39 needs 40"):
        text.check(model(39))
    assert len(text.split(False, model(39), 0)) == 1  # validation fills its window up
    (root / "wiki.valid.raw").write_text("a")
    text.prepare()
    with pytest.raises(UserError, match="has 1 tokens, validation needs 2: give a longer text"):
        text.check(model(4))
