"""A machine with torch and little else: a run that needs an optional library ends with its name, all others are ok."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pictures import write_folders
from tests.support.processes import environment
from tests.support.runs import GPT2, RESNET, record
from tests.support.waiting import WITHIN_S

MISSING = ("timm", "google_crc32c", "deepspeed", "horovod", "megatron", "nvidia.dali", "pynvml", "jinja2")

# The runs of one process, one after another: argv[1] is a JSON list of command lines, the answer their exit codes.
PROGRAM = f"""
import json, sys
for name in {MISSING}:
    sys.modules[name] = None  # importing it raises ImportError
from ddlbench.__main__ import main
codes = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["ddlbench", *arguments]
    codes.append(main())
print("codes", json.dumps(codes))
"""
UNAVAILABLE = 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bare")


@pytest.fixture(scope="module")
def runs(home: Path) -> dict[str, dict]:
    """The records of one process's runs, by the name of their results folder; `code` is the exit code."""
    write_folders(home / "images", train=4, val=3)
    lines = {
        "images": [*RESNET, "data=imagenet", f"data.root={home}/images", "loader.workers=0"],
        "text": [*GPT2, "model.seq_len=16", "loader=synthetic"],
        "deepspeed": ["+framework=zero1", *GPT2[1:], "loader=synthetic"],
        "megatron": ["+framework=megatron", *GPT2[1:], "loader=synthetic"],
        "horovod": ["+framework=horovod", *GPT2[1:], "loader=synthetic"],
        "dali": [*RESNET, "data=imagenet", f"data.root={home}/images", "loader=dali"],
        "lars": [*RESNET, "loader=synthetic", "recipe=lars"],
    }
    commands = [[*arguments, f"results_dir={home}/{name}"] for name, arguments in lines.items()]
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=WITHIN_S, env=environment(), cwd=home)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.rpartition("codes ")[2])
    return {name: record(home / name) | {"code": code} for name, code in zip(lines, codes, strict=True)}


@pytest.mark.parametrize("name", ["images", "text"])
def test_a_run_that_needs_none_of_them_is_ok(runs: dict[str, dict], name: str) -> None:
    assert (runs[name]["code"], runs[name]["status"]) == (0, "ok"), runs[name]["reason"]


@pytest.mark.parametrize("name", ["deepspeed", "horovod", "megatron", "dali", "lars"])
def test_a_run_that_needs_one_is_a_row_that_says_which(runs: dict[str, dict], name: str) -> None:
    assert (runs[name]["code"], runs[name]["status"]) == (UNAVAILABLE, "unavailable")
    assert {"lars": "timm"}.get(name, name) in runs[name]["reason"]


def test_a_packed_set_cannot_be_written_without_its_checksums(home: Path) -> None:
    write_folders(home / "more", train=1, val=1)
    program = PROGRAM.partition("from ddlbench")[0] + "from ddlbench.data.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", program, "pack", str(home / "more"), str(home / "packed")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, env=environment(), cwd=home)
    assert done.returncode == UNAVAILABLE, done.stderr
    assert "pip install google-crc32c" in done.stderr.splitlines()[-1]
