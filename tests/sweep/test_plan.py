"""The cells of a study, their order, and what is known of them before they start, also the oracle's seconds."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ddlbench.config.choices import choices, conf_dir
from ddlbench.config.compose import configuration
from ddlbench.errors import UserError
from ddlbench.oracle.machine.machine import load as load_machine
from ddlbench.predict.__main__ import main as predict
from ddlbench.results.tables.merge import LAYOUT
from ddlbench.sweep.__main__ import main
from ddlbench.sweep.plan import INVALID, Cell, key_of, plan, predicted_s
from ddlbench.sweep.study import load, names
from tests.sweep.studies import CPU, KEYS, planned, record, write

GPUS = [2**n for n in range(11)]
TEXT, RESNETS = ("gpt2_small", "gpt2_medium"), ("resnet50", "resnet101", "resnet152")
KAHIRA = (*RESNETS, "vgg16")
PLANNED: dict[str, list[tuple[Any, ...]]] = {  # the values on the axes of every cell
    "lin2022": [
        *product(("ddp", "zero2"), ("vgg16", "resnet50", *TEXT), GPUS[:7]),
        *product(("tensor", "megatron"), TEXT, GPUS[:7]),  # Megatron-LM trains transformers alone
        # Pipelines have no more stages than the models have blocks.
        *product(("gpipe", "pipedream"), ("vgg16", "resnet50", "gpt2_medium"), GPUS[:5]),
        *product(("gpipe", "pipedream"), ("gpt2_small",), GPUS[:4]),
    ],
    "aach2023": [
        *product(("ddp", "horovod", "zero1"), ("native",), RESNETS, GPUS[2:]),
        *product(("ddp", "horovod", "zero1"), ("dali",), ("cpu", "gpu"), RESNETS, GPUS[2:]),
    ],
    "aach2023_batch": [*product(("aach2023_step", "aach2023_exponential", "aach2023_cosine"), GPUS[2:])],
    "kahira2021": [
        *product(("ddp",), KAHIRA, [1, *GPUS[4:]]),
        *product(("tensor", "channel"), (None,), KAHIRA, GPUS[2:7]),
        *product(("tensor",), (4,), KAHIRA, GPUS[4:]),
        *product(("spatial",), KAHIRA, (4, *GPUS[4:])),
        *product(("gpipe",), (1,), KAHIRA, (2, 4)),
    ],
    "gusak2022": [  # Adam is fused, and on the CPU
        *product(("zero0", "zero1", "zero2", "zero3"), ("adamw",), (False, True), (False,), (16,)),
        *product(("zero2", "zero3"), ("adamw",), (False,), (True,), (16,)),
        ("zero0", "adamw8bit", False, False, 16),
    ],
    "levers_gpu": [
        *product(("single", "megatron", "fsdp", "zero3"), (1,), (False,), (False,), ("adamw",), (1,)),
        *product(("single", "megatron"), (128,), (False,), (False,), ("adamw",), (1,)),
        ("single", 1, True, False, "adamw", 1),
        ("single", 1, False, True, "adamw", 1),
        ("single", 1, False, False, "adamw8bit", 1),
    ],
}
PLANNED["lin2022_lassen"] = PLANNED["lin2022"]


def test_each_seed_and_repeat_is_a_cell_of_its_own(tmp_path: Path) -> None:
    cells = planned(write(tmp_path, repeats=3, seeds=[0, 5]))
    assert len(cells) == len({cell.key for cell in cells}) == 3 * 3 * 2
    assert Counter(cell.name for cell in cells) == {"single gpus=1": 6, "ddp gpus=1": 6, "ddp gpus=2": 6}
    assert {cell.words[-2:] for cell in cells} == {
        (f"train.seed={seed}", f"train.repeat={repeat}") for seed in (0, 5) for repeat in range(3)
    }


def test_a_cell_has_the_identity_of_the_run_that_its_words_start(tmp_path: Path) -> None:
    for cell in planned(write(tmp_path, repeats=2, seeds=[7])):
        identity = configuration(*cell.words).identity()
        assert cell.key == key_of(identity, cell.gpus)


def test_a_cell_that_saves_continues_when_it_is_started_again(tmp_path: Path) -> None:
    keys = {**KEYS, "checkpoint.every": 1}
    for cell in planned(write(tmp_path, keys=keys)):
        assert "checkpoint.resume=true" in cell.words
        config = configuration(*cell.words)
        assert config.checkpoint.resumes({})
        assert cell.key == key_of(config.identity(), cell.gpus)
    assert not any("checkpoint.resume=true" in cell.words for cell in planned(write(tmp_path)))


@pytest.mark.parametrize(
    ("key", "one", "other"), [("train.timeout_s", 3, 4), ("cluster.name", "a", "b"), ("train.clip_norm", 1, 1.0)]
)
def test_two_values_that_measure_the_same_are_refused(tmp_path: Path, key: str, one: object, other: object) -> None:
    """The cells of one of them would be lost."""
    said = f"tiny: single gpus=1 {key}={one} measures the same as single gpus=1 {key}={other}: give one of these values"
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        planned(write(tmp_path), f"{key}=[{one},{other}]")


def test_the_order_is_random_within_each_repeat_and_the_same_for_a_seed(tmp_path: Path) -> None:
    axes = {"framework": ["ddp", "fsdp", "zero1"], "gpus": [1, 2], "train.micro_batch": [1, 2]}
    study = write(tmp_path, axes=axes, exclude=[], repeats=4)
    cells = planned(study)
    assert [cell.repeat for cell in cells] == [repeat for repeat in range(4) for _ in range(12)]
    blocks = [[cell.name for cell in cells[start : start + 12]] for start in range(0, 48, 12)]
    assert len({tuple(block) for block in blocks}) == 4  # by chance once in 479001600
    assert all(sorted(block) == sorted(blocks[0]) for block in blocks)
    assert planned(study) == cells
    assert [cell.key for cell in planned(study, "order=1")] != [cell.key for cell in cells]


def test_unsupported_cells_have_their_reason_and_one_run(tmp_path: Path) -> None:
    axes = {"framework": ["ddp", "single"], "gpus": [2]}
    cells = planned(write(tmp_path, axes=axes, exclude=[], repeats=6))
    assert Counter(cell.values["framework"] for cell in cells) == {"ddp": 6, "single": 1}
    (refused,) = [cell.refused for cell in cells if cell.refused]
    assert refused[0] == "unsupported"
    assert "framework=single runs in one process, this launch has 2" in refused[1]


def test_a_layout_whose_loader_cannot_run_alone_is_one_unsupported_cell(tmp_path: Path) -> None:
    axes = {"framework": ["ddp", "fsdp"], "gpus": [1]}
    cells = planned(write(tmp_path, axes=axes, exclude=[], repeats=2), "mode=loader")
    assert Counter((cell.values["framework"], bool(cell.refused)) for cell in cells) == {
        ("ddp", False): 2,
        ("fsdp", True): 1,
    }


def test_a_combination_that_cannot_be_composed_is_one_invalid_cell(tmp_path: Path) -> None:
    cells = planned(write(tmp_path, axes={"framework": ["ddp"], "model.image_size": [16, 32]}, exclude=[]))
    refused = [cell.refused and cell.refused[0] for cell in sorted(cells, key=lambda cell: cell.place)]
    assert refused == [INVALID, None]


@pytest.mark.parametrize(
    ("word", "why"), [("train.epohcs=3", r".*train\.epohcs"), ("mode=rehearsal", "mode=rehearsal records nothing")]
)
def test_a_study_of_which_no_cell_can_run_is_an_error(tmp_path: Path, word: str, why: str) -> None:
    """A rehearsal leaves no record: every sweep would run it again."""
    with pytest.raises(UserError, match=f"no cell can run: {why}"):
        planned(write(tmp_path), word)


def test_the_machine_is_no_part_of_a_cell(tmp_path: Path) -> None:
    here = planned(write(tmp_path))
    there = planned(write(tmp_path), "cluster=slurm", "data.root=/data", "results_dir=/elsewhere")
    assert {cell.key for cell in here} == {cell.key for cell in there}


OF_PAPERS = {"lin2022_laptop": 45, "aach2023_laptop": 28, "kahira2021_laptop": 24, "gusak2022_laptop": 11}  # cells


def test_every_ready_study_has_a_title_and_cells_that_are_supported_on_a_cpu() -> None:
    """The others are planned below, all of their cells."""
    assert all(names().values())
    for name in set(names()) - {*PLANNED, *OF_PAPERS, *choices("experiment")}:
        assert any(cell.refused is None for cell in plan(load(name, ["repeats=1"]), CPU)), name


@pytest.mark.parametrize("name", PLANNED)
def test_a_study_runs_on_gpus_as_planned_without_one(name: str) -> None:
    study = load(name, ["repeats=1"])
    cells = plan(study, torch.device("cuda", 0))
    assert [cell.name for cell in cells if cell.refused] == []
    assert Counter(tuple(cell.values.values()) for cell in cells) == Counter(PLANNED[name] * len(study.seeds))


def test_every_study_for_gpus_is_planned() -> None:
    studies = {path.stem for path in (conf_dir() / "study").glob("*.yaml")}
    assert set(PLANNED) == {name for name in studies if "laptop" not in name}


@pytest.mark.parametrize("name", OF_PAPERS)
def test_a_small_study_of_a_paper_runs_on_a_laptop(name: str) -> None:
    cells = plan(load(name, ["repeats=1"]), CPU)
    assert (len(cells), [cell.name for cell in cells if cell.refused]) == (OF_PAPERS[name], [])


@pytest.mark.parametrize("name", choices("experiment"))
def test_an_experiment_is_one_cell_and_its_command_runs_it(name: str) -> None:
    cells = plan(load(name), CPU)
    assert len({(cell.family, cell.gpus, cell.refused) for cell in cells}) == 1
    assert cells[0].refused is None
    text = (conf_dir() / "experiment" / f"{name}.yaml").read_text()
    comment = " ".join(line.lstrip("# ").rstrip("\\") for line in text.splitlines() if line.startswith("#"))
    options, words = comment.partition("Command, where data.root=FOLDER names the data:")[2].split(
        "python -m ddlbench "
    )
    nodes, tasks = (int(result) for result in re.findall(r"-N(\d+) --ntasks-per-node=(\d+)", options)[0])
    assert nodes * tasks == cells[0].gpus
    identity = configuration(*words.split()).identity()
    first = next(cell for cell in cells if cell.repeat == 0)
    assert first.key == key_of(identity, first.gpus)


NOT_MEASURED = ("gpus", "batch", "profile", *LAYOUT)


@pytest.mark.parametrize("name", [name for name in names() if name != "laptop"])
def test_cells_that_differ_in_the_gpu_count_alone_are_a_curve(name: str) -> None:
    """Their other keys are equal: two values of train.steps would put them into two comparisons, without a speedup."""
    study = load(name)
    curves: dict[str, set[str]] = {}
    for point in study.points():
        keys = {key: value for key, value in study.keys_of(point).items() if key not in NOT_MEASURED}
        others = {axis: value for axis, value in point.items() if axis not in ("gpus", "batch")}
        curves.setdefault(str(others), set()).add(str(sorted(keys.items())))
    assert {point: keys for point, keys in curves.items() if len(keys) > 1} == {}


SMALL = [f"{key}={str(value).replace(' ', '')}" for key, value in KEYS.items() if key.startswith("model.")]


def two_cells(folder: Path, *words: str, framework: str = "ddp", keys: Mapping[str, object] = {}) -> list[Cell]:
    """On 4 and on 8 GPUs."""
    study = write(
        folder, axes={"framework": [framework], "gpus": [4, 8]}, exclude=[], keys=KEYS | {"batch": 64} | dict(keys)
    )
    return sorted(plan(load(str(study), words), torch.device("cuda")), key=lambda cell: cell.gpus)


def seconds(cells: list[Cell]) -> list[float | None]:
    """On H100."""
    return [predicted_s(load_machine("h100"), cell) for cell in cells]


def step_s(capsys: pytest.CaptureFixture[str], *words: str) -> list[float]:
    """As python -m ddlbench.predict says it."""
    words = ("+framework=ddp", "+model=resnet50", "cluster=h100", "gpus=[4,8]", "train.global_batch=64", *words)
    assert predict([*words, "--json"]) == 0
    return [row["step_s"] for row in json.loads(capsys.readouterr().out)]


def test_the_seconds_are_those_of_the_oracle_for_all_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 epochs of 10 steps; of ImageNet's 1,281,167 images 20,018 batches of 64 in each of 2 epochs, also where
    train.steps would allow more."""
    short = two_cells(tmp_path, keys={"train.steps": 10, "train.epochs": 3})
    assert seconds(short) == pytest.approx([30 * each for each in step_s(capsys, *SMALL)])
    synthetic = two_cells(tmp_path, keys={"train.steps": None, "loader.train_samples": 700})  # 10 batches of 64
    assert seconds(synthetic) == pytest.approx([10 * each for each in step_s(capsys, *SMALL)])
    expected = [2 * 20_018 * each for each in step_s(capsys, *SMALL)]
    for steps in (None, 1_000_000):
        keys = {"train.steps": steps, "train.epochs": 2, "data": "imagenet"}
        assert seconds(two_cells(tmp_path, "data.root=/data", keys=keys)) == pytest.approx(expected)


