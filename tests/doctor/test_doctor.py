"""The report on this machine: it has every choice, whatever is missing, and nothing makes it fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import omegaconf
import pytest
import torch
from omegaconf import OmegaConf

from ddlbench.config import choices as yamls
from ddlbench.config import schema
from ddlbench.config.choices import choices, conf_dir
from ddlbench.config.compose import quiet
from ddlbench.data.loaders.synthetic import Synthetic
from ddlbench.doctor import __main__ as doctor
from ddlbench.doctor.__main__ import framework, loader, table
from ddlbench.errors import Unavailable, Unsupported
from ddlbench.frameworks.ddp import DDP
from ddlbench.job import Job
from ddlbench.ranks.launch import Launch
from tests.support.processes import environment
from tests.support.waiting import WITHIN_S

CPU, ALONE = torch.device("cpu"), Launch("alone")


@dataclass
class Missing(DDP):
    def check(self, job: Job) -> None:
        raise Unavailable("abacus cannot be imported: pip install abacus")


@dataclass
class Pairs(DDP):
    """Prints while its library is imported, as some do."""

    library: ClassVar[str] = "omegaconf"

    def check(self, job: Job) -> None:
        print("welcome to pairs")
        if job.world_size < 2:
            raise Unsupported("pairs need 2 ranks")


@dataclass
class Never(DDP):
    def check(self, job: Job) -> None:
        raise Unsupported(f"not on {job.world_size} ranks")


@dataclass
class Broken(DDP):
    def check(self, job: Job) -> None:
        raise RuntimeError("\nundefined symbol")


@dataclass
class Pictures(Synthetic):
    def check(self, dataset: object, model: object, device: object) -> None:
        if dataset.kind != "images":  # pyright: ignore
            raise Unsupported("pictures only")


@dataclass
class Lost(Synthetic):
    def check(self, dataset: object, model: object, device: object) -> None:
        raise Unavailable("pip install lost")


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the configuration, to which choices can be added."""
    shutil.copytree(conf_dir(), tmp_path / "conf")
    with monkeypatch.context() as patched:
        patched.setattr("ddlbench.config.choices.conf_dir", lambda: tmp_path / "conf")
        yield tmp_path / "conf"
    read_anew()


def read_anew() -> None:
    for cached in (choices, yamls._content, yamls.published, schema._made):
        cached.cache_clear()


def add(conf: Path, group: str, like: str, target: str) -> None:
    own = {"_target_": f"tests.doctor.test_doctor.{target}", "name": "added"}
    content = (conf / group / f"{like}.yaml").read_text().splitlines()
    lines = [f"{key}: {own[key]}" if (key := line.partition(":")[0]) in own else line for line in content]
    (conf / group / "added.yaml").write_text("\n".join(lines))
    read_anew()


@pytest.mark.parametrize(
    ("target", "value", "remark"),
    [
        ("Missing", "unavailable", "abacus cannot be imported: pip install abacus"),
        ("Pairs", f"runs, omegaconf {omegaconf.__version__}, on more ranks than one", ""),
        ("Never", "unsupported here", "not on 1 ranks"),
        ("Broken", "broken", "RuntimeError: undefined symbol"),
    ],
)
def test_every_framework_checks_whether_it_runs_here(
    conf: Path, capsys: pytest.CaptureFixture[str], target: str, value: str, remark: str
) -> None:
    add(conf, "framework", "ddp", target)
    with quiet():
        assert framework("added", ALONE, CPU) == ("added", value, remark)
    assert capsys.readouterr().out == ""


def test_frameworks_are_checked_for_the_ranks_of_the_launch(conf: Path) -> None:
    add(conf, "framework", "ddp", "Never")
    assert framework("added", Launch("srun", world_size=8), CPU)[2] == "not on 8 ranks"
    assert framework("single", Launch("srun", world_size=8), CPU)[1] == "unsupported here"
    assert framework("ddp", Launch("srun", world_size=8), CPU)[1] == f"runs, torch {torch.__version__}"


def test_a_yaml_that_names_nothing_is_broken(conf: Path) -> None:
    add(conf, "framework", "ddp", "Nobody")
    assert framework("added", ALONE, CPU)[1] == "broken"
    assert "Nobody" in framework("added", ALONE, CPU)[2]


def test_what_a_loader_reads(conf: Path) -> None:
    torch_version = f"torch {torch.__version__}"
    assert loader("native", CPU) == ("native", f"reads images and text, {torch_version}", "")
    add(conf, "loader", "synthetic", "Pictures")
    assert loader("added", CPU) == ("added", f"reads images, {torch_version}", "pictures only")
    add(conf, "loader", "synthetic", "Lost")
    assert loader("added", CPU) == ("added", "unavailable", "pip install lost")


def test_the_name_of_a_library_is_no_key() -> None:
    assert "library" not in OmegaConf.structured(Pairs)


def test_columns_are_aligned() -> None:
    text = table([("ddp", "runs", ""), ("horovod", "unavailable", "build it")])
    assert text.splitlines() == [
        "  ddp      runs",
        "  horovod  unavailable",
        "           ! build it",
    ]


def test_a_section_that_cannot_be_made_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[doctor.Line]:
        raise OSError("no such file")

    for name in ("links", "limits", "launchers", "loader"):
        monkeypatch.setattr(doctor, name, fail)
    monkeypatch.setattr(doctor, "choices", lambda group: ["ddp"])
    text = doctor.report(ALONE)
    assert text.count("not available\n    ! OSError: no such file") == 4
    assert "\n  ddp  runs, torch" in text


@pytest.mark.slow
def test_the_program_names_every_choice_and_ends_well(tmp_path: Path) -> None:
    """With variables that no run would accept, in any folder, without a visible GPU."""
    variables = environment(RANK="0", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "ddlbench.doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    sections = dict(part.split("\n", 1) for part in done.stdout.strip().split("\n\n"))
    assert list(sections) == [
        "Frameworks", "Loaders", "Devices", "Links", "Communication", "Launchers", "Limits", "Software",
    ]  # fmt: skip
    for group, section in (("framework", "Frameworks"), ("loader", "Loaders")):
        assert [line.split()[0] for line in sections[section].splitlines() if "!" not in line] == list(choices(group))
    assert "unset RANK" in sections["Launchers"]
    assert "none visible" in sections["Devices"]
    for limit in ("ulimit -Hn", "ulimit -l", "/dev/shm", "memory cgroup"):
        assert limit in sections["Limits"]
    assert not list(tmp_path.iterdir())


def test_only_rank_0_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "detect", lambda: Launch("srun", rank=1, world_size=2, local_rank=1, local_world_size=2)
    )
    assert doctor.main([]) == 0
    assert capsys.readouterr().out == ""
