"""The data sets that the program makes itself: whole or absent, the same every time; validation text that was not
trained on."""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
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


def test_samples_can_be_read(made_images):
    fetched = made_images.split(True, Shape(), 0).__getitems__([(0, index) for index in range(20)])
    assert fetched.inputs.shape == (20, 3, 32, 32)
    assert fetched.targets.tolist() == [label for label in range(10) for _ in range(2)]


def test_made_once(made_images, monkeypatch):
    monkeypatch.setattr(samples, "make_images", lambda *_: pytest.fail("made again"))
    made_images.prepare()
    made_images.describe()


def test_node_without_the_images_makes_its_own_and_prints_a_line(made_images, tmp_path, capfd):
    assert images(tmp_path).describe() == made_images.describe()
    assert f"making 30 sample images in {tmp_path}" in capfd.readouterr().err


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match=r"10 classes, the model 9: set model.num_classes=10"):
        images(tmp_path).check(Shape(classes=9))
    with pytest.raises(UserError, match=r"data.sample_val=9 must be 10 or more"):
        images(tmp_path, val=9)
    with pytest.raises(UserError, match=r"data.decode=jpg must be one of pil, torchvision"):
        images(tmp_path, decode="jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make .*DDLBENCH_HOME or data.root"):
        images(tmp_path / "file" / "below").prepare()


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


def test_a_node_without_the_text_makes_the_same(made_text, tmp_path):
    again = SampleText("sample_text", root=str(tmp_path), vocab_size=512)
    assert again.describe() == made_text.describe()
    for name in ("train.txt", "valid.txt", "vocab.json", "merges.txt"):
        assert (again.folder() / name).read_bytes() == (made_text.folder() / name).read_bytes()


@pytest.mark.parametrize("made", ["made_images", "made_text"])
def test_makers_at_once_are_harmless(request, tmp_path, made):
    made = request.getfixturevalue(made)
    data = replace(made, root=str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: data.prepare(), range(3)))
    assert data.describe() == made.describe()
    assert [path.name for path in tmp_path.iterdir()] == [made.folder().name]


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


def test_vocabularies_that_do_not_fit_are_refused(tmp_path):
    text = SampleText("sample_text", root=str(tmp_path), vocab_size=513)
    with pytest.raises(UserError, match=r"data\.vocab_size=513 is more than the model's 512: .*model\.vocab_size=513"):
        text.check(MODEL)
    with pytest.raises(UserError, match=r"data\.vocab_size=255 must be 256 or more"):
        SampleText("sample_text", vocab_size=255)
    with pytest.raises(UserError, match=r"data\.val_limit=0"):
        SampleText("sample_text", val_limit=0)


def test_deleted_token_file_is_made_again(made_text, tmp_path):
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
        images(tmp_path / "file").check(Shape())
    with pytest.raises(UserError, match=r"data.root=.*/file is not a folder"):
        SampleText("sample_text", root=str(tmp_path / "file"))