def test_cells_whose_updates_cost_different_times_share_no_computation(tmp_path: Path) -> None:
    """SGD without momentum reads and writes 12 bytes for each parameter instead of 20."""
    keys = {"train.steps": 100, "recipe": "sgd"}
    plain, with_momentum = (
        seconds(two_cells(tmp_path, keys=keys | {"recipe.optimizer.momentum": value})) for value in (0.0, 0.9)
    )
    assert all(
        one is not None and other is not None and one < other for one, other in zip(plain, with_momentum, strict=True)
    )


def test_what_is_not_known_is_empty(tmp_path: Path) -> None:
    """The length of an epoch of the sample images; a cell without a model; a cell that is refused."""
    assert seconds(two_cells(tmp_path, keys={"mode": "loader"})) == [None, None]
    assert seconds(two_cells(tmp_path, keys={"train.steps": None})) == [None, None]
    four, eight = two_cells(tmp_path, framework="gpipe")  # of six blocks there are no eight stages
    assert (four.refused is None, eight.refused is None) == (True, False)
    assert [result is None for result in seconds([four, eight])] == [False, True]


def test_a_plan_marks_what_is_predicted_and_prefers_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = two_cells(tmp_path, keys={"train.steps": 100_000})
    record(tmp_path / "results", planned[0], "ok", seconds=1800)
    words = [str(tmp_path / "tiny.yaml"), f"results_dir={tmp_path}/results", "repeats=3"]
    assert main([*words, "--dry-run"]) == 0
    assert "at least" not in capsys.readouterr().out
    assert main([*words, "--dry-run", "--cluster", "h100"]) == 0
    _, _, measured, predicted, total, _, rest = capsys.readouterr().out.splitlines()
    assert measured.split() == ["ddp", "4", "3", "missing", "2,", "ok", "1", "1800.0", "4.000"]
    (result,) = seconds(planned[1:])
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
    assert main([*words, "moon"]) == 2
    assert "cluster=moon is not known" in capsys.readouterr().err
