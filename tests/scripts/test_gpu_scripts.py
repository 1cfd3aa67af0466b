"""scripts/gpu_check.sh and scripts/first_gpu.sh without a GPU: what they would run, and their checks themselves."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

from ddlbench.config.compose import configuration, make_job, supports
from ddlbench.ranks.launch import Launch
from tests.support import processes
from tests.support.waiting import WITHIN_S, wait_until

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")  # a name only
GPU_TEST = re.compile(r"(@|marks=)pytest\.mark\.gpu")
RANKS = "--nproc-per-node="
FIRST, CHECK, COMPARE = "scripts/first_gpu.sh", "scripts/gpu_check.sh", "scripts/measurements.py"


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return processes.run(*command, cwd=ROOT, **{"PYTHON": sys.executable, "WHEELS": "nowhere", **variables})


def commands(*script: str, **variables: Any) -> list[list[str]]:
    """The words of every command that a dry run prints."""
    done = run(*script, **variables)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("==")]


def ask(words: list[str], ranks: int) -> None:
    """Raise where this command line is wrong, or its framework refuses it at this size."""
    program = "--" if "tests.support.planted" in words else "ddlbench"
    config = configuration(*words[words.index(program) + 1 :])
    if config.mode == "train":
        supports(config.framework, make_job(config, Launch("torchrun", world_size=ranks), CUDA))


def test_every_run_on_one_gpu_can_be_composed() -> None:
    """The runs of gpu_check.sh are among them."""
    lines = [words for words in commands(FIRST, "--dry-run") if {"ddlbench", "tests.support.planted"} & set(words)]
    assert len(lines) > 10
    for words in lines:
        ranks = [word.removeprefix(RANKS) for word in words if word.startswith(RANKS)]  # those that share the GPU
        ask(words, ranks=int(ranks[0]) if ranks else 1)


def test_the_tests_on_a_gpu_are_those_that_need_one() -> None:
    (words,) = commands(FIRST, "--dry-run", "tests")
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if GPU_TEST.search(path.read_text())}
    assert ROOT / "tests" / "equality" / "test_host_synchronizations.py" in marked
    assert {ROOT / word for word in words if word.startswith("tests/")} == marked


def test_out_of_memory_fills_the_gpu_and_not_the_host() -> None:
    words = next(words for words in commands(FIRST, "--dry-run", "records") if words[-1].endswith("/out-of-memory"))
    config = configuration(*words[words.index("ddlbench") + 1 :])
    tokens = config.train.batch_per_gpu * math.prod(config.model.input_shape())
    assert config.model.kind == "text"
    assert 2 * tokens * 8 < 1e9  # inputs and targets are int64
    assert tokens * config.model.outputs() * 2 > 288e9  # the logits in bf16, against the memory of a B300


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_run_on_two_nodes_can_be_composed(gpus: int) -> None:
    lines = [words for words in commands(FIRST, "--dry-run", "two-nodes", GPUS=str(gpus)) if COMPARE not in words]
    assert len(lines) > 30
    for words in lines:
        assert words[0] == "srun"
        assert {"--nodes=2", f"--ntasks-per-node={gpus}", "--kill-on-bad-exit=1", "--wait=60"} < set(words)
        assert any(word.startswith("--cpus-per-task=") for word in words)
        ask(words, ranks=2 * gpus)


def test_every_framework_runs_on_two_nodes() -> None:
    lines = commands(FIRST, "--dry-run", "two-nodes", "frameworks")
    asked = {word.partition("=")[2] for words in lines for word in words if word.startswith("+framework=")}
    known = {path.stem for path in (ROOT / "conf" / "framework").glob("*.yaml")}
    assert asked == known - {"single", "deepspeed"}  # one process; zero0 to zero3 under one name


def test_overlap_is_compared_with_its_absence_by_the_losses_of_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [words for words in commands(FIRST, "--dry-run", "two-nodes", "overlap", str(tmp_path)) if COMPARE in words]
    names = ("zero1", "zero2", "zero3", "zero1-compiled", "zero2-compiled")
    compared = [[f"{tmp_path}/overlap/{name}-overlap-{choice}" for choice in ("true", "false")] for name in names]
    assert [words[-2:] for words in asked] == compared
    last = {"true": [9.0, 9.0], "false": [9.0, 9.05], "race": [9.0, 9.2], "nan": [float("nan")] * 2, "short": []}
    for name, losses in last.items():  # of two ranks; both have had the first step
        attempt = tmp_path / name / "run" / "attempt-1"
        attempt.mkdir(parents=True)
        steps = pd.DataFrame({"epoch": 0, "step": [0, 0, 1, 1][: 2 + len(losses)], "loss": [10.0, 10.4, *losses]})
        steps.to_parquet(attempt / "steps.parquet")

    differing = runpy.run_path(str(ROOT / COMPARE))["differing_losses"]
    found = {name: differing(tmp_path / "true", tmp_path / name) for name in last}
    race = "epoch 0, step 1: losses 9 and 9.1"
    expected = {"true": None, "false": None, "race": race, "nan": race.replace("9.1", "nan")}
    assert found == expected | {"short": "2 steps and 1 steps"}
    monkeypatch.setattr(sys, "argv", [COMPARE, "--same-losses", f"{tmp_path}/true", f"{tmp_path}/race"])
    with pytest.raises(SystemExit, match=re.escape(race)):
        runpy.run_path(str(ROOT / COMPARE), run_name="__main__")


def stand_in(folder: Path, sees_gpu: bool, then: str = "") -> str:
    """A command in the place of Python: it says whether torch sees a GPU, with a warning, and then runs `then`."""
    text = f"[ $1 = -c ] && echo FutureWarning >&2 && echo 'torch.cuda.is_available() is {sees_gpu}' && exit\n{then}\n"
    return str(processes.program(folder / "python", f"#!/bin/bash\n{text}"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_ends_in_one_line(tmp_path: Path) -> None:
    for script, python in ((FIRST, stand_in(tmp_path, sees_gpu=False)), (CHECK, sys.executable)):
        done = run(script, PYTHON=python)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines() == [f"{Path(script).stem}: no usable GPU: torch.cuda.is_available() is False"]


def test_a_warning_of_torch_is_no_missing_gpu(tmp_path: Path) -> None:
    done = run(CHECK, "images", str(tmp_path / "results"), PYTHON=stand_in(tmp_path, sees_gpu=True, then="exit 1"))
    assert "no usable GPU" not in done.stderr
    assert "images/native" in done.stdout
    assert done.returncode == 1


def test_ctrl_c_ends_the_script_and_what_it_runs(tmp_path: Path) -> None:
    """A terminal signals the script's process group, and `timeout` makes another one for its command."""
    python = stand_in(tmp_path, sees_gpu=True, then=f"echo $$ > {tmp_path}/pid\nexec sleep 600")
    words = [str(ROOT / CHECK), "images", str(tmp_path / "results")]
    variables = processes.environment(PYTHON=python, WHEELS="nowhere")
    script = subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait(WITHIN_S) == 130
    finally:
        script.kill()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("script", [FIRST, CHECK])
