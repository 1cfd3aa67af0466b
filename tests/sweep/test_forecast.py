"""What a plan says of cells that have not run: the oracle's seconds, marked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddlbench.errors import UserError
from ddlbench.predict.__main__ import main as predict
from ddlbench.sweep.__main__ import main
from ddlbench.sweep.forecast import Forecast
from ddlbench.sweep.plan import Cell, plan
from ddlbench.sweep.study import load
from tests.sweep.studies import KEYS, record, write

CUDA = "cluster=h100"
SMALL = [f"{key}={str(value).replace(' ', '')}" for key, value in KEYS.items() if key.startswith("model.")]


def cells(folder: Path, *words: str, framework: str = "ddp", keys: Mapping[str, object] = {}) -> list[Cell]:
    """On 4 and on 8 GPUs."""
    study = write(
        folder, axes={"framework": [framework], "gpus": [4, 8]}, exclude=[], keys=KEYS | {"batch": 64} | dict(keys)
    )
    return sorted(plan(load(str(study), words), Forecast("h100").device), key=lambda cell: cell.gpus)


def seconds(forecast: Forecast, planned: list[Cell]) -> list[float | None]:
    return [forecast(cell) for cell in planned]


def step_s(capsys: pytest.CaptureFixture[str], *words: str) -> list[float]:
    """As python -m ddlbench.predict says it."""
    words = ("+framework=ddp", "+model=resnet50", CUDA, "gpus=[4,8]", "train.global_batch=64", *words)
    assert predict([*words, "--json"]) == 0
    return [row["step_s"] for row in json.loads(capsys.readouterr().out)]


def test_the_seconds_are_those_of_the_oracle_for_all_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 epochs of 10 steps; of ImageNet's 1,281,167 images 20,018 batches of 64 in each of 2 epochs, also where
    train.steps would allow more."""
    forecast = Forecast("h100")
    short = cells(tmp_path, keys={"train.steps": 10, "train.epochs": 3})
    assert seconds(forecast, short) == pytest.approx([30 * each for each in step_s(capsys, *SMALL)])
    synthetic = cells(tmp_path, keys={"train.steps": None, "loader.train_samples": 700})  # 10 batches of 64
    assert seconds(forecast, synthetic) == pytest.approx([10 * each for each in step_s(capsys, *SMALL)])
    expected = [2 * 20_018 * each for each in step_s(capsys, *SMALL)]
    for steps in (None, 1_000_000):
        keys = {"train.steps": steps, "train.epochs": 2, "data": "imagenet"}
        assert seconds(forecast, cells(tmp_path, "data.root=/data", keys=keys)) == pytest.approx(expected)


def test_cells_whose_updates_cost_different_times_share_no_computation(tmp_path: Path) -> None:
    """SGD without momentum reads and writes 12 bytes for each parameter instead of 20."""
    forecast = Forecast("h100")
    keys = {"train.steps": 100, "recipe": "sgd"}
    plain, with_momentum = (
        seconds(forecast, cells(tmp_path, keys=keys | {"recipe.optimizer.momentum": value})) for value in (0.0, 0.9)
    )
    assert all(
        one is not None and other is not None and one < other for one, other in zip(plain, with_momentum, strict=True)
    )


def test_what_is_not_known_is_empty(tmp_path: Path) -> None:
    """The length of an epoch of the sample images; a cell without a model; a cell that is refused."""
    forecast = Forecast("h100")
    assert seconds(forecast, cells(tmp_path, keys={"mode": "loader"})) == [None, None]
    assert seconds(forecast, cells(tmp_path, keys={"train.steps": None})) == [None, None]
    four, eight = cells(tmp_path, framework="gpipe")  # of six blocks there are no eight stages
    assert (four.refused is None, eight.refused is None) == (True, False)
    assert [result is None for result in seconds(forecast, [four, eight])] == [False, True]
    with pytest.raises(UserError, match="cluster=moon is not known"):
        Forecast("moon")


def test_a_plan_marks_what_is_predicted_and_prefers_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = cells(tmp_path, keys={"train.steps": 100_000})
    record(tmp_path / "results", planned[0], "ok", seconds=1800)
    words = [str(tmp_path / "tiny.yaml"), f"results_dir={tmp_path}/results", "repeats=3"]
    assert main([*words, "--dry-run"]) == 0
    assert "at least" not in capsys.readouterr().out
    assert main([*words, "--dry-run", "--cluster", "h100"]) == 0
    _, _, measured, predicted, total, _, rest = capsys.readouterr().out.splitlines()
    assert measured.split() == ["ddp", "4", "3", "missing", "2,", "ok", "1", "1800.0", "4.000"]
    (result,) = seconds(Forecast("h100"), planned[1:])
    assert result is not None
    hours = f"{result * 8 * 3 / 3600:.3f}"
    assert predicted.split() == ["ddp", "8", "3", "missing", "at", "least", f"{result:.1f}", "at", "least", hours]
    assert total.startswith("6 cells: missing 5, ok 1")
    assert rest.startswith("remaining, one after another: at least ")
    assert "no finished run" not in rest


def test_a_plan_refuses_bf16_on_a_cluster_whose_gpu_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write(tmp_path, keys=KEYS | {"train.precision": "bf16"})
    words = [str(study), f"results_dir={tmp_path}/results", "--slurm", "--dry-run", "--cluster"]
    assert main([*words, "lassen"]) == 0
    sentence = "Tesla V100-SXM2-16GB has no bf16: set train.precision=fp16 or fp32"
    (refused,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("unsupported ("))
    assert refused.endswith(sentence)
    assert main([*words, "h100"]) == 0
    assert "unsupported" not in capsys.readouterr().out
