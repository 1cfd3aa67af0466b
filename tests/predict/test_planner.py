"""--plan: every layout is tried once, the best one is the best of all, and what is printed can run. --from with several
layouts of a framework, each of which has its runs on a few devices."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from ddlbench.config.compose import configuration, supports
from ddlbench.oracle.measured.inputs import machine_of
from ddlbench.oracle.predictor import Prediction, job_of, predict
from ddlbench.oracle.runs import Results
from ddlbench.predict import ranking
from ddlbench.predict.__main__ import main, show_plans
from ddlbench.predict.question import ask
from ddlbench.predict.ranking import SHOWN, command
from ddlbench.predict.rows import inputs_of, plans, predictions
from ddlbench.results.rows import group_by
from ddlbench.results.tables.merge import AttemptRow
from tests.oracle.made import ABCI, record
from tests.support.rehearsals import MODELS

Capture = pytest.CaptureFixture[str]
GPT2 = (
    "+model=gpt2_small", "model.n_layer=4", "model.n_embd=64", "model.n_head=4", "model.seq_len=64",
    "model.vocab_size=512", "cluster=juwels_booster", "train.precision=bf16",
)  # fmt: skip

SLOW = ("horovod", "zero0", "zero1", "zero2", "zero3")  # to rehearse, or not installed


@cache
def planned(*words: str, model: tuple[str, ...] = GPT2) -> list[Prediction]:
    question = ask(["--plan", *model, *words])
    return ranking.ranked(predictions(question, machine_of(question.machine)))


def test_layouts_share_layers_within_a_node_and_are_tried_once() -> None:
    """16 GPUs, 4 in a node: tensor parallelism of 2 and 4, stages and replicas on the other GPUs, with and without
    shards."""
    config = configuration("+framework=hybrid", *GPT2[:6], "train.global_batch=16", "train.micro_batch=2")
    made = [config.framework for config in plans(config, ["train.micro_batch=2"], 16, 4)]
    layouts: Any = [(framework.dp, framework.tp, framework.pp, framework.sharded) for framework in made]
    plain = [(4, 2, 2, False), (2, 2, 4, False), (1, 2, 8, False), (2, 4, 2, False), (1, 4, 4, False)]
    sharded = [(4, 2, 2, True), (2, 2, 4, True), (2, 4, 2, True)]
    assert sorted(layouts) == sorted(2 * [*plain, *sharded])  # with and without recomputation
    (kept,) = {made.framework.sharded for made in plans(config, ["framework.sharded=false"], 16, 4)}
    assert kept is False


def test_micro_batches_divide_the_batch_of_a_replica() -> None:
    config = configuration("+framework=ddp", *GPT2[:6], "train.global_batch=24")
    sizes = [made.train.micro_batch for made in plans(config, ["train.checkpoint_activations=false"], 2, 4)]
    assert sizes == [1, 2, 4, 12]  # of 12: powers of two, and all


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2_small", "resnet50"])
def test_plans_need_the_memory_that_they_state(model: str) -> None:
    """Five of the printed plans of each model, all of different frameworks, against rehearsals of the same jobs; of
    GPT-2 also one of ZeRO, which takes long."""
    words = {"gpt2_small": GPT2, "resnet50": (f"+model={model}", *MODELS[model], *GPT2[6:])}[model]
    best = ranking.fitting(planned("gpus=4", "train.global_batch=32", model=words))
    fastest = [row for row, *_ in group_by(best, lambda row: row.framework).values()]
    printed = {row.framework: row for row in reversed([*best[:SHOWN], *fastest[1:]])}
    rows = [row for row in printed.values() if row.framework not in SLOW][-5:]
    rows += [printed["zero2"]] if model == "gpt2_small" else []
    errors = [(row.memory_bytes or 0.0) / rehearsed_bytes(row, words) - 1 for row in rows]
    assert len(errors) >= 5
    outside = {
        f"{command(row)} (error {row.memory_error})": error
        for row, error in zip(rows, errors, strict=True)
        if abs(error) > (row.memory_error or 0.0)
    }
    assert not outside


def rehearsed_bytes(row: Prediction, model: Sequence[str]) -> float:
    """Peak bytes of the fullest rank of a plan."""
    question = ask([*model, f"gpus={row.gpus}"])
    config, machine = configuration(*command(row).split(), *question.words), machine_of(question.machine)
    exact = predict(config, row.gpus, replace(inputs_of(question, config, machine), exact_memory=True))
    assert exact.memory_error == 0.0, exact.marks
    return exact.memory_bytes or 0.0


def exhaustive() -> list[Prediction]:
    """Every degree of four frameworks on 8 GPUs, 1f1b with and without shards, and micro batches from 1 to the whole
    batch, one by one."""
    question = ask([*GPT2, "gpus=8", "train.global_batch=16"])
    machine = machine_of(question.machine)
    every: list[Prediction] = []
    for name in ("ddp", "zero3", "tensor", "1f1b"):
        config = configuration(f"+framework={name}", *question.words)
        inputs = inputs_of(question, config, machine)
        framework: Any = config.framework
        shapes: list[Any] = [framework]
        if name == "tensor":
            shapes = [replace(framework, tp=tp, dp=8 // tp) for tp in (2, 4)]
        if name == "1f1b":
            shapes = [replace(framework, pp=pp, dp=8 // pp, sharded=on) for pp in (2, 4, 8) for on in (False, True)]
        for shape in shapes:
            for size in range(1, 17):
                for recompute in (False, True):
                    train = replace(config.train, micro_batch=size, checkpoint_activations=recompute)
                    every.append(predict(replace(config, train=train, framework=shape), 8, inputs))
    return every


def test_the_best_plan_is_the_best_of_all_that_can_be_configured() -> None:
    every = exhaustive()
    rows = planned("gpus=8", "train.global_batch=16")
    for names in ({"ddp", "zero3", "tensor", "1f1b"}, {"1f1b"}):
        chosen, best = (ranking.fitting([row for row in all_ if row.framework in names])[0] for all_ in (rows, every))
        assert (chosen.framework, chosen.step_s, chosen.layout) == (best.framework, best.step_s, best.layout)


def test_a_plan_says_whether_replicas_of_a_pipeline_have_shards() -> None:
    rows = [row for row in planned("gpus=8", "train.global_batch=16") if row.framework == "1f1b" and row.status == "ok"]
    for row in rows:
        sharded = row.settings["framework.sharded"]
        assert sharded == ("framework.sharded=true" in command(row)) == (" sharded " in ranking.which(row)[1])
        assert row.layout.get("shards", 1) == (row.layout["dp"] if sharded else 1)
    assert {row.settings["framework.sharded"] for row in rows} == {False, True}


def test_every_plan_passes_the_check_of_its_framework() -> None:
    rows = [row for row in planned("gpus=8", "train.global_batch=16") if row.status == "ok"]
    names = {row.framework for row in rows}
    assert names >= {"ddp", "fsdp", "zero3", "tensor", "gpipe", "hybrid"}
    assert names.isdisjoint({"local_sgd", "parameter_server", "pipedream", "pipedream_2bw"}), "they train otherwise"
    machine = machine_of("juwels_booster")
    for row in rows:
        config = configuration(*command(row).split(), *GPT2[:6], GPT2[7])
        supports(config.framework, job_of(config, 8, machine))


def test_the_measured_step_of_the_command_line_is_that_of_its_micro_batch() -> None:
    rows = planned("+framework=single", "gpus=1", "train.batch_per_gpu=8", "--one-gpu-step-s", "0.5")
    steps = {tuple(row.settings.values())[-2:]: row.step_s for row in rows}
    assert steps[8, False] == pytest.approx(0.5)
    assert steps[1, False] > 0.5


def test_given_keys_are_kept() -> None:
    words = ("gpus=4", "train.global_batch=16", "train.micro_batch=2", "train.checkpoint_activations=true")
    rows = planned("+framework=ddp", *words)
    assert {row.settings["train.micro_batch"] for row in rows} == {2}
    assert {row.settings["train.checkpoint_activations"] for row in rows} == {True}


def test_the_command_prints_the_best_its_contrast_and_how_to_run_it(capsys: Capture) -> None:
    assert main(["--plan", *GPT2, "gpus=4", "train.global_batch=16"]) == 0
    said = capsys.readouterr().out
    best = ranking.fitting(planned("gpus=4", "train.global_batch=16"))[0]
    assert f"to run it: {command(best)}" in said
    assert "plans of 19 frameworks at 4 GPUs, 16 samples an update" in said
    assert "the best of each other framework:" in said
    lines = [line for line in said.splitlines() if " micro batch " in line and " GiB " in line]
    assert len(lines) > SHOWN
    assert all("of the step" in line for line in lines)  # why it takes its time


def test_what_the_best_plan_of_each_framework_starts_from_is_said_too(capsys: Capture) -> None:
    rows = planned("gpus=4", "train.global_batch=16")
    *_, slowest = (same[0].framework for same in group_by(ranking.fitting(rows), lambda row: row.framework).values())
    said = {"marks": ("measured elsewhere",), "learned": ("learned: spread x2.00",)}
    told = [replace(row, **said) if row.framework == slowest else row for row in rows]
    show_plans(told, machine_of("juwels_booster"), None)
    lines = capsys.readouterr().out.splitlines()
    assert {"* measured elsewhere", f"{slowest}: learned: spread x2.00"} <= {*lines}


def test_several_batches_have_their_own_headings_and_rows(capsys: Capture) -> None:
    words = ["--plan", *GPT2, "+framework=ddp", "gpus=2", "train.global_batch=[8,16]"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert [said.count(f"{batch} samples per update") for batch in (8, 16)] == [1, 1]
    assert "samples per GPU" not in said
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["settings"]["train.global_batch"] for row in rows} == {8, 16}


def test_a_framework_without_a_key_that_is_given_has_no_plan(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`framework.sharded` is a key of pipelines: the others are named, and are no cell of the map."""
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    words = ["gpus=4", "train.global_batch=16", "framework.sharded=true", "--figure", str(tmp_path / "map.svg")]
    assert main(["--plan", *GPT2, *words]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("plans of") == 1
    assert "refused: ddp at 4: framework.sharded does not exist" in captured.out
    assert captured.err == ""
    drawn, (best,) = (tmp_path / "map.svg").read_text(), re.findall(r"to run it: \+framework=(\S+)", captured.out)
    assert best in drawn
    assert "nothing fits" not in drawn


def test_a_map_of_all_gpu_counts_and_batches_keeps_the_limit_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["gpus=[2,4]", "train.global_batch=[8,16]", f"--figure={tmp_path / 'map.svg'}", "--max-memory-gib=0.001"]
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    assert main(["--plan", *GPT2, "+framework=ddp", *words]) == 3
    assert (tmp_path / "map.svg").read_text().count("nothing fits") == 2 * 2
    assert matplotlib.image.imread(tmp_path / "map.png")[:3, :, :3].min() == 1, "the title is not cut"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train.global_batch=16", "framework.tp=2"], 2, "framework.tp=2: --plan chooses the layout"),
        (["train.global_batch=16", "--timeline", "x.json"], 2, "leave --timeline out"),
        (["train.global_batch=16", "--exact-memory"], 2, "leave --exact-memory out"),
        (
            ["train.global_batch=16", "+framework=hybrid", "gpus=1", "--figure=x"],
            2,
            "framework=hybrid has no layout for gpus=1, 1 a node",
        ),
        (["train.global_batch=[8,x]"], 2, "train.global_batch=[8,x] must be numbers"),
        (
            ["train.global_batch=3", "+framework=ddp"],
            3,
            "none is possible: train.global_batch=3 does not divide over 4 replicas",
        ),
        (
            ["train.global_batch=16", "train.micro_batch=4", "+framework=ddp", "--max-memory-gib=0.001"],
            3,
            "none is possible: the plan that needs the least memory is +framework=ddp train.global_batch=16 "
            "train.micro_batch=4 train.checkpoint_activations=true, with 0.0",
        ),
    ],
)
def test_without_a_plan_what_is_short_is_said(words: list[str], code: int, said: str, capsys: Capture) -> None:
    gpus = [] if "gpus=1" in words else ["gpus=4"]
    assert main(["--plan", *GPT2, *gpus, *words]) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert "Traceback" not in captured.err


