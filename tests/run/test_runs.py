"""Whole runs of the program over real files and over the knobs of `train.`, in this process and shrunk."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ddlbench.data.samples import train_bpe
from tests.support.pictures import truncate, write_folders
from tests.support.runs import GPT2, RESNET, record


@pytest.mark.parametrize("decode", ["pil", "torchvision"])
def test_a_truncated_image_is_fatal_or_skipped_and_counted(ddlbench, tmp_path: Path, decode: str) -> None:
    write_folders(tmp_path / "images", train=4, val=3)
    truncate(tmp_path / "images" / "train" / "a" / "001.JPEG")
    images = [
        "data=imagenet", f"data.root={tmp_path}/images", "loader.workers=1", f"data.decode={decode}", "train.steps=3",
    ]  # fmt: skip
    code, said = ddlbench(*RESNET, *images, "results_dir=fatal")
    assert code == 2
    assert "Traceback" not in said
    assert "001.JPEG" in said.splitlines()[-1]
    assert record(tmp_path / "fatal")["status"] == "error"
    code, said = ddlbench(*RESNET, *images, "data.on_bad_sample=skip")
    assert code == 0, said
    content = record(tmp_path / "results")
    assert (content["dataset"]["train_samples"], content["dataset"]["val_samples"]) == (12, 9)
    assert (content["ledger"]["bad_samples"], content["ledger"]["samples"]) == (1, 12)
    assert "001.JPEG" in json.dumps(content["loader"]["bad_samples"])
    assert content["summary"]["val_samples"] == 9
    assert 0 <= content["summary"]["val_top1"] <= content["summary"]["val_top5"] <= 1
    too_fast = ["recipe.optimizer.lr=1e30", "recipe.optimizer.lr_base_batch=null", "results_dir=diverged"]
    code, said = ddlbench(*RESNET, *images, "data.on_bad_sample=skip", *too_fast)
    assert code == 5, said
    assert record(tmp_path / "diverged")["ledger"]["bad_samples"] == 1


def test_wikitext_folders(ddlbench, tmp_path: Path) -> None:
    root = tmp_path / "wikitext"
    root.mkdir()
    (root / "wiki.train.raw").write_text(" = A title = \n\n some words to learn , and more of them .\n" * 20)
    (root / "wiki.valid.raw").write_text(" = A title = \n\n words .\n")
    train_bpe("", 256, root)
    text = ["data=wikitext2", f"data.root={root}", "model.seq_len=16", "model.vocab_size=256"]
    code, said = ddlbench(*GPT2, *text)
    assert code == 0, said
    summary, dataset = record(tmp_path)["summary"], record(tmp_path)["dataset"]
    # One token a byte: 24 bytes, of which all but the first are predicted; 6 words.
    assert (dataset["val_tokens"], dataset["val_words"]) == (24, 6)
    assert summary["val_perplexity_token"] == pytest.approx(math.exp(summary["val_loss"]), rel=1e-6)
    assert summary["val_perplexity_word"] == pytest.approx(math.exp(summary["val_loss"] * 23 / 6), rel=1e-6)
    assert summary["tokens_per_s"] == pytest.approx(16 * summary["throughput_samples_per_s"])


def test_tokenizing_on_the_fly_changes_no_bit(ddlbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})  # one core for the rank, the others for workers
    words = [*GPT2, "model.seq_len=32", "data.val_limit=5", "train.steps=6"]
    runs: list[dict[str, Any]] = []
    for tokenize, workers in (("ahead", 0), ("on_the_fly", 2)):
        code, said = ddlbench(*words, f"data.tokenize={tokenize}", f"results_dir={tokenize}", "progress=false")
        assert (code, said) == (0, "")
        content = record(tmp_path / tokenize)
        assert (content["config"]["data"]["tokenize"], content["loader"]["workers"]) == (tokenize, workers)
        (path,) = tmp_path.glob(f"{tokenize}/*/attempt-1/steps.parquet")
        content["losses"] = [step["loss"] for step in pq.read_table(path).to_pylist()]
        runs.append(content)
    ahead, fly = runs
    assert len(set(ahead["losses"])) == 6
    assert fly["losses"] == ahead["losses"]
    for name in ("train_loss", "val_loss", "val_perplexity_token"):
        assert fly["summary"][name] == ahead["summary"][name]
    assert fly["dataset"] == ahead["dataset"]
    assert fly["run_id"] != ahead["run_id"]


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        (RESNET, ["train.precision=fp16"]),
        (RESNET, ["train.precision=bf16", "train.channels_last=true", "recipe=lars"]),
        (RESNET, ["recipe=aach2023_cosine", "train.micro_batch=2", "train.checkpoint_activations=true"]),
        (GPT2, ["train.precision=bf16", "recipe=lamb", "train.clip_norm=1.0", "loader=synthetic"]),
        (GPT2, ["model.pad_vocab_to_multiple=128", "model.tie_weights=false", "train.channels_last=true"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) and len(value) < 5 else "",
)
def test_knobs_run(ddlbench, tmp_path: Path, model: list[str], knobs: list[str]) -> None:
    small = ["loader=synthetic", "data.val_limit=5"] if model is RESNET else ["model.seq_len=32", "data.val_limit=3"]
    code, said = ddlbench(*model, *small, *[knob for knob in knobs if knob != "loader=synthetic"])
    assert code == 0, said
    content = record(tmp_path)
    assert content["ledger"]["updates"] + content["ledger"]["skipped_updates"] == 2
    assert content["summary"]["train_loss"] > 0
    assert content["summary"].get("val_loss", 0) > 0 or model is RESNET  # on random samples


@pytest.mark.parametrize("classes", [1000, 3])
def test_classes_that_the_data_does_not_have_draw_a_warning(ddlbench, tmp_path: Path, classes: int) -> None:
    """And a run without validation needs no folder for it."""
    data = write_folders(tmp_path / "set", train=4, val=1)
    shutil.rmtree(f"{data.root}/val")
    words = [*RESNET, "data=imagenet", f"data.root={data.root}", f"model.num_classes={classes}", "loader.workers=0"]
    code, said = ddlbench(*words)
    assert (code, "there is no folder" in said) == (2, True)
    code, said = ddlbench(*words, "train.validate=false")
    assert code == 0, said
    assert record(tmp_path)["dataset"]["val_samples"] == 0
    line = f"warning: the data has 3 classes, the model {classes}: model.num_classes=3 fits"
    assert said.count(line) == (classes == 1000)


@pytest.mark.slow
def test_a_compiled_model_has_nearly_the_same_loss(ddlbench, tmp_path: Path) -> None:
    losses: list[float] = []
    for compiled in ("false", "true"):
        code, said = ddlbench(
            *GPT2, "model.seq_len=32", "data.val_limit=3", "model.dropout=0", f"train.compile={compiled}",
            f"results_dir=compiled-{compiled}",
        )  # fmt: skip
        assert code == 0, said
        losses.append(record(tmp_path / f"compiled-{compiled}")["summary"]["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