def test_an_unknown_part_is_one_line_with_the_choices(script: str) -> None:
    done = run(script, "gpt3")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "there is no part gpt3: choose" in line
    assert "frameworks" in line


@pytest.mark.slow
def test_a_part_runs_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    done = run(CHECK, "gpt2", str(tmp_path), DDLBENCH_TINY="1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| gpt2/")]
    checks, records = rows[:4], rows[4:]
    assert [row[1] for row in checks] == ["passed: ok"] * 4
    expected = [f"| gpt2/{name}-compile-{choice}" for name in ("no-dropout", "synthetic") for choice in (False, True)]
    assert [row[0] for row in records] == [name.lower() for name in expected]
    assert all(row[6] == "4" and row[8] == "ok" and float(row[9].replace(",", "")) > 0 for row in records)


@pytest.mark.slow
def test_failures_leave_their_status_on_a_cpu(tmp_path: Path) -> None:
    small = {"DDLBENCH_TINY": "1", "INTERRUPT_AFTER_S": "40", "HANG_S": "10"}
    done = run(FIRST, "records", str(tmp_path), **small)
    assert done.returncode == 0, done.stdout + done.stderr
    for check, status in (("out-of-memory", "oom"), ("ctrl-c", "killed"), ("hang", "timeout")):
        assert f"| records/{check} | passed: {status} |" in done.stdout


NVCC = "horovod/common/ops/cuda/CMakeLists.txt"
CMAKE = {  # the lines of Horovod 0.28.1 that scripts/install_horovod.sh changes
    "CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)",
    "horovod/torch/CMakeLists.txt": "    set(CMAKE_CXX_STANDARD 14)",
    NVCC: "set(CMAKE_CUDA_STANDARD 11)",
    "cmake/Modules/FindPytorch.cmake": 'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)',
}
PATCH = """
fail() {{ echo "$*" >&2; exit 2; }}
flavour={flavour}
eval "$(sed -n '/^patch_source() {{$/,/^}}$/p' scripts/install_horovod.sh)"
patch_source {source}
"""


