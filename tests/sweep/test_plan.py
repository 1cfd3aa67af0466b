"""The cells of a study, their order, and what is known of them before they start."""

from __future__ import annotations

import re
import time
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ddlbench.config.choices import choices, conf_dir
from ddlbench.config.compose import configuration
from ddlbench.errors import UserError
from ddlbench.results.tables.merge import LAYOUT
from ddlbench.sweep.plan import INVALID, Cell, key_of, plan
from ddlbench.sweep.study import load, names
from tests.sweep.studies import CPU, KEYS, planned, write

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


def test_a_combination_that_cannot_be_composed_is_one_invalid_cell(tmp_path: Path) -> None:
    cells = planned(write(tmp_path, axes={"framework": ["ddp"], "model.image_size": [16, 32]}, exclude=[]))
    refused = [cell.refused and cell.refused[0] for cell in sorted(cells, key=lambda cell: cell.place)]
    assert refused == [INVALID, None]


def test_a_study_of_which_no_cell_can_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no cell can run: .*train\.epohcs"):
        planned(write(tmp_path), "train.epohcs=3")


def test_a_rehearsal_is_no_cell(tmp_path: Path) -> None:
    """It leaves no record: every sweep would run it again."""
    with pytest.raises(UserError, match="no cell can run: mode=rehearsal records nothing"):
        planned(write(tmp_path), "mode=rehearsal")


def test_the_machine_is_no_part_of_a_cell(tmp_path: Path) -> None:
    here = planned(write(tmp_path))
    there = planned(write(tmp_path), "cluster=slurm", "data.root=/data", "results_dir=/elsewhere")
    assert {cell.key for cell in here} == {cell.key for cell in there}


def test_planning_costs_the_same_for_each_of_many_cells(tmp_path: Path) -> None:
    axes = {"framework": ["ddp", "fsdp", "local_sgd", "zero1", "zero3"], "gpus": [2, 4, 8, 16, 32]}

    def cpu_seconds(settings: int) -> float:
        varied = axes | {"train.clip_norm": list(range(1, settings + 1))}
        study = load(str(write(tmp_path, axes=varied, exclude=[], repeats=5, keys=KEYS | {"batch": 64})))
        began = time.process_time()  # the load of the machine does not count
        assert len({cell.key for cell in plan(study, CPU)}) == 125 * settings
        return time.process_time() - began

    few, many = cpu_seconds(4), cpu_seconds(40)
    assert many < 30 * few  # 10 times as many cells; compared pair by pair they would take 100 times as long


@cache
def once(name: str) -> list[Cell]:
    """The cells of a ready study without repeats, on a CPU."""
    return plan(load(name, ["repeats=1"]), CPU)


def test_every_ready_study_has_cells_that_are_supported() -> None:
    """On a CPU. Those for GPUs are planned below, all of their cells."""
    assert all(names().values()), "each has a title"
    for name in sorted(set(names()) - set(PLANNED)):
        assert any(cell.refused is None for cell in once(name)), name


@pytest.mark.parametrize("name", PLANNED)
def test_a_study_runs_on_gpus_as_planned_without_one(name: str) -> None:
    study = load(name, ["repeats=1"])
    cells = plan(study, torch.device("cuda", 0))
    assert [cell.name for cell in cells if cell.refused] == []
    assert Counter(tuple(cell.values.values()) for cell in cells) == Counter(PLANNED[name] * len(study.seeds))


def test_every_study_for_gpus_is_planned() -> None:
    studies = {path.stem for path in (conf_dir() / "study").glob("*.yaml")}
    assert set(PLANNED) == {name for name in studies if "laptop" not in name}


@pytest.mark.parametrize(
    ("name", "cells"),
    [("lin2022_laptop", 45), ("aach2023_laptop", 28), ("kahira2021_laptop", 24), ("gusak2022_laptop", 11)],
)
def test_a_small_study_of_a_paper_runs_on_a_laptop(name: str, cells: int) -> None:
    assert (len(once(name)), [cell.name for cell in once(name) if cell.refused]) == (cells, [])


@pytest.mark.parametrize("name", choices("experiment"))
def test_an_experiment_is_one_cell_and_its_command_runs_it(name: str) -> None:
    cells = plan(load(name), CPU)
    assert len({(cell.family, cell.gpus) for cell in cells}) == 1
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
