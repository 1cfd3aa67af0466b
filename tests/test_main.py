"""The program as a user meets it: run in this process, one rank, small shapes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from ddlbench import __version__
from ddlbench.__main__ import complain
from ddlbench.errors import SIGNALS, UserError
from ddlbench.ranks.launchers import Launch, rank_variables
from tests.support.runs import SMALL, record
from tests.support.waiting import WITHIN_S


def test_a_run_leaves_one_whole_record(ddlbench, tmp_path: Path) -> None:
    code, said = ddlbench(*SMALL)
    assert code == 0, said
    content = record(tmp_path)
    assert content["status"] == "ok"
    assert content["run_id"].startswith("single-resnet50-synthetic-1x-")
    assert content["ledger"]["samples"] == 24
    assert content["ledger"]["updates"] == 6
    assert content["ledger"]["skipped_updates"] == 0
    assert content["summary"]["epochs_measured"] == 1
    assert content["summary"]["throughput_samples_per_s"] > 0
    assert content["summary"]["val_samples"] == 6
    assert not {"val_loss", "val_top1", "val_top5"} & set(content["summary"])  # of random samples
    assert content["summary"]["mfu"] is None  # no peak is known for a CPU
    assert content["environment"]["threads_per_rank"] == 1
    (folder,) = tmp_path.glob("results/*/attempt-1")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["epochs.jsonl", "ranks.parquet", "run.json", "steps.parquet"]
    assert "epoch 1:" in said
    assert said.splitlines()[-1] == (
        f"ddlbench: the record is in {folder.relative_to(tmp_path)}; to see tables: python -m ddlbench.report results"
    )


def test_dryrun_starts_nothing(ddlbench, tmp_path: Path) -> None:
    assert ddlbench(*SMALL, "dryrun=true")[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_waits_with_its_line_can_be_ended_by_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank of several blocks signals while it reads its configuration."""
    blocked = list[set[int]]()
    monkeypatch.setattr(time, "sleep", lambda _: blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        complain(UserError("no such key"), Launch("torchrun", 1, 2, 1, 2))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert capsys.readouterr().err == "ddlbench (rank 1): no such key\n"
    (mask,) = blocked
    assert not mask & set(SIGNALS)


@pytest.mark.parametrize("words", [["dryrun=true"], ["mode=rehearsal"]])
def test_ctrl_c_of_what_records_nothing_is_no_traceback(
    ddlbench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """The exception goes on: Python then ends by the signal, and a script of the shell does not continue."""
    interrupt = KeyboardInterrupt()

    def interrupted(*_: object) -> int:
        raise interrupt

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("ddlbench.__main__.start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ddlbench(*SMALL, *words)
    sys.excepthook(KeyboardInterrupt, interrupt, interrupt.__traceback__)
    assert capsys.readouterr().err == ""


def test_a_dry_run_for_several_ranks_can_be_interrupted(ddlbench, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = list[set[int]]()

    def start(*_: object) -> int:
        blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return 0

    monkeypatch.setattr("ddlbench.__main__.start", start)
    monkeypatch.setenv("DDLBENCH_PLAN", "cpu")
    for name, value in rank_variables(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        assert ddlbench(*SMALL, "dryrun=true") == (0, "")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    (mask,) = blocked
    assert not mask & set(SIGNALS)


def test_a_torch_that_is_too_old_is_one_line(ddlbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddlbench.__main__.metadata.version", lambda _: "2.9.0a0+50eac811.nv25.09")
    code, said = ddlbench(*SMALL, "dryrun=true")
    assert code == 2
    assert "this Python has torch 2.9.0a0+50eac811.nv25.09, and ddlbench needs 2.11 or newer" in said


def test_a_torch_that_does_not_say_its_version_runs(ddlbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("ddlbench.__main__.metadata.version", missing)
    assert ddlbench(*SMALL, "dryrun=true")[0] == 0


MISTAKES = [
    (["+framework=dpp", "+model=resnet50"], r"framework=dpp does not exist: choose one of .*ddp.*single"),
    (["framework=ddp", "+model=resnet50"], r"framework=ddp: write \+framework=ddp"),
    ([], r"no framework: give \+framework=NAME, one of 1f1b, channel, ddp, .*single.* \(see --help\)$"),
    ([*SMALL, "train.xyz=3"], r"train\.xyz does not exist: the keys of train are .*epochs"),
    ([*SMALL, "+hallo=3"], r"hallo does not exist: the keys are backend, checkpoint, cluster, data, .* train$"),
    ([*SMALL, "train.epochs=many"], r"train\.epochs: Value 'many'"),
    ([*SMALL, "train.epochs=0"], r"train\.epochs=0 must be greater than 0"),
    ([*SMALL, "train.precision=fp8"], r"train\.precision=fp8 must be one of fp32, bf16, fp16"),
    ([*SMALL, "train.micro_batch=3"], r"train\.micro_batch=3 .* 4 samples .* choose train\.micro_batch=2"),
    ([*SMALL, "data=sample_text"], r"model resnet50 takes images, data sample_text holds text: choose data="),
    ([*SMALL, "data=imagenet"], r"data\.root="),
    ([*SMALL, "data=imagenet", "data.root=/nowhere"], r"/nowhere"),
    ([*SMALL, "results_dir=/dev/null/results"], r"results_dir=/dev/null/results cannot be written"),
    ([*SMALL, "--multirun"], r"--multirun is not available"),
    ([*SMALL, "--resolve"], r"--resolve changes what --cfg prints: give --cfg job, too"),
    ([*SMALL, "mode=fly"], r"mode=fly"),
    ([*SMALL, "~recipe"], r"~recipe: nothing can be taken away: recipe=NAME chooses another one"),
    ([*SMALL, "~train.seed"], r"~train\.seed: nothing can be taken away"),
    ([*SMALL, "framework._target_=x.Y"], r"framework\._target_ cannot be set: \+framework=NAME chooses a class"),
    ([*SMALL, "recipe={_target_:os.system}"], r"recipe=.* is no choice of one recipe: give recipe=NAME, one of "),
    (["+framework=../framework/ddp", "+model=resnet50"], r"is no choice of one framework: give \+framework=NAME"),
    ([*SMALL, "+framework=fsdp"], r"\+framework=single and \+framework=fsdp: one run has one framework"),
    ([*SMALL, "+recipe=sgd"], r"\+recipe=sgd: write recipe=sgd"),
    ([*SMALL, "+train.repeat=1"], r"\+train\.repeat=1: write train\.repeat=VALUE \(\+ adds a key, and"),
    ([*SMALL, "+train.clip_norm=1", "--cfg", "job"], r"\+train\.clip_norm=1: write train\.clip_norm=VALUE"),
    ([*SMALL, "drun=3"], r"drun does not exist: did you mean dryrun\?"),
    ([*SMALL, "results_dir="], r"results_dir= is empty: give a value, null where"),
    ([*SMALL, "results_dir=${oops}"], r"results_dir: Interpolation key 'oops' not found"),
    ([*SMALL, "dryrun=null"], r"dryrun: Incompatible value 'None'"),
    ([*SMALL, "train.seed=2147483648"], r"train\.seed=2147483648 is too large: give at most 2147483647"),
    ([*SMALL, "train.clip_norm='inf'"], r"train\.clip_norm=inf is not a finite number"),
    ([*SMALL, "train.timeout_s=1e308"], r"train\.timeout_s=1e\+308 is too large: give at most 1000000"),
    ([*SMALL, "train.threads_per_rank=9999"], r"this machine has \d+ cores?\): give at most \d+$"),
    ([*SMALL[:5], "loader.workers=99999"], r"loader\.workers=99999 is too many .*\(this machine has \d+ core"),
    ([*SMALL, "cluster.name=../x"], r"cluster\.name=\.\./x .* cannot hold / or \.\."),
    ([*SMALL, "data.root=~/images"], r"data\.root=~/images: ~ is not replaced here: write data\.root=\$HOME/images"),
    ([*SMALL, "data.root='~/images'"], r"data\.root=~/images: ~ is not replaced here: write \$HOME"),
    ([*SMALL, "data.root=/a(b"], r"""put the value into double quotes .*, 'data\.root="/a\(b"'$"""),
    ([*SMALL, "cluster.notes=\x1b[31m"], r"cluster\.notes=\\x1b\[31m has characters with a meaning"),
    ([*SMALL, "cluster.notes='\x1b[31m'"], r"cluster\.notes=\\x1b\[31m holds a control character"),
    ([*SMALL, "train.global_batch=2147483647", "train.micro_batch=2147483646"], r"choose train\.micro_batch=1$"),
    ([*SMALL, "epochs"], r"epochs is no key=value: see --help"),
    ([*SMALL, "=3"], r"=3 does not begin with a key"),
    ([*SMALL, "--experimental-rerun=x.pickle"], r"unrecognized arguments: --experimental-rerun"),
    ([*SMALL, "hydra.mode=MULTIRUN"], r"hydra\.mode=MULTIRUN: Hydra's own settings are fixed"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: str(value)[-40:])
def test_a_mistake_is_one_line(ddlbench, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, said = ddlbench(*arguments)
    assert code == 2
    assert len(said.strip().splitlines()) == 1
    assert said.startswith("ddlbench: ")
    assert re.search(message, said), said
    assert not list(tmp_path.glob("results/*"))


def test_a_users_file_cannot_name_another_class(ddlbench, tmp_path: Path) -> None:
    (tmp_path / "mine" / "framework").mkdir(parents=True)
    (tmp_path / "mine" / "framework" / "odd.yaml").write_text("_target_: os.system\nname: odd\n")
    code, said = ddlbench("+framework=odd", *SMALL[1:], "--config-dir", str(tmp_path / "mine"))
    assert code == 2
    assert said.startswith("ddlbench: framework._target_=os.system is no framework of ddlbench: choose one")


def test_a_dry_run_for_ranks_and_gpus_that_are_not_here(
    ddlbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in ranks.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("DDLBENCH_PLAN", "cuda")
    words = ["+framework=ddp", *SMALL[1:5], "loader=native", "framework.comm_hook=bf16"]  # bf16 needs NCCL
    assert ddlbench(*words, "train.global_batch=8", "train.threads_per_rank=4096", "dryrun=true") == (0, "")
    code, said = ddlbench(*words, "train.global_batch=12", "dryrun=true")
    assert (code, len(said.splitlines())) == (2, 1)
    assert "does not divide over 8 replicas" in said
    said = "ddlbench: DDLBENCH_PLAN=cuda goes with dryrun=true and is cuda or cpu: unset it to run\n"
    assert ddlbench(*words) == (2, said)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_why_it_would_not_run(ddlbench) -> None:
    code, said = ddlbench("+framework=ddp", *SMALL[1:], "framework.comm_hook=bf16", "dryrun=true")
    assert code == 3
    assert said.startswith("ddlbench: unsupported: ddp: ")


def test_a_diverged_run_is_a_row(ddlbench, tmp_path: Path) -> None:
    code, said = ddlbench(*SMALL, "recipe.optimizer.lr=1e30", "recipe.optimizer.lr_base_batch=null")
    assert code == 5
    assert "Traceback" not in said
    content = record(tmp_path)
    assert content["status"] == "diverged"
    assert said.count("ddlbench: the record is in results/") == 1
    assert "the loss is not finite at epoch 0, step" in content["reason"]
    assert content["summary"]["epochs_done"] == 1
    assert content["summary"]["train_loss"] is None


def test_the_script_of_the_installation_is_this_program(tmp_path: Path) -> None:
    """tests/scripts/test_wheel.py starts it as a module, all others in this process from any folder."""
    command = [str(Path(sys.executable).with_name("ddlbench")), "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stdout) == (0, f"ddlbench {__version__}\n"), done.stderr
