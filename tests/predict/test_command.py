"""python -m ddlbench.predict, by its command line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.oracle.bands import worst_error
from ddlbench.oracle.machine.machine import Sweep, load
from ddlbench.oracle.predictor import Inputs, Prediction
from ddlbench.predict import __main__ as command_line
from ddlbench.predict import rows as command
from ddlbench.predict.__main__ import main
from ddlbench.predict.figure import draw
from ddlbench.predict.question import Question, parser
from ddlbench.ranks.launch import Launch
from ddlbench.recipe.optimizers import Costs, Entry, optimizers
from ddlbench.rehearsal.rehearse import rehearse
from tests.support.originals import PARAMETERS

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
Rows = Callable[..., list[dict[str, Any]]]
Error = Callable[..., str]
TINY = ("+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=16", "model.image_size=64")
EXAMPLE = Path(__file__).parents[2] / "results" / "example"
KEYS = {
    "framework", "gpus", "step_s", "compute_s", "comm_exposed_s", "comm_hidden_s", "bubble_s", "data_s", "memory_bytes",
    "memory_error", "fits", "reason",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_measured_here(monkeypatch: Patch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Links that were calibrated on this machine would give answers where the tests expect refusals."""
    monkeypatch.setenv("DDLBENCH_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture
def rows(capsys: Capture) -> Rows:
    """The rows of a command line."""

    def made(*words: str) -> list[dict[str, Any]]:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return made


@pytest.fixture
def error(capsys: Capture) -> Error:
    """The line that refuses a command line."""

    def said(*words: str) -> str:
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return said


def write_cluster(path: Path, device: str, per_node: int, memory: object) -> None:
    """memory: bytes of a device, or of a node of CPUs"""
    link = "{name: any, alpha_s: 1e-6, bytes_per_s: 1e+9}"
    made = f"{{name: made, type: {device}, memory_bytes: {memory}, bytes_per_s: null}}"
    path.write_text(f"name: made\ndevices_per_node: {per_node}\nlinks: [{link}, {link}]\ndevice: {made}\n")
    load.cache_clear()


def test_json_has_its_documented_keys(rows: Rows) -> None:
    (row,) = rows(*TINY, "+framework=ddp", "cluster=abci", "gpus=16")
    assert set(row) >= KEYS
    parts = row["compute_s"] + row["comm_exposed_s"] + row["bubble_s"] + (row["data_s"] or 0)
    assert row["step_s"] == pytest.approx(parts)
    assert row["memory_bytes"] == pytest.approx(sum(row["memory"].values()))
    assert row["data_s"] is None  # nothing is known of the loader


@pytest.mark.parametrize(
    ("framework", "degrees"),
    [
        ("tensor", {"tp": 2}),
        ("hybrid", {"tp": 1, "pp": 2}),
        ("1f1b", {"pp": 2}),
        ("spatial", {"sp": 2}),
        ("channel", {"tp": 2}),
    ],
)
def test_replicas_follow_the_number_of_gpus(rows: Rows, framework: str, degrees: dict[str, int]) -> None:
    text = ("+model=gpt2_small", "model.n_layer=4", "model.n_embd=64", "model.n_head=4")
    model = TINY if framework in ("spatial", "channel") else text
    given = [f"framework.{key}={degree}" for key, degree in degrees.items()]
    words = (f"+framework={framework}", "framework.dp=null", *given, "train.batch_per_gpu=16", "train.micro_batch=4")
    made = rows(*model, *words, "cluster=juwels_booster", "gpus=[2,4,16]")
    assert [row["layout"]["dp"] for row in made] == [1, 2, 8]
    assert all(row["layout"].get(key, 1) == degree for row in made for key, degree in degrees.items())


@pytest.mark.parametrize(("recipe", "states"), [("sgd", 1), ("lars", 1), ("adamw", 2)])
def test_an_optimizer_without_momentum_keeps_nothing(rows: Rows, recipe: str, states: int) -> None:
    """Momentum is a state of sgd and lars alone: 4 bytes a parameter for each state."""
    words = (*TINY, "+framework=ddp", "cluster=abci", "gpus=4", f"recipe={recipe}")
    momentum, plain = (rows(*words, *more)[0] for more in ((), ("recipe.optimizer.momentum=0",)))
    assert momentum["memory"]["optimizer"] == states * momentum["memory"]["weights"]
    assert plain["memory"]["optimizer"] == (0 if states == 1 else momentum["memory"]["optimizer"])
    assert plain["compute_s"] < momentum["compute_s"] or states == 2


@pytest.mark.parametrize("framework", ["zero1", "tensor"])
def test_an_optimizer_needs_its_entry_alone(rows: Rows, monkeypatch: Patch, framework: str) -> None:
    """docs/extending.md: NAdam takes no norm of whole layers, so no framework may refuse it for that."""
    monkeypatch.setitem(optimizers, "nadam", Entry("torch.optim.NAdam", ("betas", "eps"), Costs(2, 28, 2)))
    (row,) = rows(*TINY, f"+framework={framework}", "cluster=h100", "gpus=4", "recipe.optimizer.name=nadam")
    assert row["status"] == "ok"
    assert row["memory"]["optimizer"] > 0


@pytest.mark.parametrize("more", [[], ["--plan"], ["--plan", "--one-gpu-step-s", "0.5"]])
def test_a_gpu_without_bf16_is_refused_as_in_a_run(capsys: Capture, more: list[str]) -> None:
    assert main([*TINY, "cluster=lassen", "gpus=8", "train.precision=bf16", *more]) == 3
    sentence = "Tesla V100-SXM2-16GB has no bf16: set train.precision=fp16 or fp32"
    assert capsys.readouterr() == ("", f"ddlbench.predict: {sentence}\n")


def test_every_framework_and_the_best(capsys: Capture) -> None:
    assert main([*TINY, "cluster=h100", "gpus=[1,4]", "--max-gpus", "4"]) == 0
    out = capsys.readouterr().out
    assert "refused: single at 4: framework=single runs in one process" in out
    assert "best with at most 4 GPUs: " in out
    assert "limit: tp <= 16 (filters of layer1_0.conv1)" in out
    assert "\nother updates: local_sgd, pipedream, pipedream_2bw: late, averaged or compressed, as chosen: " in out


@pytest.mark.parametrize("hook", ["none", "topk"])
def test_compressed_gradients_are_other_updates(capsys: Capture, hook: str) -> None:
    assert main([*TINY, "+framework=ddp", f"framework.comm_hook={hook}", "cluster=h100", "gpus=2"]) == 0
    assert ("\nother updates: ddp: " in capsys.readouterr().out) is (hook == "topk")


def test_the_heading_says_what_was_predicted_and_from_what(capsys: Capture) -> None:
    words = (*TINY, "+framework=ddp", "cluster=juwels_booster", "gpus=4")
    assert main(words) == 0
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("resnet50, 32 samples per GPU and update, sgd, fp32 (without tensor cores")
    assert second == "on juwels_booster (NVIDIA A100-SXM4-40GB, 40 GiB, 4 per node)"
    slower = "four of five steps measured on one H100 or H200 took 1.1 to 2.4 times as long"
    peak = f"each operation at the device's peak; {slower}"
    assert third == f"seconds of computing from: roofline: {peak}"
    assert main([*words, "train.precision=bf16", "train.global_batch=64", "--one-gpu-step-s", "1"]) == 0
    first, _, third, *_ = capsys.readouterr().out.splitlines()
    assert first == "resnet50, 64 samples per update, sgd, bf16"
    assert peak not in third


@pytest.mark.parametrize(
    ("cluster", "needed"),
    [("juwels_booster", "train.precision=bf16 or train.tf32=true"), ("abci", "train.precision=fp16")],
)
def test_the_heading_names_a_precision_that_the_gpu_has(cluster: str, needed: str, capsys: Capture) -> None:
    assert main([*TINY, "+framework=ddp", f"cluster={cluster}", "gpus=4"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith(f", fp32 (without tensor cores, which need {needed})")


def test_progress_is_on_a_terminal_alone(capsys: Capture, monkeypatch: Patch) -> None:
    words = (*TINY, "+framework=ddp", "cluster=h100", "gpus=4")
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(words) == 0
    assert "predicting" in capsys.readouterr().err


def test_help_lists_the_clusters_with_their_memory() -> None:
    text = " ".join(parser().format_help().split())
    assert "juwels_booster (NVIDIA A100-SXM4-40GB, 40 GiB, 4 per node)" in text
    assert "local (cpu)" in text


def test_tensor_parallelism_stays_within_a_node(rows: Rows) -> None:
    """Replicas take the rest; a degree that is given is taken."""
    words = (*TINY, "cluster=juwels_booster", "gpus=16")
    (tensor,) = rows(*words, "+framework=tensor")
    assert tensor["layout"] in ({"dp": 8, "tp": 2}, {"dp": 4, "tp": 4})
    degrees = ((f"framework.tp={tp}", f"framework.dp={16 // tp}") for tp in (2, 4))
    assert tensor["step_s"] == min(rows(*words, "+framework=tensor", *each)[0]["step_s"] for each in degrees)
    (hybrid,) = rows(*words, "+framework=hybrid")
    assert hybrid["layout"]["pp"] == 2
    assert hybrid["layout"]["tp"] in (2, 4)
    (asked,) = rows(*words, "+framework=tensor", "framework.tp=16")
    assert asked["layout"] == {"dp": 1, "tp": 16}


@pytest.mark.parametrize(("gpus", "prefix"), [(1, "at 1 GPU "), (2, "at 2 GPUs ")])
def test_the_table_has_the_epoch_the_reason_and_the_parts_of_memory(
    rows: Rows, capsys: Capture, gpus: int, prefix: str
) -> None:
    """It equals the JSON: 64 steps of 2 samples each on 2 GPUs take 64 times as long as one."""
    batch = ("train.global_batch=2", "--samples-per-epoch", "128")
    words = (*TINY, "+framework=ddp", "cluster=h100", f"gpus={gpus}", *batch)
    (row,) = rows(*words)
    assert row["epoch_s"] == pytest.approx(64 * row["step_s"])
    assert main(words) == 0
    times, memory = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("ddp "))
    assert row["reason"].startswith(prefix)
    reason = row["reason"].removeprefix(prefix).split()
    assert times[-2 - len(reason) :] == [f"{row['epoch_s']:.4g}", "s", *reason]
    parts = [*row["memory"].values(), row["memory_bytes"]]
    layout = ["dp2"] if gpus > 1 else []
    assert memory == ["ddp", *layout, str(gpus), *(f"{bytes_ / 2**30:.3f}" for bytes_ in parts)]


def test_volumes_are_printed_twice(capsys: Capture) -> None:
    """What the equations say, and what was traced."""
    assert main([*TINY, "+framework=ddp", "cluster=h100", "gpus=4", "--check-volumes"]) == 0
    out = capsys.readouterr().out
    assert "ddp at 4: all-reduce of gradients: " in out
    assert "ddp at 4: along dp: traced " in out
    assert "(+0.0%)" in out


@pytest.mark.parametrize("framework", ["ddp", "gpipe"])
def test_exact_memory_is_that_of_the_fullest_rehearsed_rank(rows: Rows, framework: str) -> None:
    words = (*TINY, f"+framework={framework}", "train.batch_per_gpu=2", "train.micro_batch=2")
    (formula,), (exact,) = (rows(*words, "cluster=h100", "gpus=2", *more) for more in ((), ("--exact-memory",)))
    assert (formula["memory_error"], exact["memory_error"]) == (worst_error(framework), 0)
    config = configuration(*words)
    ranks = [rehearse(config, Launch("torchrun", rank, 2, rank, 2), torch.device("cuda", 0)) for rank in range(2)]
    assert exact["memory_bytes"] == max((rank.memory or {})["peak"] or 0 for rank in ranks)
    assert exact["memory_bytes"] == sum(exact["memory"].values())
    assert exact["step_s"] == formula["step_s"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_masks_of_dropout_take_a_byte_a_number_on_a_gpu(rows: Rows, precision: str) -> None:
    """On the CPU they have the type of the activations: 4 to 7 % more in all."""
    text = ("+model=gpt2_small", "model.n_layer=3", "model.n_embd=64", "model.n_head=4", "model.vocab_size=512")
    words = (*text, "model.seq_len=128", f"train.precision={precision}", "train.batch_per_gpu=8", "+framework=single")
    (formula,), (exact,) = (rows(*words, "cluster=h100", "gpus=1", *more) for more in ((), ("--exact-memory",)))
    assert formula["memory_error"] == worst_error("single")
    assert formula["memory_bytes"] == pytest.approx(exact["memory_bytes"], rel=0.02)


def test_a_job_near_the_capacity_may_fit(rows: Rows, capsys: Capture, tmp_path: Path) -> None:
    """A device with as many bytes as the formula gives: the table has ?, and the reason says how to find out."""
    path = tmp_path / "made.yaml"
    words = (*TINY, "+framework=ddp", "gpus=2", "--one-gpu-step-s", "1", f"cluster={path}")
    write_cluster(path, "cuda", 2, "1e+12")
    (row,) = rows(*words)
    assert row["fits"] is True
    write_cluster(path, "cuda", 2, row["memory_bytes"])
    (row,) = rows(*words)
    assert row["fits"] is None
    assert "it may not fit: it needs about" in row["reason"]
    assert main(words) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("ddp ") and " GiB" in line)
    assert f"±{row['memory_error']:.0%}" in line.split()
    assert "?" in line.split()


def test_the_loader_is_waited_for(rows: Rows) -> None:
    words = (*TINY, "+framework=ddp", "cluster=abci", "gpus=4", "train.batch_per_gpu=8", "--one-gpu-step-s", "1")
    (row,) = rows(*words, "--loader-samples-per-s", "4", "--samples-per-epoch", "320")
    assert row["step_s"] == pytest.approx(2)  # 8 samples at 4 a second
    assert row["data_s"] == pytest.approx(2 - row["compute_s"] - row["comm_exposed_s"])
    assert row["epoch_s"] == pytest.approx(20)
    assert "the loader is waited for" in row["reason"]
    shared = (*TINY, "+framework=tensor", "framework.dp=2", "framework.tp=2", *words[len(TINY) + 1 :])
    (row,) = rows(*shared, "--loader-samples-per-s", "4")
    assert row["step_s"] == pytest.approx(4)  # one rank loads the 16 samples of two


@pytest.mark.parametrize(("memory", "fits"), [(3.0, False), (5.0, True)])
def test_the_ranks_of_a_node_share_its_memory_on_cpus(rows: Rows, tmp_path: Path, memory: float, fits: bool) -> None:
    """8 ranks on two nodes of four; memory: of a node, in what one rank needs."""
    path = tmp_path / "made.yaml"
    words = (*TINY, "+framework=ddp", f"cluster={path}", "gpus=8", "train.batch_per_gpu=8", "--one-gpu-step-s", "1")
    write_cluster(path, "cpu", 4, "null")
    (row,) = rows(*words)
    assert row["fits"] is None
    write_cluster(path, "cpu", 4, memory * row["memory_bytes"])
    assert rows(*words)[0]["fits"] is fits


def test_an_epoch_ends_after_the_steps_that_are_asked_for(rows: Rows) -> None:
    """10 full steps of 32 samples in 341, or 4 of them; without samples the 4 alone. The loader can set them, too."""
    words = (*TINY, "+framework=ddp", "cluster=abci", "gpus=4", "train.batch_per_gpu=8", "--one-gpu-step-s", "1")
    every = ((), ("train.steps=4",), ("train.steps=40",))
    result = [rows(*words, *more, "--samples-per-epoch", "341")[0] for more in every]
    (alone,) = rows(*words, "train.steps=4")
    assert [row["epoch_s"] / row["step_s"] for row in (*result, alone)] == pytest.approx([10, 4, 10, 4])
    several = (("--samples-per-epoch", "640"), (), ("data=imagenet",))
    set_there = [rows(*words, "loader=synthetic", "loader.train_samples=320", *more)[0] for more in several]
    assert [row["epoch_s"] / row["step_s"] for row in set_there] == pytest.approx([20, 10, 10])


@pytest.mark.parametrize("framework", ["ddp", "fsdp"])
def test_the_largest_message_carries_a_mark(rows: Rows, monkeypatch: Patch, framework: str) -> None:
    """Messages of up to 1 MB were measured. The embedding has 2 MB, and the mean message has less."""
    sweeps = {(kind, 2): Sweep((1e3, 1e6), (1e-3, 2e-3)) for kind in ("all_reduce", "all_gather", "reduce_scatter")}
    machine = replace(load("h100"), sweeps=sweeps)
    monkeypatch.setattr(command_line, "machine_of", lambda *_: machine)
    text = ("+model=gpt2_small", "model.n_layer=8", "model.n_embd=64", "model.n_head=4", "model.vocab_size=8000")
    more = ("model.seq_len=16", f"+framework={framework}", "cluster=h100", "gpus=2", "train.batch_per_gpu=2")
    keys = ("framework.bucket_cap_mb=0.1",) if framework == "ddp" else ()
    (row,) = rows(*text, *more, *keys)
    (mark,) = row["marks"]
    said, _, number = mark.rpartition(" ")
    assert said == "messages of up to 1e+06 bytes measured, not"
    assert float(number) > 2e6


def test_the_largest_message_of_shared_layers_carries_a_mark(rows: Rows, monkeypatch: Patch) -> None:
    """16 samples of 16 tokens of 64 numbers have 65,536 bytes; those of the loss less, so the mean is 62,009."""
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    machine = replace(load("h100"), sweeps={(kind, 8): Sweep((1e3, 64e3), (1e-3, 2e-3)) for kind in kinds})
    monkeypatch.setattr(command_line, "machine_of", lambda *_: machine)
    sizes = ("n_layer=8", "n_embd=64", "n_head=8", "vocab_size=8000", "seq_len=16")
    text = ("+model=gpt2_small", *(f"model.{size}" for size in sizes), "train.batch_per_gpu=2")
    (row,) = rows(*text, "+framework=tensor", "framework.tp=8", "framework.dp=1", "cluster=h100", "gpus=8")
    assert row["messages"][0]["bytes_"] / row["messages"][0]["count"] < 64e3
    assert row["marks"] == ["messages of up to 64000 bytes measured, not 65536"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("+framework=gpipe", "cluster=abci", "gpus=[4,8]"), "the model has 6 blocks"),
        (("+framework=ddp", "cluster=local", "gpus=[1,2]", "--one-gpu-step-s", "1"), "the link within a node is not"),
    ],
)
def test_a_number_of_gpus_that_is_refused_is_a_row_beside_others(
    rows: Rows, words: tuple[str, ...], reason: str
) -> None:
    fine, refused = rows(*TINY, *words)
    assert (fine["status"], refused["status"], refused["step_s"]) == ("ok", "unsupported", None)
    assert reason in refused["reason"]