def test_the_advice_of_lin_et_al_comes_out() -> None:
    """Data parallel where the model fits, with or without shards; shards where memory is short; then tensor parallelism
    within a node (Lin et al. 2022, V), here together with stages."""
    model = ("+model=gpt2_medium", "cluster=juwels_booster", "train.precision=bf16", "train.global_batch=128")
    rows = planned("gpus=16", model=model)
    data, shards = {"ddp", "horovod", "zero0"}, {"fsdp", "zero1", "zero2", "zero3"}
    best, *others = ranking.fitting(rows)
    assert {row.framework for row in (best, *others) if not ranking.separated(best, row)} <= data | shards
    ddp = next(row for row in others if row.framework in data)  # the whole update of the weights on each rank
    assert (ddp.step_s or 0) < 1.1 * (best.step_s or 0)
    assert ranking.fitting(rows, max_memory=5e9)[0].framework in shards  # weights and AdamW of ddp: 5.7 GB
    best, *others = ranking.fitting(rows, max_memory=2.5e9)
    assert {row.framework for row in (best, *others)}.isdisjoint(data | shards)
    tp, sharded = (best.settings.get(f"framework.{key}") for key in ("tp", "sharded"))
    assert (best.framework, tp, sharded) == ("hybrid", 2, True)  # of 4 GPUs in a node
    tensor = next(row for row in others if row.framework == "tensor")
    assert 2 < (tensor.step_s or 0) / (best.step_s or 1) < 3


