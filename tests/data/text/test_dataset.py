"""Text is found by its names. Token files are made once, made anew where they are stale, and refused where they do not
belong together."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ddlbench.data.text.dataset import TokenText
from ddlbench.data.text.sample import train_bpe
from ddlbench.data.text.token_file import TokenFile
from ddlbench.errors import UserError
from tests.support.text import TEXT, model, tokens_of


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
    target.unlink()
    target.with_suffix(".json").unlink()
    text.prepare()
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
    index.write_text(
        index.read_text().replace(TokenFile.open(index.with_suffix(".bin")).index.tokenizer_hash, "ab" * 32)
    )
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
    (Path(made.root) / "train.json").unlink()
    with pytest.raises(UserError, match=r"train\.bin has no index"):
        made.check(model(4))


def test_token_file_that_another_node_made_is_missed(root):
    with pytest.raises(
        UserError, match=r"no token file .*wiki\.train\.raw-39-\w+\.bin of .* on this node: .*cache_dir="
    ):
        TokenText("text", root=str(root)).split(True, model(4), 0)


def test_place_that_cannot_be_written_is_refused(root):
    (root / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make token file .*: choose data\.cache_dir=FOLDER"):
        TokenText("text", root=str(root), cache_dir=str(root / "file")).prepare()


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
