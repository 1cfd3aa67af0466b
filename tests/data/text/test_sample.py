"""The sample text: real, the same every time, with validation text that was not trained on."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddlbench.data.text.sample import SampleText, split_paragraphs, topics, train_bpe
from ddlbench.errors import UserError
from ddlbench.models.gpt2 import GPT2

MODEL = GPT2("gpt2", n_layer=1, n_embd=4, n_head=1, vocab_size=512, seq_len=64)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    text = SampleText("sample_text", root=str(tmp_path_factory.mktemp("sample")), vocab_size=512)
    text.check(MODEL)
    text.prepare()
    return text


def test_set_is_complete_and_of_this_python(made):
    assert made.folder().name == "sample_text-v1-py{}.{}.{}-bpe512".format(*sys.version_info[:3])
    assert [path.name for path in Path(made.root).iterdir()] == [made.folder().name]
    made.check(MODEL)
    described = made.describe()
    assert described["vocab_size"] == 512
    assert described["train_tokens"] > 9 * described["val_tokens"] / 2 > 0
    assert described["val_words"] == len((made.folder() / "valid.txt").read_text().split())


def test_tokens_decode_to_the_text(made):
    from tokenizers import Tokenizer, decoders, models

    files = [str(made.folder() / name) for name in ("vocab.json", "merges.txt")]
    core = Tokenizer(models.BPE.from_file(*files))
    core.decoder = decoders.ByteLevel()
    split = made.split(True, MODEL, seed=0)
    text = (made.folder() / "train.txt").read_text()
    assert core.decode(split.tokens.tolist()) == text
    assert "assert" in text


def test_making_it_again_gives_the_same(made, tmp_path):
    again = SampleText("sample_text", root=str(tmp_path), vocab_size=512)
    again.prepare()
    assert again.describe() == made.describe()
    for name in ("train.txt", "valid.txt", "vocab.json", "merges.txt"):
        assert (again.folder() / name).read_bytes() == (made.folder() / name).read_bytes()


def test_node_of_its_own_makes_what_it_needs(made, tmp_path):
    assert SampleText("sample_text", root=str(tmp_path), vocab_size=512).describe() == made.describe()


def test_makers_at_once_are_harmless(made, tmp_path):
    text = SampleText("sample_text", root=str(tmp_path), vocab_size=512)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: text.prepare(), range(3)))
    assert text.describe() == made.describe()
    assert [path.name for path in tmp_path.iterdir()] == [text.folder().name]


def test_paragraphs_are_kept_once_and_the_last_tenth_validates():
    prose = {"b": "\n\n".join(f"b{i}" for i in range(10)), "a": "\n\n".join(f"a{i}" for i in range(10)) + "\n\n\n\n"}
    prose["c"] = "a3\n\nb9\n\nb9"
    train, valid = split_paragraphs(prose)
    assert train == "\n\n".join([f"a{i}" for i in range(10)] + [f"b{i}" for i in range(8)]) + "\n"
    assert valid == "b8\n\nb9\n"


def test_validation_paragraphs_were_not_trained_on():
    train, valid = (set(text.strip().split("\n\n")) for text in split_paragraphs(topics()))
    assert len(valid) > 100
    assert not train & valid


def test_training_a_tokenizer_is_reproducible_and_complete(tmp_path):
    train, _ = split_paragraphs(topics())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        train_bpe(train[:50_000], 400, tmp_path / name)
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert len((tmp_path / "a" / "merges.txt").read_text().splitlines()) == 1 + 400 - 256


def test_place_is_the_programs_own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DDLBENCH_HOME", str(tmp_path))
    assert SampleText("sample_text").folder().parent == tmp_path


def test_vocabularies_that_do_not_fit_are_refused(tmp_path):
    text = SampleText("sample_text", root=str(tmp_path), vocab_size=513)
    with pytest.raises(UserError, match=r"data\.vocab_size=513 is more than the model's 512: .*model\.vocab_size=513"):
        text.check(MODEL)
    with pytest.raises(UserError, match=r"data\.vocab_size=255 must be 256 or more"):
        SampleText("sample_text", vocab_size=255)
    with pytest.raises(UserError, match=r"data\.val_limit=0"):
        SampleText("sample_text", val_limit=0)


def test_deleted_token_file_is_made_again(made, tmp_path):
    text = SampleText("sample_text", root=str(tmp_path), vocab_size=300)
    text.prepare()
    before = text.describe()
    for path in text.folder().glob("valid*.[bj]*"):
        path.unlink()
    text.check(MODEL)
    text.prepare()
    assert text.describe() == before


def test_python_without_its_help_texts_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)
    with pytest.raises(UserError, match=r"has no module pydoc_data.*: use another Python, or text of your own"):
        SampleText("sample_text", root=str(tmp_path), vocab_size=512).check(MODEL)


def test_a_root_that_is_a_file_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data.root=.*/file is not a folder"):
        SampleText("sample_text", root=str(tmp_path / "file"))
