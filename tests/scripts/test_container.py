"""scripts/container/python.sh with a stub of apptainer that prints its words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import run

SCRIPT = Path(__file__).parents[2] / "scripts" / "container" / "python.sh"


def inside(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "bin").mkdir(exist_ok=True)
    stub = folder / "bin" / "apptainer"
    stub.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    stub.chmod(0o755)
    (folder / "image.sif").touch()
    image = {"DDLBENCH_IMAGE": str(folder / "image.sif")}
    words = ("-m", "ddlbench", "results_dir=two words")
    # `environment` drops variables of DDLBENCH_ from outside; these are given to it
    return run(SCRIPT, *words, **({"PATH": f"{folder}/bin:{os.environ['PATH']}"} | image | env))


@pytest.mark.parametrize(("gpu", "flags"), [("nvidia", ["--nv"]), ("rocm", ["--rocm"]), ("none", [])])
def test_python_runs_in_the_image_with_the_drivers_libraries(tmp_path: Path, gpu: str, flags: list[str]) -> None:
    done = inside(tmp_path, DDLBENCH_GPU=gpu)
    image = str(tmp_path / "image.sif")
    expected = ["exec", *flags, image, "python", "-m", "ddlbench", "results_dir=two words"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_folders_are_bound(tmp_path: Path) -> None:
    done = inside(tmp_path, DDLBENCH_GPU="none", DDLBENCH_BIND="/data,/scratch")
    assert done.stdout.splitlines()[:3] == ["exec", "--bind", "/data,/scratch"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"DDLBENCH_IMAGE": "/no/image"}, "DDLBENCH_IMAGE=/no/image is no file"),
        ({"DDLBENCH_GPU": "intel"}, "DDLBENCH_GPU=intel: nvidia, rocm or none"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, env: dict[str, str], message: str) -> None:
    refused = inside(tmp_path, **env)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert message in line
