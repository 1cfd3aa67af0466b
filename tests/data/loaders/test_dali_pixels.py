"""What DALI makes of an image: the pixels of the native loader, and crops of the same distribution."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from ddlbench.data.loaders.dali import Dali, DaliReader
from tests.support.dali_feeds import dali, levels, native, picture, request, write
from tests.support.libraries import needs_dali
from tests.support.pictures import Shape, jpeg

pytestmark = needs_dali
# Of 255 levels. Pillow rounds between its two resizing passes, DALI does not; another libjpeg may round otherwise too.
MOST, MEAN_ERROR = 2.0, 0.5


def photographs(root):
    """What ImageNet holds: all shapes, grey, CMYK, a PNG, a picture whose EXIF tag asks for a rotation."""
    patches = [jpeg([seed], size) for seed, size in enumerate([(48, 40), (40, 48), (400, 376), (72, 200), (64, 64)])]
    image = Image.open(io.BytesIO(patches[0]))
    turned = Image.Exif()
    turned[0x112] = 6
    odd = [
        picture(image.convert("L")), picture(image.convert("CMYK")), picture(image, exif=turned),
        picture(image, format="PNG"), picture(image.convert("P"), format="PNG"), picture(image, subsampling=0),
    ]  # fmt: skip
    return write(root, patches[:1], patches + odd)


@pytest.mark.parametrize("pixels", [32, 33])
def test_validation_pixels_are_the_native_loaders(tmp_path, pixels):
    data = photographs(tmp_path)
    got, expected = (
        torch.cat([b.inputs for b in open_(data, 0, 1, 1, pixels).validation()]) for open_ in (dali, native)
    )
    error = (levels(got) - levels(expected)).abs()
    assert error.amax((1, 2, 3)).tolist() == pytest.approx([0] * 11, abs=MOST)
    assert error.mean() < MEAN_ERROR


WHOLE = {"crop_scale": [1.0, 1.0], "crop_ratio": [1.2, 1.2]}
SQUARE = {"crop_scale": [1.0, 1.0], "crop_ratio": [1.0, 1.0]}


@pytest.mark.parametrize("fused_crop", [True, False])
@pytest.mark.parametrize(
    ("size", "crop"),
    [
        ((48, 40), WHOLE),
        ((48, 40), {**WHOLE, "flip": 1.0}),
        # No crop fits, so both take the centre. By default 8 % of the area at an aspect of 4/3 are above 40 pixels.
        ((680, 40), {}),
        ((40, 680), {}),
        ((680, 41), {}),  # 54.67 pixels at an aspect of 4/3: both round to 55
        ((41, 680), {}),
        ((48, 40), SQUARE),
        ((40, 49), SQUARE),
    ],
)
def test_crops_that_leave_nothing_to_chance_are_the_native_loaders(tmp_path, size, crop, fused_crop):
    data = replace(write(tmp_path, [jpeg([seed], size) for seed in range(8)], [jpeg([0], size)]), flip=0.0)
    data = replace(data, **crop)
    for got, expected in zip(dali(data, fused_crop=fused_crop).train(0), native(data).train(0), strict=True):
        error = (levels(got.inputs) - levels(expected.inputs)).abs()
        assert error[..., 1:-1, 1:-1].max() < MOST
        assert error.mean() < MEAN_ERROR  # the outermost pixels of a smaller crop differ by more


@pytest.mark.parametrize("fused_crop", [True, False])
@pytest.mark.parametrize("size", [(50, 38), (38, 50), (450, 338)])
def test_no_crop_leaves_the_image(tmp_path, size, fused_crop):
    """38 pixels at an aspect of 4/3 would be 50.67: the image has fewer."""
    data = replace(write(tmp_path, [jpeg([seed], size) for seed in range(8)], [jpeg([0], size)]), crop_scale=[1.0, 1.0])
    assert sum(len(batch.inputs) for batch in dali(data, fused_crop=fused_crop).train(0)) == 8


WIDTH, HEIGHT, COPIES, EPOCHS = 120, 100, 300, 8


@pytest.fixture(scope="module")
def ramp(tmp_path_factory):
    """Red gives the column, green the row, so that the pixels of a crop show its place."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    image = picture(np.stack([2 * columns, 2 * rows, 0 * rows], -1), quality=100, subsampling=0)
    return write(tmp_path_factory.mktemp("ramp"), [image] * COPIES, [image])


