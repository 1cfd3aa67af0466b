"""scripts/container: python.sh with a stub of apptainer that prints its words, and the steps of the recipe outside of a
container, for no test machine has Apptainer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import program, run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "container" / "python.sh"
# In the place of the image's Python: notes its words, and installs ddlbench alone, without a network.
PYTHON = """#!/bin/bash
echo "$*" >> {folder}/calls.txt
case "$*" in
  "-m pip install "*" -r "*) ;;
  "-m pip install "*) exec {python} "${{@:1:3}}" --no-index --no-build-isolation --target {folder}/site "${{@:4}}" ;;
  *) exec {python} "$@" ;;
esac
"""


def inside(folder: Path, **env: Any) -> subprocess.CompletedProcess[str]:
    program(folder / "bin/apptainer", '#!/bin/sh\nfor word; do echo "$word"; done\n')
    (folder / "image.sif").touch()
    # `environment` drops variables of DDLBENCH_ from outside; these are given to it
    given: dict[str, Any] = {"DDLBENCH_IMAGE": str(folder / "image.sif"), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    return run(SCRIPT, "-m", "ddlbench", "results_dir=two words", **given | env)


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


def sections() -> dict[str, str]:
    """The parts of the recipe by name; its head is that of the name ""."""
    text = (ROOT / "scripts/container/ddlbench.def").read_text()
    head, *rest = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    return {"": head} | dict(zip(rest[::2], rest[1::2], strict=True))


def test_every_variable_of_the_recipe_has_a_value() -> None:
    result = sections()
    values = dict(line.strip().split("=", 1) for line in result["arguments"].splitlines() if line.strip())
    assert set(re.findall(r"\{\{ (\w+) \}\}", result[""])) == set(values) == {"REGISTRY", "BASE"}


@pytest.mark.slow
def test_the_steps_of_the_recipe_install_ddlbench_and_ask_for_what_it_needs(tmp_path: Path) -> None:
    """From the files that it copies, and no others."""
    result, image = sections(), tmp_path / "image"
    image.mkdir()
    for source, target in (line.split() for line in result["files"].splitlines() if line.strip()):
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, target.replace("/opt/ddlbench", str(image)))
    program(tmp_path / "bin/python", PYTHON.format(folder=tmp_path, python=sys.executable))
    steps = result["post"].replace("/opt/ddlbench", str(image))
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    done = run("sh", "-euc", steps, PATH=path, PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "ddlbench" / "conf" / "config.yaml").is_file()
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    asked = (image / "requirements.txt").read_text().splitlines()
    assert [need for need in needs if need not in asked] == ["torch>=2.11", "torchvision>=0.26", "numpy>=1.26"]
    assert set(asked) < set(needs)
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert calls[0] == "-m pip install --no-cache-dir --no-deps ."
    assert "-m pip install --no-cache-dir -r requirements.txt" in calls
