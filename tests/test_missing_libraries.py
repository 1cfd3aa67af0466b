"""A machine with torch and little else: a run that needs an optional library ends with its name, all others are ok."""

from __future__ import annotations

import json
import subprocess
import sys

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
from ddlbench.data.__main__ import main as data
codes.append(data(["pack", "images", "packed"]))
print("codes", json.dumps(codes))
"""
UNAVAILABLE = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The records of one process's runs, by the name of their results folder, and what became of a packed set; `code`
    is the exit code."""
    home = tmp_path_factory.mktemp("bare")
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
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("ddlbench.data: "))
    records = {name: record(home / name) for name in lines} | {"packed": {"status": "unavailable", "reason": said}}
    return {name: content | {"code": code} for (name, content), code in zip(records.items(), codes, strict=True)}


@pytest.mark.parametrize("name", ["images", "text"])
def test_a_run_that_needs_none_of_them_is_ok(runs: dict[str, dict], name: str) -> None:
    assert (runs[name]["code"], runs[name]["status"]) == (0, "ok"), runs[name]["reason"]


@pytest.mark.parametrize("name", ["deepspeed", "horovod", "megatron", "dali", "lars", "packed"])
def test_what_needs_one_says_which(runs: dict[str, dict], name: str) -> None:
    assert (runs[name]["code"], runs[name]["status"]) == (UNAVAILABLE, "unavailable")
    assert {"lars": "timm", "packed": "pip install google-crc32c"}.get(name, name) in runs[name]["reason"]
