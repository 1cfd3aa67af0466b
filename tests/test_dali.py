"""DALI itself behind the feed: the same samples, pixels and distribution of crops as the native loader's."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from ddlbench.data.dali import Dali
from ddlbench.data.dali_graph import Graph, half_even, pipeline
from ddlbench.data.feed import Request
from ddlbench.data.images import MEAN, STD, ImageFolders
from ddlbench.data.native import Native
from ddlbench.errors import Unavailable, Unsupported, UserError
from ddlbench.job import Place
from tests.libraries import needs_dali
from tests.pictures import Shape, jpeg, truncate, write_folders
from tests.processes import PYTHON, run
from tests.tiny import TinyData

pytestmark = needs_dali
CONF = Path(__file__).parents[1] / "conf" / "loader" / "dali.yaml"
CPU = torch.device("cpu")
# Of 255 levels. Pillow rounds between its two resizing passes, DALI does not; another libjpeg may round otherwise too.
MOST, MEAN_ERROR = 2.0, 0.5


def request(rank=0, size=1, replica_batch=4, pixels=32, seed=0, **fields):
    return Request(Shape(pixels), Place(rank, size), CPU, seed=seed, replica_batch=replica_batch, **fields)


def dali(data, *args, fused_crop=True, **fields):
    return Dali("dali", fused_crop=fused_crop).open(data, request(*args, **fields))


def native(data, *args, **fields):
    return Native("native", workers=0).open(data, request(*args, **fields))


def levels(inputs):
    """Normalised inputs as the 0 ... 255 they were."""
    return (inputs * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255


def picture(pixels, **how):
    stream = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels.astype(np.uint8))).save(
        stream, how.pop("format", "JPEG"), **how
    )
    return stream.getvalue()


def write(root, train, val):
    """root/train/a/0000.JPEG ... of the bytes in `train`, likewise of `val`."""
    for split, contents in (("train", train), ("val", val)):
        (root / split / "a").mkdir(parents=True)
        for index, content in enumerate(contents):
            (root / split / "a" / f"{index:04d}.JPEG").write_bytes(content)
    return ImageFolders("written", root=str(root))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("dali"), train=5, val=3)


STEP = 9  # levels of red between one plain image and the next


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """26 + 7 images of one colour each: whatever is cropped, it says which sample it was."""
    images = [picture(np.full((40, 48, 3), index * STEP)) for index in range(26)]
    return write(tmp_path_factory.mktemp("plain"), images, images[:7])


def indices(batches):
    """[[index, ...] a batch] of the valid samples of `plain`."""
    return [(levels(batch.inputs[batch.valid])[:, 0].mean((1, 2)) / STEP).round().int().tolist() for batch in batches]


def test_an_epoch_holds_every_sample_once_in_the_native_order(plain):
    feed = dali(plain)
    assert (feed.steps_per_epoch, feed.dropped_samples, feed.val_samples) == (6, 2, 7)
    first, second = (indices(feed.train(epoch)) for epoch in (0, 1))
    assert [len(batch) for batch in first] == [4] * 6
    assert len(set(chain(*first))) == len(set(chain(*second))) == 24
    assert first != second
    assert first == indices(native(plain).train(0))
    assert second == indices(native(plain).train(1))
    assert indices(dali(plain, seed=1).train(0)) == indices(native(plain, seed=1).train(0)) != first


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_share_each_global_batch(plain, size):
    alone = indices(native(plain, replica_batch=12).train(1))
    shares = [indices(dali(plain, rank, size, replica_batch=12 // size).train(1)) for rank in range(size)]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == alone


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_validation_sample_counts_once(plain, size):
    feeds = [dali(plain, rank, size, replica_batch=2) for rank in range(size)]
    batches = [list(feed.validation()) for feed in feeds]
    assert {len(each) for each in batches} == {{1: 4, 2: 2, 3: 2}[size]}
    assert all(batch.inputs.shape == (2, 3, 32, 32) for each in batches for batch in each)
    assert sorted(index for each in batches for batch in indices(each) for index in batch) == list(range(7))


def test_replica_without_validation_samples_gives_masked_batches(plain):
    feed = dali(replace(plain, val_limit=1), 1, 2)
    for _ in range(2):
        (batch,) = feed.validation()
        assert batch.inputs.shape == (4, 3, 32, 32)
        assert batch.inputs.any().item() is False
        assert batch.valid.tolist() == [False] * 4


def test_labels_types_and_layout_are_the_native_loaders(folders):
    for channels_last in (False, True):
        fields = {"channels_last": channels_last, "steps": 2}
        for epoch in range(2):
            ours, theirs = dali(folders, **fields), native(folders, **fields)
            assert ours.steps_per_epoch == theirs.steps_per_epoch == 2
            for got, expected in zip(
                [*ours.train(epoch), *ours.validation()], [*theirs.train(epoch), *theirs.validation()], strict=True
            ):
                assert torch.equal(got.targets, expected.targets)
                assert torch.equal(got.valid, expected.valid)
                assert (got.inputs.dtype, got.inputs.shape) == (expected.inputs.dtype, expected.inputs.shape)
                assert got.inputs.stride() == expected.inputs.stride()


def photographs(root):
    """What ImageNet holds: all shapes, grey, CMYK, a PNG, a picture that wants to be turned."""
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


def test_starts_are_rounded_as_python_rounds():
    assert [half_even(number) for number in range(9)] == [round(number / 2) for number in range(9)]


def test_whole_images_and_mirrors_are_the_native_loaders(folders):
    """No crop is left to chance: 48 x 40 pixels, all of them."""
    whole = replace(folders, crop_scale=[1.0, 1.0], crop_ratio=[1.2, 1.2], flip=0.0)
    for data in (whole, replace(whole, flip=1.0)):
        for fused_crop in (True, False):
            for got, expected in zip(dali(data, fused_crop=fused_crop).train(0), native(data).train(0), strict=True):
                assert (levels(got.inputs) - levels(expected.inputs)).abs().max() < MOST


WIDTH, HEIGHT, COPIES, EPOCHS = 120, 100, 300, 8


@pytest.fixture(scope="module")
def ramp(tmp_path_factory):
    """Red tells the column, green the row, so that a crop tells where it was."""
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


def test_a_run_repeats_itself_and_replicas_draw_their_own(ramp):
    def drawn(*args, **fields):
        feed = dali(ramp, *args, replica_batch=50, **fields)
        return torch.cat([batch.inputs for epoch in (0, 1) for batch in feed.train(epoch)])

    first = drawn(0, 2)
    assert torch.equal(first, drawn(0, 2))
    assert not torch.equal(first, drawn(1, 2))
    assert not torch.equal(first, drawn(0, 2, seed=1))
    half = len(first) // 2
    assert not torch.equal(first[:half], first[half:])


def test_an_epoch_left_in_the_middle_disturbs_none(plain):
    feed = dali(plain)
    left = feed.train(0)
    next(left)
    assert indices(feed.train(1)) == indices(native(plain).train(1))
    assert indices(feed.validation()) == indices(native(plain).validation())
    feed.close()
    assert indices(feed.train(0)) == indices(native(plain).train(0))


def test_batches_stay_as_they_were_delivered(plain):
    batches = list(dali(plain).train(0))
    assert indices(batches) == indices(native(plain).train(0))


def test_rank_that_reads_nothing_gets_as_many_nothings(plain):
    feed = Dali("dali").open(plain, replace(request(), place=Place(0, 1, reads_data=False)))
    assert list(feed.train(0)) == [None] * 6
    assert list(feed.validation()) == [None] * 2


def test_global_random_stream_is_left_alone(folders):
    torch.manual_seed(9)
    expected = torch.rand(2)
    torch.manual_seed(9)
    list(dali(folders).train(0))
    assert torch.equal(torch.rand(2), expected)


def vanish(file):
    file.unlink()


def no_image(file):
    file.write_text("<html>404</html>")


def empty(file):
    file.write_bytes(b"")


def graphic(file):
    file.write_bytes(picture(np.zeros((40, 48)), format="GIF"))


@pytest.mark.parametrize("fused_crop", [True, False])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, r"cannot be decoded \(.*truncated"),
        (no_image, r"cannot be decoded \(.*cannot identify"),
        (empty, r"cannot be decoded \(.*cannot identify"),
        (vanish, "No such file"),
        (graphic, "cannot be decoded by DALI, only by Pillow"),
    ],
)
def test_bad_file_ends_the_run_with_one_line(tmp_path, spoil, reason, fused_crop):
    data = write_folders(tmp_path, train=5, val=3)
    data.prepare()
    for file in ("train/b/003.JPEG", "val/b/001.JPEG"):
        spoil(tmp_path / file)
    whole = replace(data, crop_scale=[1.0, 1.0], crop_ratio=[1.2, 1.2])
    feed = dali(whole, fused_crop=fused_crop)
    for batches, name in ((feed.train(0), "train/b/003.JPEG"), (feed.validation(), "val/b/001.JPEG")):
        with pytest.raises(UserError, match=reason) as error:
            list(batches)
        assert name in str(error.value)
        assert "\n" not in str(error.value)


def test_damage_below_a_fused_crop_goes_unseen(tmp_path):
    content = jpeg([1], (480, 400))
    data = write(tmp_path, [content[: len(content) * 19 // 20]] * 8, [content])
    data = replace(data, crop_scale=[0.08, 0.08])
    seen = {}
    for fused_crop in (True, False):
        batches = dali(data, replica_batch=1, fused_crop=fused_crop).train(0)
        seen[fused_crop] = list(undamaged(batches))
    assert len(seen[True]) > len(seen[False]) == 0


def undamaged(batches):
    try:
        yield from batches
    except UserError as error:
        assert "truncated" in str(error)


def test_what_it_cannot_read_is_unsupported(folders):
    Dali("dali").check(folders, Shape())
    for data, message in (
        (TinyData(26, 7), "data=tiny is none: choose loader=native"),
        (replace(folders, on_bad_sample="skip"), "cannot skip bad images"),
        (replace(folders, decode="torchvision"), "leave out data.decode=torchvision"),
    ):
        with pytest.raises(Unsupported, match=message):
            Dali("dali").check(data, Shape())


def test_gpu_pipelines_need_a_gpu(folders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("gpu", "mixed"):
        with pytest.raises(Unsupported, match=f"loader.device={device} needs an NVIDIA GPU"):
            Dali("dali", device=device).check(folders, Shape())


def test_a_missing_library_is_unavailable(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali.fn", None)
    with pytest.raises(Unavailable, match=r"pip install 'ddlbench\[dali\]'"):
        Dali("dali").check(folders, Shape())


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("fused_crop", [True, False])
def test_each_device_has_its_graph(folders, train, fused_crop):
    """Graphs alone: to run the last two takes a GPU."""
    for device, to_gpu, places in (
        ("cpu", False, set()), ("cpu", True, {"gpu"}), ("gpu", True, {"gpu"}), ("mixed", True, {"gpu", "mixed"}),
    ):  # fmt: skip
        graph = Graph(folders, (32, 32), device, fused_crop, channels_last=False, to_gpu=to_gpu)
        made = pipeline(graph, [], train, batch_size=4, num_threads=1, device_id=None).serialize()
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


def test_facts_and_defaults(folders):
    assert dali(folders).facts() == {
        "device": "cpu", "threads": 2, "prefetch": 2, "fused_crop": True, "bad_samples": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "tpu"}, "loader.device=tpu is unknown: choose null or one of cpu, gpu, mixed"),
        ({"threads": 0}, "loader.threads=0 must be 1 or more"),
        ({"prefetch": 0}, "loader.prefetch=0 must be 1 or more"),
    ],
)
def test_wrong_values_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Dali("dali", **wrong)


def test_yaml_builds():
    fields = OmegaConf.load(CONF)
    assert fields.pop("_target_") == "ddlbench.data.dali.Dali"
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Dali), fields)) == Dali("dali")
    assert set(fields) == set(OmegaConf.structured(Dali))


SMALL = [
    "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32", "loader=dali",
    "train.global_batch=4", "train.steps=3", "train.epochs=2", "data=imagenet", "progress=false",
]  # fmt: skip


def test_the_program_trains_on_it(ddlbench, tmp_path, folders):
    code, said = ddlbench(*SMALL, "+framework=single", f"data.root={folders.root}", "train.channels_last=true")
    assert code == 0, said
    (path,) = tmp_path.glob("results/*/attempt-1/run.json")
    content = json.loads(path.read_text())
    assert content["loader"] == {
        "device": "cpu", "threads": 2, "prefetch": 2, "fused_crop": True, "bad_samples": [],
    }  # fmt: skip
    assert (content["ledger"]["samples"], content["ledger"]["dropped_samples_per_epoch"]) == (24, 3)
    assert content["summary"]["val_samples"] == 9


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["ddp", "zero1"])
def test_two_ranks_of_the_program_train_on_it(tmp_path, folders, framework):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddlbench"]
    done = run(
        PYTHON, *torchrun, *SMALL, f"+framework={framework}", f"data.root={folders.root}", cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("results/*/attempt-1/run.json")
    content = json.loads(path.read_text())
    assert content["status"] == "ok"
    assert content["loader"]["device"] == "cpu"
    assert content["summary"]["val_samples"] == 9