@pytest.mark.parametrize(("flavour", "pytorch_cuda"), [("nccl", "TOUPPER"), ("gloo", "set(Pytorch_CUDA FALSE)")])
def test_horovod_is_compiled_for_the_standards_of_todays_compilers(
    tmp_path: Path, flavour: str, pytorch_cuda: str
) -> None:
    for name, line in CMAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{line}\n")
    done = run("bash", "-c", PATCH.format(flavour=flavour, source=tmp_path))
    assert done.returncode == 0, done.stderr
    patched = [(tmp_path / name).read_text().strip() for name in CMAKE]
    assert patched[:3] == ["set(CMAKE_CXX_STANDARD 20)"] * 2 + ["set(CMAKE_CUDA_STANDARD 17)"]
    assert pytorch_cuda in patched[3]
    (tmp_path / NVCC).write_text("")
    assert run("bash", "-c", PATCH.format(flavour=flavour, source=tmp_path)).returncode == 2


CHECKS = """
set -uo pipefail
source scripts/gpu_common.sh
results={results}
begin part 2
bench() {{ false; }}  # what follows needs no run
check good true
check bad false
check endless sleep 60
check late true
echo "failed $failed"
"""


def test_a_check_that_fails_or_is_over_its_limit_is_counted(tmp_path: Path) -> None:
    done = run("bash", "-c", CHECKS.format(results=tmp_path))
    result = dict(line.split("\t")[:2] for line in (tmp_path / "checks.tsv").read_text().splitlines())
    assert result == {
        "part/good": "passed",
        "part/bad": "FAILED: exit code 1",
        "part/endless": "FAILED: over its limit",
        "part/late": "FAILED: over its limit",
    }
    assert done.stdout.splitlines()[-1] == "failed 3"


BENCH = """
source scripts/gpu_common.sh
results={results} program=(-c 'raise SystemExit(1)')
begin part 100
bench again ok
echo "failed $failed"
"""


def test_a_run_without_a_record_fails_whatever_an_earlier_one_has_left(tmp_path: Path) -> None:
    attempt = tmp_path / "part/again/run/attempt-1"
    attempt.mkdir(parents=True)
    record = {"status": "ok", "times": {"start": "2026-01-01T00:00:00.000+00:00"}}
    (attempt / "run.json").write_text(json.dumps(record))
    done = run("bash", "-c", BENCH.format(results=tmp_path))
    assert (tmp_path / "checks.tsv").read_text().split("\t")[:2] == ["part/again", "FAILED: no record"]
    assert done.stdout.splitlines()[-1] == "failed 1"


def carried(folder: Path, tag: str) -> None:
    """A wheel of one module."""
    folder.mkdir()
    info = "carried_thing-1.0.dist-info"
    with zipfile.ZipFile(folder / f"carried_thing-1.0-{tag}.whl", "w") as wheel:
        wheel.writestr("carried_thing.py", "ANSWER = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried-thing\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def carry(wheels: Path, then: str) -> subprocess.CompletedProcess[str]:
    script = f"source scripts/gpu_common.sh; carry; \"$python\" -c '{then}'"
    return run("bash", "-c", script, WHEELS=str(wheels), PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)


def test_carried_wheels_come_before_what_is_installed_and_leave_nothing(tmp_path: Path) -> None:
    carried(tmp_path / "whl", "py3-none-any")
    done = carry(tmp_path / "whl", "import carried_thing, ddlbench; print(carried_thing.__file__, ddlbench.__file__)")
    assert done.returncode == 0, done.stderr
    thing, own = map(Path, done.stdout.split())
    assert own == ROOT / "src" / "ddlbench" / "__init__.py"
    assert thing.name == "carried_thing.py"
    assert thing.parent.parent == ROOT, "a second node sees no folder of this node's /tmp"
    assert not thing.parent.exists()  # removed when the script ended


def test_wheels_for_another_python_end_in_a_line_that_says_so(tmp_path: Path) -> None:
    carried(tmp_path / "whl", "cp39-cp39-manylinux_2_17_x86_64")
    done = carry(tmp_path / "whl", "pass")
    assert done.returncode == 2
    assert "do not fit Python 3." in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("variable", "value"), [("PYTHON_VERSION", "twelve"), ("MACHINE", "vax")])
def test_packing_refuses_an_unknown_machine(variable: str, value: Any) -> None:
    done = run("scripts/pack_for_gpu.sh", **{variable: value})
    assert done.returncode == 2
    assert value in done.stderr
