"""DALI itself behind the feed: labels, types and crops, and what a user may get wrong."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ddlbench.data.loaders.dali import Dali, DaliReader
from ddlbench.errors import Unavailable, Unsupported, UserError
from tests.support.dali_feeds import dali, native, picture, request, write
from tests.support.libraries import needs_dali
from tests.support.pictures import Shape, empty, jpeg, no_image, truncate, write_folders
from tests.support.processes import PYTHON, run
from tests.support.runs import record
from tests.support.tiny import TinyData

pytestmark = needs_dali


CPU = torch.device("cpu")


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


def test_a_run_repeats_itself_and_replicas_draw_their_own(folders):
    def drawn(*args, **fields):
        feed = dali(folders, *args, replica_batch=3, **fields)
        return torch.cat([batch.inputs for epoch in (0, 1) for batch in feed.train(epoch)])

    first = drawn(0, 2)
    assert torch.equal(first, drawn(0, 2))
    assert not torch.equal(first, drawn(1, 2))
    assert not torch.equal(first, drawn(0, 2, seed=1))
    half = len(first) // 2
    assert not torch.equal(first[:half], first[half:])


def test_crops_follow_from_the_epoch(folders):
    """So a run that continues at an epoch gets those of an uninterrupted one."""
    uninterrupted, resumed = dali(folders), dali(folders)
    epochs = [torch.cat([batch.inputs for batch in uninterrupted.train(epoch)]) for epoch in range(3)]
    for epoch in (2, 0, 2):
        assert torch.equal(torch.cat([batch.inputs for batch in resumed.train(epoch)]), epochs[epoch])


@pytest.mark.parametrize("on_gpu", [True, False])
def test_on_a_gpu_it_is_torchs_current_stream_that_waits(folders, monkeypatch, on_gpu):
    """As in DALI's iterator for PyTorch: `run` takes the stream as an argument, from_dlpack finds the current one."""
    asked = []

    class Pipeline:
        """One float a file."""

        def __init__(self, images):
            self.batches = iter(images)

        def run(self, stream):
            asked.append(stream)
            self.files = next(self.batches)
            return (self,)

        def as_tensor(self):
            return np.ones(len(self.files), np.float32)

        def build(self): ...

        def reset(self): ...

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "side stream")
    built = list[DaliReader]()
    monkeypatch.setattr(DaliReader, "pipeline", lambda reader, _: built.append(reader) or Pipeline(reader))
    reader = DaliReader(folders, folders.split(True, Shape(), 0), Dali("dali"), request())
    reader.to_gpu = on_gpu
    batches = reader.read(0, [np.array([1, 6])])
    assert not asked, "no sample is read outside of the epoch's time"
    assert built == [reader], "the pipeline is built outside of it"
    (fetched,) = batches
    assert (fetched.inputs.tolist(), fetched.targets.tolist()) == ([1, 1], [0, 1])
    assert asked == [("side stream" if on_gpu else None)] * 2


def test_the_pipeline_is_built_before_the_first_batch_is_asked_for(folders, monkeypatch):
    loader, built = Dali("dali", device="cpu", threads=1), list[bool]()
    reader = DaliReader(folders, folders.split(True, Shape(), 0), loader, request())
    build = reader.dali.Pipeline.build
    monkeypatch.setattr(
        reader.dali.Pipeline, "build", lambda pipeline: built.append(pipeline._built) or build(pipeline)
    )
    batches = reader.read(0, [np.array([1, 6])])
    assert built == [False]
    assert not reader._in_flight, "no sample is read outside of the epoch's time"
    assert len(list(batches)) == 1


@pytest.mark.parametrize("says", ["Can't allocate 268435456 bytes on device 0.", "CUDA runtime API error (700)"])
def test_an_error_of_the_gpu_names_no_file(folders, monkeypatch, says):
    reader = DaliReader(folders, folders.split(True, Shape(), 0), Dali("dali", device="cpu", threads=1), request())
    reader._in_flight.append([0])
    error = RuntimeError(f"Critical error in pipeline:\n{says}")
    monkeypatch.setattr(reader, "_built", lambda *_, **__: pytest.fail("a second pipeline on a GPU without memory"))
    assert reader._explained(error) is error


