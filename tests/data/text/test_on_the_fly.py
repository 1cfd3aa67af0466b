"""Text tokenized while it is read: the samples of the token file, bit for bit, from the raw text alone."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from ddlbench.data.feed import Request
from ddlbench.data.loaders.native import Native
from ddlbench.data.samples import train_bpe
from ddlbench.data.text.dataset import TokenText
from ddlbench.data.text.token_file import THREADS, TextTokenizer
from ddlbench.errors import UserError
from ddlbench.job import Place
from tests.support.disk import largest_file
from tests.support.pictures import empty
from tests.support.ranks import Forked
from tests.support.text import every_window, model
from tests.support.waiting import WITHIN_S

PIECES = [
    "the ", "and", " ", "\t", "\r", "\r\n", "\x85", "\u2028", "na\u00efve", "\u65e5\u672c", "\U0001f600", "\x00", "7",
]  # fmt: skip
SEQ_LENS = (1, 2, 3, 5, 8, 13, 21, 40)
PROSE = "the and the naïve band stood there, 1 @.@ 5 m off;\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(PROSE * 9, 290, folder)
    return folder


def text_folder(folder, train, valid=PROSE):
    folder.mkdir(exist_ok=True)
    (folder / "train.txt").write_bytes(train.encode())
    (folder / "valid.txt").write_bytes(valid.encode())
    return folder


def written(folder, tokenizer, train, valid=PROSE):
    """The text in a folder, tokenized ahead and, from the same files, on the fly."""
    ahead = TokenText("text", root=str(text_folder(folder, train, valid)), tokenizer=str(tokenizer))
    fly = replace(ahead, tokenize="on_the_fly")
    fly.prepare()
    return ahead, fly


def same(ahead, fly, seq_lens, trains=(True, False)):
    for seq_len in seq_lens:
        for train in trains:
            for expected, got in zip(*(every_window(text, train, seq_len) for text in (ahead, fly)), strict=True):
                assert got.dtype == expected.dtype
                assert torch.equal(got, expected)


def odd_line(draw):
    """Mostly short, often empty, now and then longer than any window."""
    length = draw.choice([0, 0, 1, 3, 10, 200])
    return "".join(draw.choice(PIECES) for _ in range(length))


@pytest.mark.parametrize("seed", range(6))
def test_random_texts_give_the_same_windows(tmp_path, tokenizer, seed):
    draw = random.Random(seed)
    train, valid = ("\n".join(odd_line(draw) for _ in range(draw.randint(1, 20))) + "the end" * 9 for _ in range(2))
    ahead, fly = written(tmp_path, tokenizer, train + "\n" * draw.randint(0, 3), valid)
    same(ahead, fly, SEQ_LENS)
    assert fly.describe() == ahead.describe()


@pytest.mark.parametrize(
    "train",
    [PROSE * 3, "one single line " * 40, "\n" * 60, "\n\n\nlast line without its end" * 2, "x" * 500 + "\n" + "y" * 5],
    ids=["prose", "one line", "empty lines", "no last end", "long lines"],
)
def test_odd_texts_give_the_same_windows(tmp_path, tokenizer, train):
    same(*written(tmp_path, tokenizer, train), SEQ_LENS)


def test_lines_without_a_token_are_stepped_over(tmp_path):
    """As a tokenizer has them that strips white space."""
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    core.normalizer = normalizers.Strip()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.save(str(tmp_path / "tokenizer.json"))
    ahead, fly = written(tmp_path, tmp_path / "tokenizer.json", "\n\na b\n\n \nb\n\nc a a\n\n", "\n\nb a\n\n")
    assert ahead.describe()["train_tokens"] == 6
    same(ahead, fly, range(1, 6))


def batches(text, rank, size, workers):
    request = Request(model(7), Place(rank, size), torch.device("cpu"), seed=3, replica_batch=2)
    feed = Native("native", workers=workers).open(text, request)
    try:
        return [batch for epoch in (0, 1) for batch in feed.train(epoch)] + list(feed.validation())
    finally:
        feed.close()


def test_workers_of_a_rank_change_no_bit(tmp_path, tokenizer):
    ahead, fly = written(tmp_path, tokenizer, PROSE * 12 + "\n\n" + "and " * 60, PROSE * 3)
    expected, got = batches(ahead, 1, 2, workers=0), batches(fly, 1, 2, workers=2)
    assert len(got) == len(expected) > 2
    for mine, theirs in zip(got, expected, strict=True):
        for part in ("inputs", "targets", "valid"):
            assert torch.equal(getattr(mine, part), getattr(theirs, part))


def test_raw_text_is_read_and_the_token_file_is_not(tmp_path, tokenizer):
    ahead, fly = written(tmp_path, tokenizer, PROSE * 3)
    expected = every_window(ahead, True, 9)[0]
    for path in tmp_path.glob("*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    assert not every_window(ahead, True, 9)[0].any()
    assert torch.equal(every_window(fly, True, 9)[0], expected)


def test_no_line_is_tokenized_that_holds_none_of_the_window(tmp_path, tokenizer, monkeypatch):
    """Lines of four tokens: tokenizing on the fly must not do needless work."""
    _, fly = written(tmp_path, tokenizer, "1 2\n3 4\n5 6\n7 8\n")
    seen, encode = [], TextTokenizer.encode
    monkeypatch.setattr(TextTokenizer, "encode", lambda self, lines: seen.append(lines) or encode(self, lines))
    split = fly.split(True, model(3), 0)  # windows of 3 inputs and the target behind them
    split.__getitems__([(0, 0), (0, 1), (0, 4)])
    assert seen == [["1 2\n"], ["1 2\n", "3 4\n"], ["7 8\n"]]


def test_table_holds_bytes_and_tokens_before_each_line(tmp_path, tokenizer):
    _, fly = written(tmp_path, tokenizer, "\u00e9\n\nno end")
    split = fly.split(True, model(2), 0)
    assert split.raw is not None
    table = np.fromfile(split.file.path.with_suffix(".lines"), "<i8").reshape(-1, 2)
    assert table[:, 0].tolist() == [0, 3, 4, 10]
    counts = [len(fly.tokenizer_files().load().encode([line])[0]) for line in ("\u00e9\n", "\n", "no end")]
    assert table[:, 1].tolist() == [0, *np.cumsum(counts)]


def test_split_travels_without_text_tokenizer_and_table(tmp_path, tokenizer):
    for text in written(tmp_path, tokenizer, PROSE * 300):
        split = text.split(True, model(9), 0)
        expected = split.__getitems__([(0, 5)]).inputs
        sent = pickle.dumps(split)
        assert len(sent) < 3000
        assert torch.equal(pickle.loads(sent).__getitems__([(0, 5)]).inputs, expected)


@pytest.mark.parametrize("spoil", ["missing", "cut short", "of another text"])
def test_table_of_another_text_is_made_again(tmp_path, tokenizer, spoil):
    ahead, fly = written(tmp_path / "a", tokenizer, PROSE * 3)
    (table,) = (tmp_path / "a").glob("train*.lines")
    content = table.read_bytes()
    if spoil == "missing":
        table.unlink()
    elif spoil == "cut short":
        table.write_bytes(content[:-7])
    else:
        written(tmp_path / "b", tokenizer, PROSE * 2 + PROSE.replace("the", "777"))
        shutil.copyfile(next((tmp_path / "b").glob("train*.lines")), table)
    ahead.prepare()
    assert not table.is_file() or table.read_bytes() != content  # a run that does not need the table does not make it
    with pytest.raises(UserError, match=r"there is no table .*train\.txt-\d+-\w+\.lines of the lines of .*cache_dir="):
        every_window(fly, True, 9)
    fly.check(model(9))
    fly.prepare()
    assert table.read_bytes() == content
    same(ahead, fly, [9])


def test_text_that_changes_is_tokenized_and_measured_again(tmp_path, tokenizer):
    ahead, fly = written(tmp_path, tokenizer, PROSE * 3)
    split = fly.split(True, model(9), 0)
    before = every_window(fly, True, 9)[0]
    (tmp_path / "train.txt").write_bytes((PROSE * 3).replace("the", "x\ny").encode())  # as many bytes
    with pytest.raises(UserError, match=r"train\.txt has \d+ tokens in bytes 0 to 52, it had \d+: .* restart"):
        split.__getitems__([(0, 0)])
    fly.prepare()
    assert not torch.equal(every_window(fly, True, 5)[0][: len(before)], before)
    same(ahead, fly, range(1, 12))


def not_utf8(text):
    text.write_bytes(b"\xff" * text.stat().st_size)


@pytest.mark.parametrize(
    ("spoil", "workers", "message"),
    [
        (not_utf8, 2, r"train\.txt has 0 tokens in bytes \d+ to \d+, it had \d+"),
        (empty, 0, r"train\.txt has 0 tokens in bytes \d+ to \d+, it had \d+"),
        (Path.unlink, 0, r"cannot read .*train\.txt \(No such file or directory\): check whether it was moved"),
    ],
)
def test_text_that_is_damaged_during_the_run_is_one_line(tmp_path, tokenizer, spoil, workers, message):
    _, fly = written(tmp_path, tokenizer, PROSE * 3)
    request = Request(model(7), Place(0, 1), torch.device("cpu"), seed=0, replica_batch=2)
    feed = Native("native", workers=workers).open(fly, request)
    spoil(tmp_path / "train.txt")
    with pytest.raises(UserError, match=message) as error:
        list(feed.train(0))
    assert "\n" not in str(error.value)
    feed.close()


@pytest.mark.parametrize("train", [PROSE * 400, "\n" * 2000], ids=["token file", "table of lines"])
def test_full_disk_leaves_nothing_that_looks_whole(tmp_path, tokenizer, train):
    """One text has more tokens than the disk holds, the other a larger table than tokens."""
    text = TokenText("text", root=str(text_folder(tmp_path, train)), tokenizer=str(tokenizer))
    with largest_file(10_000), pytest.raises(UserError, match=r"cannot make token file .*File too large.*cache_dir="):
        text.prepare()
    assert not list(tmp_path.glob("*.json"))
    assert not list(tmp_path.glob("*.lines"))
    assert not list(tmp_path.glob(".*"))
    same(*written(tmp_path, tokenizer, train), [40])


def test_what_does_not_go_together_is_refused():
    with pytest.raises(UserError, match=r"train\.bin is a token file: choose data\.tokenize=ahead, or give"):
        TokenText("text", train="train.bin", valid="valid.txt", tokenize="on_the_fly")
    with pytest.raises(UserError, match=r"data\.tokenize=never must be one of ahead, on_the_fly"):
        TokenText("text", tokenize="never")


def threads():
    return len([*Path("/proc/self/task").iterdir()])


def read_without_threads(text):
    """A rank and the process of a worker start none. The exit code of the worker is its number of threads."""
    before = threads()
    if not (worker := os.fork()):
        every_window(text, True, 4)
        os._exit(threads())
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 1
    every_window(text, True, 4)
    assert threads() == before


def tokenizing_rank(text):
    """A rank that found the token file, and one that made it on all threads."""
    read_without_threads(text)
    text.paths()[True][1].with_suffix(".json").unlink()
    text.prepare()
    read_without_threads(text)
    return 0


def test_one_thread_tokenizes_without_a_warning(tmp_path, tokenizer, monkeypatch):
    _, fly = written(tmp_path, tokenizer, PROSE * 9)
    monkeypatch.delenv(THREADS)
    rank = Forked(tokenizing_rank, fly)
    assert rank.communicate(timeout=WITHIN_S) == ("", "")
    assert rank.poll() == 0
