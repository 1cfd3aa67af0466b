"""The installed wheel, away from the repository."""

from __future__ import annotations

import json
import os
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support import processes

ROOT = Path(__file__).parents[2]
WHERE = """import ddlbench.__main__ as m
from ddlbench.sweep import slurm
print(m.__file__, m.conf_dir() / "config.yaml", slurm.SCRIPTS / "run.sbatch", slurm._site_file("plain"))"""


def run(*command: str, **environment: str) -> str:
    done = processes.run(*command, cwd=Path(environment["HOME"]), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with what is installed, without a network."""
    home = tmp_path_factory.mktemp("wheel")
    offline = {"HOME": str(home), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(home), str(ROOT), **offline)
    (made,) = home.glob("ddlbench-*.whl")
    return made


def test_a_build_asks_for_hatchling_alone() -> None:
    """`pip install .` builds in an environment of its own: a library that needs torch would bring a second torch."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [name.partition(">")[0] for name in asked] == ["hatchling"]


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    python = "container/python.sh"  # which site files start
    places = {"src/": "", "conf": "ddlbench/conf", "scripts/slurm": "ddlbench/slurm_scripts"}
    places[f"scripts/{python}"] = f"ddlbench/{python}"
    tracked = {
        place: run("git", "-C", str(ROOT), "ls-files", place, HOME=str(wheel.parent)).splitlines() for place in places
    }
    wanted = {places[place] + name.removeprefix(place) for place, names in tracked.items() for name in names}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert wanted - packed == set()
    assert not [name for name in packed if name.startswith("tests/")]


def test_the_wheel_brings_its_configuration_and_templates(tmp_path: Path, wheel: Path) -> None:
    home, site = str(tmp_path), str(tmp_path / "site")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, str(wheel), HOME=home)
    program = [sys.executable, "-m", "ddlbench", "+framework=ddp", "+model=vgg16", "dryrun=true"]
    assert json.loads(run(*program, HOME=home, PYTHONPATH=site))["config"]["model"]["name"] == "vgg16"
    for place in run(sys.executable, "-c", WHERE, HOME=home, PYTHONPATH=site).split():
        assert place.startswith(site)
        assert Path(place).is_file()
    assert (tmp_path / "site" / "ddlbench" / "report" / "report.html.j2").is_file()