def graphic(file):
    file.write_bytes(picture(np.zeros((40, 48)), format="GIF"))


@pytest.mark.parametrize("fused_crop", [True, False])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, r"cannot be decoded \(.*truncated"),
        (no_image, r"cannot be decoded \(.*cannot identify"),
        (empty, r"cannot be decoded \(.*cannot identify"),
        (Path.unlink, "No such file"),
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


def test_damage_below_a_fused_crop_is_not_found(tmp_path):
    content = jpeg([1], (480, 400))
    data = write(tmp_path, [content[: len(content) * 19 // 20]] * 8, [content])
    data = replace(data, crop_scale=[0.08, 0.08])
    seen = Counter()
    for fused_crop in (True, False):
        with suppress(UserError):  # which the test above has checked
            for _ in dali(data, replica_batch=1, fused_crop=fused_crop).train(0):
                seen[fused_crop] += 1
    assert seen[True] > seen[False] == 0


def test_what_it_cannot_read_is_unsupported(folders):
    Dali("dali").check(folders, Shape(), CPU)
    for data, message in (
        (
            TinyData(26, 7),
            "loader=dali reads image folders and packed images, and data=tiny is neither: choose loader=native",
        ),
        (replace(folders, on_bad_sample="skip"), "cannot skip images that cannot be decoded .*choose loader=native"),
        (replace(folders, decode="torchvision"), "remove data.decode=torchvision"),
    ):
        with pytest.raises(Unsupported, match=message):
            Dali("dali").check(data, Shape(), CPU)


def test_gpu_pipelines_need_a_gpu_where_the_run_is(folders, monkeypatch):
    """A login node without a GPU plans runs on GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("gpu", "mixed"):
        Dali("dali", device=device).check(folders, Shape(), torch.device("cuda", 0))
        with pytest.raises(Unsupported, match=f"loader.device={device} needs an NVIDIA GPU, and the run is on cpu"):
            Dali("dali", device=device).check(folders, Shape(), CPU)


def test_a_missing_library_is_unavailable(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali.fn", None)
    with pytest.raises(Unavailable, match=r"pip install 'ddlbench\[dali\]'"):
        Dali("dali").check(folders, Shape(), CPU)


@pytest.mark.parametrize(("device", "fused"), [("cpu", True), ("gpu", True), ("mixed", False)])
def test_crops_are_fused_where_the_cpu_decodes(folders, monkeypatch, device, fused):
    """A GPU's hardware decoder decodes complete images only."""
    loaders = []
    monkeypatch.setattr(
        "ddlbench.data.loaders.dali.DaliReader",
        lambda _, split, loader, request: loaders.append(loader) or Mock(split=split),
    )
    for given in (None, True, False):
        feed = Dali("dali", device=device, fused_crop=given).open(folders, request())
        expected = fused if given is None else given
        assert feed.facts()["fused_crop"] is expected
        assert [loader.fused_crop for loader in loaders] == [expected] * 2, "of training and of validation"
        loaders.clear()


FACTS = {"device": "cpu", "threads": 2, "prefetch": 2, "fused_crop": True, "ahead": 2, "cores": 3}


SMALL = [
    "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32", "loader=dali",
    "train.global_batch=4", "train.steps=3", "train.epochs=2", "data=imagenet", "progress=false",
]  # fmt: skip


def test_the_program_trains_on_it(ddlbench, tmp_path, folders, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    code, said = ddlbench(*SMALL, "+framework=single", f"data.root={folders.root}", "train.channels_last=true")
    assert code == 0, said
    content = record(tmp_path)
    assert content["config"]["loader"]["threads"] is None, "the same run on every machine"
    assert content["loader"] == {**FACTS, "bad_samples": []}
    assert (content["ledger"]["samples"], content["ledger"]["dropped_samples_per_epoch"]) == (24, 3)
    assert content["summary"]["val_samples"] == 9


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["ddp", "zero1"])
def test_two_ranks_of_the_program_train_on_it(tmp_path, folders, framework):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddlbench"]
    done = run(PYTHON, *torchrun, *SMALL, f"+framework={framework}", f"data.root={folders.root}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = record(tmp_path)
    assert content["status"] == "ok"
    assert content["loader"]["device"] == "cpu"
    assert content["summary"]["val_samples"] == 9