@pytest.mark.parametrize(
    ("refused", "others", "words", "reason"),
    [
        # A key of pipelines and of tensor, not of ddp.
        ("ddp", ["gpipe", "tensor"], ("gpus=4", "framework.dp=2"), "framework.dp does not exist"),
        # 14 samples of 2 a micro batch are 7: interleaved takes rounds of equal size, gpipe any number.
        (
            "interleaved",
            ["gpipe"],
            ("gpus=2", "train.global_batch=14", "train.micro_batch=2"),
            "interleaved over 2 ranks cannot run 7 micro batches",
        ),
    ],
)
def test_what_one_framework_refuses_is_its_row_alone(
    rows: Rows, monkeypatch: Patch, refused: str, others: list[str], words: tuple[str, ...], reason: str
) -> None:
    monkeypatch.setattr(command, "choices", lambda _: [refused, *others])
    result = {row["framework"]: row for row in rows(*TINY, "cluster=abci", *words)}
    assert {name: row["status"] for name, row in result.items()} == {refused: "unsupported"} | dict.fromkeys(
        others, "ok"
    )
    assert reason in result[refused]["reason"]


def test_a_framework_whose_runs_cannot_be_used_is_a_row_beside_others(rows: Rows, monkeypatch: Patch) -> None:
    """Its runs on two devices took less time than their communication is predicted to take."""
    inputs_of = command.inputs_of

    def inputs(question: Question, config: Config, *more: Any) -> Inputs:
        if config.framework.name == "ddp":
            raise UserError("2 devices took 0.1 s a step: measure one device")
        return inputs_of(question, config, *more)

    monkeypatch.setattr(command, "choices", lambda _: ["ddp", "gpipe"])
    monkeypatch.setattr(command, "inputs_of", inputs)
    result = {row["framework"]: row for row in rows(*TINY, "cluster=abci", "gpus=4")}
    assert result["gpipe"]["status"] == "ok"
    assert result["ddp"]["reason"] == "2 devices took 0.1 s a step: measure one device"