def crops(feed):
    """Area (of the image's), log of the aspect, centre (column, row) and mirroring of each crop of `EPOCHS`."""
    inputs = torch.cat([batch.inputs for epoch in range(EPOCHS) for batch in feed.train(epoch)])
    column, row = (levels(inputs)[:, channel, 8:24, 8:24] / 2 for channel in (0, 1))
    across = (column[:, :, -1] - column[:, :, 0]).mean(1) * 32 / 15  # 15 steps from the first to the last pixel
    down = (row[:, -1] - row[:, 0]).mean(1) * 32 / 15
    return {
        "area": across.abs() * down / (WIDTH * HEIGHT),
        "aspect": (across.abs() / down).log(),
        "column": column.mean((1, 2)),
        "row": row.mean((1, 2)),
        "mirror": (across < 0).float(),
    }


def furthest(one, other):
    """Kolmogorov and Smirnov's statistic: the largest distance of two empirical distributions."""
    one, other = np.sort(one.numpy()), np.sort(other.numpy())
    both = np.concatenate([one, other])
    return np.abs(np.searchsorted(one, both, "right") - np.searchsorted(other, both, "right")).max() / len(one)


def test_crops_have_the_native_loaders_distribution(ramp):
    """2,400 draws each. Equal distributions are further apart than 0.056 once in a thousand times."""
    ours, theirs = (crops(open_(ramp, replica_batch=100)) for open_ in (dali, native))
    for name, drawn in ours.items():
        spread = (drawn.var() + theirs[name].var()).div(len(drawn)).sqrt()
        assert (drawn.mean() - theirs[name].mean()).abs() < 3.3 * spread, name
        assert furthest(drawn, theirs[name]) < 0.056, name
    assert ours["area"].min() > 0.06
    assert ours["aspect"].abs().max() < np.log(4 / 3) + 0.05


def test_fused_crops_are_the_crops_of_whole_images(ramp):
    fused, whole = (next(dali(ramp, replica_batch=100, fused_crop=how).train(0)).inputs for how in (True, False))
    assert (levels(fused) - levels(whole)).abs().max() < MOST


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("fused_crop", [True, False])
def test_each_device_has_its_graph(folders, train, fused_crop):
    """Graphs alone: to run the last two takes a GPU."""
    split = folders.split(train, Shape(), 0)
    for device, to_gpu, places in (
        ("cpu", False, set()), ("cpu", True, {"gpu"}), ("gpu", True, {"gpu"}), ("mixed", True, {"gpu", "mixed"}),
    ):  # fmt: skip
        reader = DaliReader(folders, split, Dali("dali", device=device, threads=1, fused_crop=fused_crop), request())
        reader.to_gpu = to_gpu
        made = reader.pipeline(0).serialize()
        assert {place for place in ("gpu", "mixed") if place.encode() in made} == places
        resized_on_gpu = b"Resize" in made.partition(b"gpu")[2]  # operators are written in the order they run in
        assert resized_on_gpu == (device != "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "gpu", "mixed", None])
def test_pixels_on_the_gpu_are_the_native_loaders(tmp_path, where):
    """nvJPEG has another inverse cosine transform than libjpeg."""
    data, wanted = photographs(tmp_path), replace(request(replica_batch=1), device=torch.device("cuda"))
    feed = Dali("dali", device=where).open(data, wanted)
    assert feed.facts()["device"] == (where or "mixed")
    got, expected = list(feed.validation()), list(native(data, replica_batch=1).validation())
    assert {batch.inputs.device.type for batch in got} == {"cuda"}
    error = levels(torch.cat([b.inputs.cpu() for b in got])) - levels(torch.cat([b.inputs for b in expected]))
    assert error.abs().mean() < 2
    assert len(list(feed.train(0))) == 1
