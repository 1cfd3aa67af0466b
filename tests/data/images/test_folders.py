"""Samples from image folders: layout, crops by hand, decoders, files that are no images, what a user may get wrong."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from ddlbench.data.images.folders import ImageFolders, augmentation_seed, batch_memory, evenly_spaced
from ddlbench.data.loaders.replica_feed import MEAN, STD, normalized
from ddlbench.errors import UserError
from tests.support.pictures import Shape, empty, no_image, truncate, write_folders

DECODERS = ("pil", "torchvision")


@pytest.fixture
def folders(tmp_path):
    return write_folders(tmp_path / "set", train=4, val=2)


def take(data, train, keys, seed=0, size=32):
    return data.split(train, Shape(size), seed).__getitems__(keys)


def ramp(folders, height, width, blue=0):
    """An image of validation whose red is the column and green the row."""
    rows, columns = np.mgrid[0:height, 0:width]
    Image.fromarray(np.stack([columns, rows, columns * 0 + blue], -1).astype(np.uint8)).save(
        Path(folders.root) / "val/a/000.JPEG", "PNG"
    )


def pixels(inputs):
    """As numbers that can be subtracted."""
    assert inputs.dtype == torch.uint8
    return inputs.float()


def test_samples_and_labels_in_order_of_class_and_name(folders):
    assert folders.describe() | {"hash": ""} == {"hash": "", "train_samples": 12, "val_samples": 6, "classes": 3}
    fetched = take(folders, True, [(0, index) for index in (0, 3, 4, 11)])
    assert fetched.inputs.shape == (4, 3, 32, 32)
    assert fetched.inputs.dtype == torch.uint8
    assert fetched.targets.tolist() == [0, 0, 1, 2]
    assert fetched.targets.dtype == torch.int64
    assert fetched.valid.tolist() == [True] * 4
    assert fetched.valid.dtype == torch.bool
    assert take(folders, False, [(0, 5), (0, 0)]).targets.tolist() == [2, 0]


def test_without_validation_no_validation_folder_is_needed(folders, tmp_path):
    with_both = folders.describe()
    (tmp_path / "set" / "val").rename(tmp_path / "val")
    with pytest.raises(UserError, match=r"there is no folder .*/val"):
        folders.check(Shape())
    folders.check(Shape(), validate=False)
    folders.prepare()
    assert folders.describe() | {"hash": ""} == with_both | {"hash": "", "val_samples": 0}
    assert take(folders, True, [(0, 11)]).targets.tolist() == [2]
    assert len(folders.split(False, Shape(), 0)) == 0
    (tmp_path / "val").rename(tmp_path / "set" / "val")
    folders.prepare()
    assert folders.describe() == with_both


@pytest.mark.parametrize("decode", DECODERS)
def test_validation_crops_the_centre(folders, decode):
    """An image whose shorter side is 73 = round(64 * 256/224) already: of its 146 columns 41 ... 104 remain, of its 73
    rows 4 ... 67."""
    ramp(folders, 73, 146, blue=7)
    image = pixels(take(replace(folders, decode=decode), False, [(0, 0)], size=64).inputs[0])
    torch.testing.assert_close(image[0, 0], torch.arange(41.0, 105.0))
    torch.testing.assert_close(image[1, :, 0], torch.arange(4.0, 68.0))
    torch.testing.assert_close(image[2], torch.full((64, 64), 7.0))


@pytest.mark.parametrize("decode", DECODERS)
def test_of_16_bits_the_upper_8_count(folders, decode):
    """Pillow would clip them to white; torchvision keeps them, and 8 bits of them would be any numbers."""
    gray = np.full((40, 48), 0x8123, np.uint16)
    Image.fromarray(gray).save(Path(folders.root) / "val/a/000.JPEG", "PNG")
    image = take(replace(folders, decode=decode), False, [(0, 0)]).inputs[0]
    assert image.unique().tolist() == [0x81]


@pytest.mark.parametrize("decode", DECODERS)
def test_of_an_animation_the_first_picture_counts(folders, decode):
    first, second = (Image.new("P", (40, 40), color) for color in (7, 9))
    first.putpalette([0] * 21 + [204, 102, 51] + [0] * 744)
    first.save(Path(folders.root) / "val/a/000.JPEG", "GIF", save_all=True, append_images=[second])
    image = pixels(take(replace(folders, decode=decode), False, [(0, 0)]).inputs[0])
    torch.testing.assert_close(image[:, 16, 16], torch.tensor([204.0, 102.0, 51.0]), atol=1, rtol=0)


def test_val_resize_is_the_shorter_side(folders):
    ramp(folders, 40, 80)
    image = pixels(take(replace(folders, val_resize=40), False, [(0, 0)]).inputs[0])
    torch.testing.assert_close(image[0, 0], torch.arange(24.0, 56.0))


def test_training_is_torchvisions_reference_recipe(folders):
    """RandomResizedCrop and RandomHorizontalFlip as they come, from a stream that belongs to the sample."""
    to_float = (v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD))
    reference = v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *to_float])
    images = normalized(take(folders, True, [(2, index) for index in range(12)], seed=5))
    for index in range(12):
        torch.manual_seed(augmentation_seed(5, 2, index))
        file = Path(folders.root) / "train" / "abc"[index // 4] / f"{index % 4:03d}.JPEG"
        assert torch.equal(images[index], reference(Image.open(file)))


def test_crop_and_flip_are_knobs(folders):
    whole = replace(folders, crop_scale=[1.0, 1.0], crop_ratio=[1.2, 1.2], flip=0.0)  # 48 x 40 pixels: all of them
    mirror = replace(whole, flip=1.0)
    fetched = take(whole, True, [(0, 0)])
    assert torch.equal(fetched.inputs, take(whole, True, [(1, 0)]).inputs)
    assert torch.equal(fetched.inputs.flip(-1), take(mirror, True, [(0, 0)]).inputs)


@pytest.mark.parametrize("decode", DECODERS)
def test_augmentation_depends_on_seed_epoch_and_index_alone(folders, decode):
    data = replace(folders, decode=decode)
    first = take(data, True, [(1, 4), (1, 9)])
    again = take(data, True, [(1, 9), (0, 2), (1, 4)])
    assert torch.equal(first.inputs, again.inputs[[2, 0]])
    for other in (take(data, True, [(0, 4), (0, 9)]), take(data, True, [(1, 4), (1, 9)], seed=1)):
        assert not torch.equal(first.inputs, other.inputs)
    assert len({augmentation_seed(*key) for key in [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)]}) == 4


def test_both_decoders_make_the_same_crops(folders):
    pil, torchvision = (take(replace(folders, decode=decode), True, [(0, i) for i in range(12)]) for decode in DECODERS)
    # Pillow rounds between its two resizing passes, torchvision need not.
    assert (pixels(pil.inputs[0]) - pixels(torchvision.inputs[0])).abs().max() < 3


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    ("mode", "form"), [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG")]
)
def test_every_color_mode_becomes_rgb(folders, decode, mode, form):
    """ImageNet itself has grey and CMYK JPEGs, and a PNG named .JPEG."""
    grey = Image.new("RGB", (40, 40), (90, 90, 90))
    color = grey if mode in ("L", "LA") else Image.new("RGB", (40, 40), (204, 102, 51))
    file = Path(folders.root) / "val/a/000.JPEG"
    color.convert(mode).save(file, form)
    with Image.open(file) as saved:
        assert saved.mode == mode
    image = pixels(take(replace(folders, decode=decode), False, [(0, 0)]).inputs[0])
    expected = torch.tensor([90.0] * 3 if mode in ("L", "LA") else [204.0, 102.0, 51.0])
    torch.testing.assert_close(image[:, 16, 16], expected, atol=4, rtol=0)


def damaged_png(file: Path) -> None:
    """The compressed pixels end early, with a checksum that fits."""
    rows = zlib.compress(bytes(41 * 40))[:-20]
    parts = {b"IHDR": struct.pack(">2I5B", 40, 40, 8, 0, 0, 0, 0), b"IDAT": rows, b"IEND": b""}
    chunks = (
        struct.pack(">I", len(part)) + (kind + part) + struct.pack(">I", zlib.crc32(kind + part))
        for kind, part in parts.items()
    )
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("spoil", [truncate, no_image, empty, damaged_png])
def test_bad_file_is_fatal_and_named(folders, decode, spoil):
    file = Path(folders.root) / "train/b/001.JPEG"
    spoil(file)
    for key in ((0, 5), (3, 5)):
        said = r"b/001.JPEG cannot be decoded \((?!BadImage).+\): .*on_bad_sample=skip"
        with pytest.raises(UserError, match=said) as error:
            take(replace(folders, decode=decode), True, [(0, 0), key])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("spoil", [truncate, no_image, empty])
def test_the_next_file_replaces_one_skipped_in_training(folders, decode, spoil):
    """The first file replaces the last one."""
    for name in ("b/003", "c/000", "c/003"):
        spoil(Path(folders.root) / "train" / f"{name}.JPEG")
    data = replace(folders, decode=decode, on_bad_sample="skip")
    fetched = take(data, True, [(1, 6), (1, 7), (1, 11)])
    assert fetched.bad == ("train/b/003.JPEG", "train/c/000.JPEG", "train/c/003.JPEG")
    assert fetched.valid.tolist() == [True] * 3
    expected = take(data, True, [(1, 6), (1, 9), (1, 0)])
    assert torch.equal(fetched.inputs, expected.inputs)
    assert fetched.targets.tolist() == expected.targets.tolist() == [1, 2, 0]


@pytest.mark.parametrize("decode", DECODERS)
def test_a_file_skipped_in_validation_does_not_count(folders, decode):
    truncate(Path(folders.root) / "val/a/001.JPEG")
    fetched = take(replace(folders, decode=decode, on_bad_sample="skip"), False, [(0, 0), (0, 1), (0, 2)])
    assert fetched.valid.tolist() == [True, False, True]
    assert fetched.bad == ("val/a/001.JPEG",)
    assert fetched.inputs.shape == (3, 3, 32, 32)


def test_bad_files_of_both_splits_have_their_own_names(folders, tmp_path):
    """Also where the folders of both splits have the same last name."""
    root = Path(folders.root)
    for split, name in (("train", "one/images"), ("val", "two/images")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(root / split)
    truncate(root / "train/a/001.JPEG")
    truncate(root / "val/a/001.JPEG")
    data = replace(folders, root=str(tmp_path), train_dir="one/images", val_dir="two/images", on_bad_sample="skip")
    assert [take(data, train, [(0, 1)]).bad for train in (True, False)] == [("train/a/001.JPEG",), ("val/a/001.JPEG",)]


def test_full_shared_memory_names_the_remedy(monkeypatch):
    def full(_: int) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr("ddlbench.data.images.folders.get_worker_info", lambda: 1)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    with pytest.raises(UserError, match=r"of 1 MiB \(.*No space left.*\): lower loader\.workers .*--shm-size=1g"):
        batch_memory(torch.uint8, 2**20)


def test_a_set_without_a_readable_image_is_refused(folders):
    for file in Path(folders.root).glob("train/*/*"):
        no_image(file)
    with pytest.raises(UserError, match=r"none of the 12 images tried in .* could be decoded: check the data set"):
        take(replace(folders, on_bad_sample="skip"), True, [(0, 5)])


def test_vanished_file_is_never_skipped(folders):
    folders.prepare()
    (Path(folders.root) / "train/b/001.JPEG").unlink()
    with pytest.raises(UserError, match=r"cannot read .*train/b/001.JPEG \(No such file"):
        take(replace(folders, on_bad_sample="skip"), True, [(0, 5)])


def test_val_limit_takes_from_all_classes(folders):
    assert evenly_spaced(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert evenly_spaced(7, 3).tolist() == [0, 2, 4]
    assert evenly_spaced(3, 5).tolist() == evenly_spaced(3, None).tolist() == [0, 1, 2]
    data = replace(folders, val_limit=3)
    assert data.describe()["val_samples"] == len(data.split(False, Shape(), 0)) == 3
    assert take(data, False, [(0, 0), (0, 1), (0, 2)]).targets.tolist() == [0, 1, 2]
    assert data.describe()["train_samples"] == 12


def test_missing_root_says_how_to_lay_out_the_data():
    with pytest.raises(UserError, match=r"needs data.root=...: a folder with train/<class>/\*.JPEG and val/"):
        ImageFolders("imagenet").check(Shape())


def test_data_and_model_must_fit(folders):
    folders.check(Shape(classes=3))
    folders.check(Shape(classes=1000))
    with pytest.raises(UserError, match=r"3 classes, the model 2: set model.num_classes=3"):
        folders.check(Shape(classes=2))
    with pytest.raises(UserError, match=r"data.val_resize=31 is smaller than model.image_size=32"):
        replace(folders, val_resize=31).check(Shape())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decode": "opencv"}, r"data.decode=opencv must be one of pil, torchvision"),
        ({"on_bad_sample": "ignore"}, r"data.on_bad_sample=ignore must be one of fatal, skip"),
        ({"val_limit": 0}, r"data.val_limit=0 must be greater than 0"),
        ({"crop_scale": [1.0]}, r"data.crop_scale=\[1.0\] must be \[smallest, largest\]"),
        ({"crop_scale": [8.0, 100.0]}, r"must be \[smallest, largest\], both greater than 0 and at most 1"),
        ({"crop_ratio": [2.0, 1.0]}, r"data.crop_ratio=\[2.0, 1.0\] must be"),
        ({"flip": 1.5}, r"data.flip=1.5 must be a probability"),
    ],
)
def test_wrong_values_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        ImageFolders("imagenet", **wrong)