def test_bad_input_is_one_line(error: Error, tmp_path: Path) -> None:
    ddp = (*TINY, "+framework=ddp")
    assert "cluster=nowhere is not known: choose one of abci" in error(*ddp, "cluster=nowhere")
    assert "nothing is known of how fast cpu computes" in error(*ddp, "cluster=local", "gpus=2")
    assert "framework.nothing" in error(*ddp, "cluster=abci", "framework.nothing=1")
    assert "no run in" in error(*ddp, "cluster=abci", "--from", str(tmp_path))
    base = "has no complete run of resnet50 on one Tesla V100-SXM2-16GB"
    assert base in error(*ddp, "cluster=abci", "--from", str(EXAMPLE))
    step = ("cluster=abci", "gpus=4", "--one-gpu-step-s", "1", "--one-gpu-batch", "10")
    said = error(*ddp, *step, "train.micro_batch=4")
    assert "a step of 10 samples is no whole number of micro batches of 4" in said


def test_measured_runs_are_the_base(rows: Rows, error: Error) -> None:
    """The example's repeats on one process: the median of their steps comes back."""
    records = [json.loads(path.read_text()) for path in EXAMPLE.glob("single-resnet50-*/attempt-1/run.json")]
    model, batch = records[0]["config"]["model"], records[0]["ledger"]["global_batch"]
    names = ("layers", "width_per_group", "image_size", "num_classes")
    sizes = [f"model.{name}={model[name]}".replace(" ", "") for name in names]
    words = ("+model=resnet50", *sizes, f"train.global_batch={batch}", "+framework=single", "gpus=1", "cluster=local")
    line = error(*words, "--from", str(EXAMPLE))
    assert "(the nearest has recipe.optimizer.name=adamw, not sgd): measure one" in line
    (row,) = rows(*words, "recipe=adamw", "--from", str(EXAMPLE))
    summaries = [record["summary"] for record in records]
    steps = [batch / item["throughput_samples_per_s"] * (1 - item["data_wait_share"]) for item in summaries]
    assert len(steps) == 6
    assert row["step_s"] == pytest.approx(median(steps))
    assert row["basis"].startswith("single on one device (single-resnet50")


