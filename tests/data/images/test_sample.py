"""The image set that the program makes itself: whole or absent, the same bytes everywhere."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from ddlbench.data.images import sample as sample_images
from ddlbench.data.images.sample import CLASSES, SampleImages
from ddlbench.errors import UserError
from tests.support.pictures import Shape


def sample(root, train=20, val=10, **fields):
    return SampleImages("sample_images", root=str(root), sample_train=train, sample_val=val, **fields)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    data = sample(tmp_path_factory.mktemp("sample") / "new")
    data.check(Shape())
    data.prepare()
    return data


def test_set_is_complete(made):
    folder = made.layout().root
    assert [path.name for path in folder.parent.iterdir()] == ["sample_images-v1-20-10"]
    described = made.describe()
    assert (described["train_samples"], described["val_samples"], described["classes"]) == (20, 10, 10)
    assert sorted(path.name for path in (folder / "train").iterdir()) == list(CLASSES)
    assert [path.name for path in sorted((folder / "train/cross").iterdir())] == [
        "cross_00002.JPEG",
        "cross_00012.JPEG",
    ]
    made.check(Shape())


def test_files_are_pinned(made):
    """Bytes may differ only where Pillow comes with another JPEG library; the hash in the record shows it then."""
    digest = hashlib.sha256()
    for file in sorted(made.layout().root.glob("*/*/*.JPEG")):
        digest.update(file.read_bytes())
    assert digest.hexdigest() == "fbddea62d67c2e4a9843a0c0229dc53ab01128c419181bb898affcd0e0f40d90"
    assert made.describe()["hash"] == "9b3a913de534b6c896662b1f567c4914d60491e97970ab5da6e2f3ec1386748b"


def test_files_are_baseline_jpegs_of_imagenets_size(made):
    files = list(made.layout().root.glob("*/*/*.JPEG"))
    assert 60_000 < sum(file.stat().st_size for file in files) / len(files) < 120_000
    with Image.open(files[0]) as image:
        assert image.format == "JPEG"
        assert not image.info.get("progressive")
        assert min(image.size) >= 300


def test_training_and_validation_pictures_differ(made):
    folder = made.layout().root
    assert len({file.read_bytes() for file in folder.glob("*/*/*.JPEG")}) == 30


def test_samples_can_be_read(made):
    fetched = made.split(True, Shape(), 0).__getitems__([(0, index) for index in range(20)])
    assert fetched.inputs.shape == (20, 3, 32, 32)
    assert fetched.targets.tolist() == [label for label in range(10) for _ in range(2)]


def test_made_once(made, monkeypatch):
    monkeypatch.setattr(sample_images, "make_images", lambda *_: pytest.fail("made again"))
    made.prepare()
    made.describe()


def test_node_without_the_set_makes_its_own(made, tmp_path):
    assert sample(tmp_path).describe() == made.describe()


def test_interrupted_maker_leaves_nothing(tmp_path, monkeypatch):
    whole = sample_images.write_image

    def interrupted(folder, split, index):
        if (split, index) == ("val", 3):
            raise KeyboardInterrupt
        whole(folder, split, index)

    monkeypatch.setattr(sample_images, "write_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample(tmp_path / "set").prepare()
    assert list((tmp_path / "set").iterdir()) == []


def test_makers_at_once_are_harmless(made, tmp_path):
    data = sample(tmp_path)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: data.prepare(), range(3)))
    assert data.describe() == made.describe()
    assert [path.name for path in tmp_path.iterdir()] == ["sample_images-v1-20-10"]


def test_making_the_set_prints_a_line(tmp_path, capfd):
    sample(tmp_path).prepare()
    assert f"making 30 sample images in {tmp_path}" in capfd.readouterr().err


def test_home_is_the_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("DDLBENCH_HOME", str(tmp_path))
    assert SampleImages("sample_images").folder() == tmp_path / "sample_images-v1-3000-1000"


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match=r"10 classes, the model 9: set model.num_classes=10"):
        sample(tmp_path).check(Shape(classes=9))
    with pytest.raises(UserError, match=r"data.sample_val=9 must be 10 or more"):
        sample(tmp_path, val=9)
    with pytest.raises(UserError, match=r"data.decode=jpg must be one of pil, torchvision"):
        sample(tmp_path, decode="jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make .*DDLBENCH_HOME or data.root"):
        sample(tmp_path / "file" / "below").prepare()


def test_a_root_that_is_a_file_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data.root=.*/file is not a folder"):
        sample(tmp_path / "file").check(Shape())
