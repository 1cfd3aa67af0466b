"""The data sets that the program makes itself: whole or absent, the same every time; validation text that was not
trained on."""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from ddlbench.data import samples
from ddlbench.data.samples import CLASSES, SampleImages, SampleText, split_paragraphs, topics
from ddlbench.errors import UserError
from ddlbench.models.gpt2 import GPT2
from tests.support.pictures import Shape

MODEL = GPT2("gpt2", n_layer=1, n_embd=4, n_head=1, vocab_size=512, seq_len=64)


def images(root, train=20, val=10, **fields):
    return SampleImages("sample_images", root=str(root), sample_train=train, sample_val=val, **fields)


@pytest.fixture(scope="module")
def made_images(tmp_path_factory):
    data = images(tmp_path_factory.mktemp("sample") / "new")
    data.check(Shape())
    data.prepare()
    return data


def test_set_of_images_is_complete(made_images):
    folder = made_images.layout().root
    assert [path.name for path in folder.parent.iterdir()] == ["sample_images-v1-20-10"]
    described = made_images.describe()
    assert (described["train_samples"], described["val_samples"], described["classes"]) == (20, 10, 10)
    assert sorted(path.name for path in (folder / "train").iterdir()) == list(CLASSES)
    names = [path.name for path in sorted((folder / "train/cross").iterdir())]
    assert names == ["cross_00002.JPEG", "cross_00012.JPEG"]
    made_images.check(Shape())


def test_files_are_pinned(made_images):
    """Bytes may differ only where Pillow comes with another JPEG library; the hash in the record shows it then."""
    digest = hashlib.sha256()
    for file in sorted(made_images.layout().root.glob("*/*/*.JPEG")):
        digest.update(file.read_bytes())
    assert digest.hexdigest() == "fbddea62d67c2e4a9843a0c0229dc53ab01128c419181bb898affcd0e0f40d90"
    assert made_images.describe()["hash"] == "9b3a913de534b6c896662b1f567c4914d60491e97970ab5da6e2f3ec1386748b"


def test_files_are_different_baseline_jpegs_of_imagenets_size(made_images):
    files = list(made_images.layout().root.glob("*/*/*.JPEG"))
    assert len({file.read_bytes() for file in files}) == 30
    assert 60_000 < sum(file.stat().st_size for file in files) / len(files) < 120_000
    with Image.open(files[0]) as image:
        assert image.format == "JPEG"
        assert not image.info.get("progressive")
        assert min(image.size) >= 300


def test_made_once(made_images, monkeypatch):
    monkeypatch.setattr(samples, "make_images", lambda *_: pytest.fail("made again"))
    made_images.prepare()
    made_images.describe()


def test_images_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"10 classes, the model 9: set model.num_classes=10"):
        images(tmp_path).check(Shape(classes=9))
    with pytest.raises(UserError, match=r"data.sample_val=9 must be 10 or more"):
        images(tmp_path, val=9)
    with pytest.raises(UserError, match=r"data.decode=jpg must be one of pil, torchvision"):
        images(tmp_path, decode="jpg")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data.root=.*/file is not a folder"):
        images(tmp_path / "file").check(Shape())


@pytest.fixture(scope="module")
def made_text(tmp_path_factory):
    text = SampleText("sample_text", root=str(tmp_path_factory.mktemp("sample")), vocab_size=512)
    text.check(MODEL)
    text.prepare()
    return text


def test_set_is_complete_and_of_this_python(made_text):
    assert made_text.folder().name == "sample_text-v1-py{}.{}.{}-bpe512".format(*sys.version_info[:3])
    assert [path.name for path in Path(made_text.root).iterdir()] == [made_text.folder().name]
    made_text.check(MODEL)
    assert len((made_text.folder() / "merges.txt").read_text().splitlines()) == 1 + 512 - 256
    described = made_text.describe()
    assert described["vocab_size"] == 512
    assert described["train_tokens"] > 9 * described["val_tokens"] / 2 > 0
    assert described["val_words"] == len((made_text.folder() / "valid.txt").read_text().split())


def test_tokens_decode_to_the_text(made_text):
    from tokenizers import Tokenizer, decoders, models

    files = [str(made_text.folder() / name) for name in ("vocab.json", "merges.txt")]
    core = Tokenizer(models.BPE.from_file(*files))
    core.decoder = decoders.ByteLevel()
    split = made_text.split(True, MODEL, seed=0)
    text = (made_text.folder() / "train.txt").read_text()
    assert core.decode(split.tokens.tolist()) == text
    assert "assert" in text


@pytest.mark.parametrize(
    ("made", "files", "said"),
    [("made_images", "*/*/*.JPEG", "making 30 sample images in"), ("made_text", "*.txt", "")],
)
def test_makers_at_once_on_another_node_make_the_same_set(request, tmp_path, capfd, made, files, said):
    made = request.getfixturevalue(made)
    data = replace(made, root=str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        described = list(pool.map(lambda _: data.describe(), range(3)))
    assert described == [made.describe()] * 3
    assert said in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [made.folder().name]
    contents = [[file.read_bytes() for file in sorted(each.folder().glob(files))] for each in (data, made)]
    assert contents[0] == contents[1] != []


def test_text_can_be_tokenized_on_the_fly(made_text):
    fly = replace(made_text, tokenize="on_the_fly")
    assert fly.describe() == made_text.describe()
    indices = [(0, index) for index in (0, 3, 900)]
    expected, got = (text.split(True, MODEL, 0).__getitems__(indices) for text in (made_text, fly))
    assert torch.equal(got.inputs, expected.inputs)
    assert (fly.mapped, fly.costly, made_text.mapped, made_text.costly) == (False, True, True, False)


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


def test_home_is_the_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("DDLBENCH_HOME", str(tmp_path))
    assert SampleImages("sample_images").folder() == tmp_path / "sample_images-v1-3000-1000"
    assert SampleText("sample_text").folder().parent == tmp_path


def test_text_that_cannot_be_made_is_refused(tmp_path):
    text = SampleText("sample_text", root=str(tmp_path), vocab_size=513)
    with pytest.raises(UserError, match=r"data\.vocab_size=513 is more than the model's 512: .*model\.vocab_size=513"):
        text.check(MODEL)
    with pytest.raises(UserError, match=r"data\.vocab_size=255 must be 256 or more"):
        SampleText("sample_text", vocab_size=255)
    with pytest.raises(UserError, match=r"data\.val_limit=0"):
        SampleText("sample_text", val_limit=0)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data.root=.*/file is not a folder"):
        SampleText("sample_text", root=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("kind", "name", "option"),
    [
        (SampleImages, "train", "imagenet"),
        (SampleImages, "pack.json", "imagenet_tfrecord"),
        (SampleText, "wiki.train.raw", "wikitext2 or wikitext103"),
        (SampleText, "train.txt", "wikitext2 or wikitext103"),
    ],
)
def test_a_folder_with_data_of_the_users_own_is_refused(kind, name, option, tmp_path):
    """Who forgets the option `data` would train on the sample set and believe that it is the folder's."""
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"data.root=.* holds {name}, .*: choose data={option}, or another data.root"):
        kind("sample", root=str(tmp_path)).folder()


def test_python_without_its_help_texts_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)
    with pytest.raises(UserError, match=r"has no module pydoc_data.*: use another Python, or text of your own"):
        SampleText("sample_text", root=str(tmp_path), vocab_size=512).check(MODEL)