@pytest.mark.slow  # models of full size are counted
@pytest.mark.parametrize("model", choices("model"))
def test_every_model_is_predicted_at_full_size(rows: Rows, model: str) -> None:
    (row,) = rows(f"+model={model}", "+framework=ddp", "cluster=h100", "gpus=64", "train.batch_per_gpu=8")
    assert row["memory"]["weights"] == row["messages"][0]["bytes_"] == 4 * PARAMETERS[model]
    assert 0 < row["compute_s"] < row["step_s"] + 1e-9
    assert row["fits"] is True


def test_a_thousand_predictions_take_seconds(rows: Rows) -> None:
    """More than 1,000 rows; the process's own seconds, which other work does not move."""
    counts = ",".join(str(8 * number) for number in range(1, 61))
    began = time.process_time()
    assert len(rows(*TINY, "cluster=abci", f"gpus=[{counts}]")) > 1000
    assert time.process_time() - began < 20


@pytest.mark.parametrize("place", [".", "missing/steps"])
def test_a_figure_that_cannot_be_written_is_one_line(
    error: Error, tmp_path: Path, monkeypatch: Patch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = error(*TINY, "+framework=ddp", "cluster=abci", "gpus=4", "--figure", place)
    assert f"--figure={place} cannot be written" in said


def test_a_figure_of_two_gpu_counts_has_two_ticks_or_more(tmp_path: Path, monkeypatch: Patch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    assert main([*TINY, "+framework=ddp", "cluster=abci", "gpus=[8,12]", "--figure", str(tmp_path / "steps")]) == 0
    low, high = drawn[0].axes[0].get_ylim()
    assert sum(low <= tick <= high for tick in drawn[0].axes[0].get_yticks()) >= 2


def test_a_figure_has_the_bands_of_the_rows_that_have_one(tmp_path: Path, monkeypatch: Patch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    one = Prediction("ddp", "resnet50", "abci", 1, "ok", "", step_s=0.1, compute_s=0.1, samples_per_s=640.0)
    others = [replace(one, gpus=gpus, low_80_s=0.08, high_80_s=0.16) for gpus in (2, 4)]
    draw([one, *others], tmp_path / "steps", False, None, "cuda")
    axes = drawn[0].axes[0]
    (band,) = axes.collections
    assert {(x, y) for x, y in band.get_paths()[0].vertices.tolist()} == {(x, y) for x in (2, 4) for y in (400, 800)}  # pyright: ignore
    assert any("with the bands of 80 %" in text.get_text() for text in axes.texts)


def test_a_figure_says_how_many_frameworks_have_no_panel(tmp_path: Path, monkeypatch: Patch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    row = Prediction("ddp", "resnet50", "abci", 4, "ok", "", step_s=0.1, compute_s=0.1, samples_per_s=640.0)
    for count in (6, 8):
        draw([replace(row, framework=f"framework {n}") for n in range(count)], tmp_path / "steps", False, None, "cuda")
    few, many = ("\n".join(text.get_text() for text in figure.axes[0].texts) for figure in drawn[::2])
    assert "steps of 6 of 8 frameworks are drawn" in many
    assert "frameworks" not in few


@pytest.mark.parametrize(("device", "counted"), [("cpu", "ranks (CPU)"), ("cuda", "GPUs")])
def test_the_axes_of_a_figure_count_what_the_cluster_has(
    tmp_path: Path, monkeypatch: Patch, device: str, counted: str
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    row = Prediction("ddp", "resnet50", "abci", 4, "ok", "", step_s=0.1, samples_per_s=640.0)
    for plan in (False, True):
        draw([replace(row, settings={"train.global_batch": 64})], tmp_path / "steps", plan, None, device)
    assert {axes.get_xlabel() for figure in drawn for axes in figure.axes} == {counted}


@pytest.mark.parametrize("name", ["gpt_1.3b", "gpt_1.3b.png"])
def test_the_name_of_a_figure_keeps_its_points(tmp_path: Path, name: str) -> None:
    assert main([*TINY, "+framework=ddp", "cluster=abci", "gpus=[4,8]", "--figure", str(tmp_path / name)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt_1.3b.png", "gpt_1.3b.svg"]
    assert all(path.stat().st_size > 0 for path in tmp_path.iterdir())


H100 = ("cluster=h100", "train.precision=bf16", "+model=gpt2_small")


def test_each_rank_of_a_pipeline_waits_for_its_own_host(rows: Rows) -> None:
    """Its host starts the same kernels for one sample as for four: four times the samples take as long."""
    words = (*H100, "+framework=1f1b", "gpus=2")
    (one,) = rows(*words, "train.global_batch=16", "train.micro_batch=1")
    (four,) = rows(*words, "train.global_batch=64", "train.micro_batch=4")
    assert one["compute_s"] == pytest.approx(four["compute_s"], rel=1e-3)
    assert one["step_s"] <= four["step_s"]


def test_collectives_of_layers_use_the_waits_for_the_host_in_every_framework(rows: Rows) -> None:
    """Four ranks share the layers of two replicas, without stages."""
    job = (*H100, "gpus=8", "train.global_batch=16", "framework.tp=4", "framework.dp=2")
    (tensor,) = rows(*job, "+framework=tensor")
    (hybrid,) = rows(*job, "+framework=hybrid", "framework.pp=1", "train.micro_batch=8")
    assert tensor["step_s"] == pytest.approx(hybrid["step_s"], rel=0.01)
    assert tensor["comm_exposed_s"] < 0.2 * tensor["comm_hidden_s"]


def test_what_runs_again_waits_for_the_host_too(rows: Rows) -> None:
    words = ("cluster=h100", "gpus=1", "+model=resnet50", "+framework=single", "train.checkpoint_activations=blocks")
    (small,), (large,) = (rows(*words, f"train.global_batch={samples}") for samples in (8, 16))
    assert small["step_s"] == pytest.approx(large["step_s"])  # of which the host takes all


def test_a_limit_of_memory_chooses_among_the_layouts(capsys: Capture) -> None:
    """The fastest one has the most replicas, which need the most memory."""
    words = ("cluster=h100", "gpus=8", "+model=gpt2_medium", "+framework=tensor", "train.global_batch=8")
    assert main([*words, "--max-memory-gib=5"]) == 0
    assert "best in 5 GiB: tensor (dp=2 tp=4)" in capsys.readouterr().out