WORDS = ("+framework=tensor", "+model=gpt2_small", "model.n_layer=2", "model.n_embd=64", "model.n_head=4",
         "model.vocab_size=256", "model.seq_len=32", "train.global_batch=32")  # fmt: skip


def predicted(seconds: dict[int, float], *options: str) -> list[Prediction]:
    """The rows of 4 GPUs. seconds: of a measured step, by tensor parallel ranks"""
    asked, attempts = configuration(*WORDS), list[AttemptRow]()
    for tp, step_s in seconds.items():
        framework: Any = asked.framework
        layout = replace(framework, dp=4 // tp, tp=tp)
        ledger = {"global_batch": 32, "data_size": 4 // tp, "micro_batches": 1}
        attempts.append(record(replace(asked, framework=layout), 4, step_s, ledger=ledger))
    results = Results(Path("results"), attempts)
    return predictions(ask([*WORDS, "cluster=abci", "gpus=4", *options]), ABCI, results)


@pytest.mark.parametrize(("seconds", "fastest"), [({2: 0.5, 4: 0.45}, 4), ({2: 0.45, 4: 0.5}, 2), ({4: 0.5}, 4)])
def test_each_layout_is_predicted_from_its_run(seconds: dict[int, float], fastest: int) -> None:
    """A run that a prediction starts from comes back as it was measured; a layout without a run is left out."""
    (row,) = predicted(seconds)
    assert row.layout == {"dp": 4 // fastest, "tp": fastest}
    assert row.step_s == pytest.approx(seconds[fastest])


def test_a_plan_starts_from_the_run_of_its_layout_with_the_micro_batch_that_was_measured() -> None:
    """Layouts without a run are no plans. The run had one micro batch of 32, and no recomputation."""
    rows = predicted({4: 0.5}, "--plan")
    assert {row.layout["tp"] for row in rows} == {4}
    keys = ("train.micro_batch", "train.checkpoint_activations")
    seconds = {tuple(row.settings[key] for key in keys): row.step_s for row in rows}
    assert seconds[32, False] == pytest.approx(0.5)
