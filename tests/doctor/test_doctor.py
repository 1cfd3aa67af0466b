"""The report on this machine: it has every choice, whatever is missing, and nothing makes it fail."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import omegaconf
import pytest
import torch

from ddlbench.config.choices import choices
from ddlbench.config.compose import quiet
from ddlbench.data.feed import Dataset
from ddlbench.data.loaders.synthetic import Synthetic
from ddlbench.doctor import __main__ as doctor
from ddlbench.doctor.__main__ import framework, loader
from ddlbench.errors import Unavailable, Unsupported
from ddlbench.frameworks.ddp import DDP
from ddlbench.job import Job
from ddlbench.ranks.launch import Launch
from tests.support.processes import run

CPU, ALONE = torch.device("cpu"), Launch("alone")


def refuse(why: Exception) -> Callable[..., None]:
    """A check that refuses every job, or all data."""

    def check(*_: object) -> None:
        raise why

    return check


def pairs(_: DDP, job: Job) -> None:
    """Prints while its library is imported, as some do."""
    print("welcome to pairs")
    if job.world_size < 2:
        raise Unsupported("pairs need 2 ranks")


def never(_: DDP, job: Job) -> None:
    raise Unsupported(f"not on {job.world_size} ranks")


@pytest.mark.parametrize(
    ("check", "value", "remark"),
    [
        (refuse(Unavailable("no abacus: pip install abacus")), "unavailable", "no abacus: pip install abacus"),
        (pairs, f"runs, omegaconf {omegaconf.__version__}, on more ranks than one", ""),
        (never, "unsupported here", "not on 1 ranks"),
        (refuse(RuntimeError("\nundefined symbol")), "broken", "RuntimeError: undefined symbol"),
    ],
)
def test_every_framework_checks_whether_it_runs_here(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    check: Callable[..., None],
    value: str,
    remark: str,
) -> None:
    monkeypatch.setattr(DDP, "check", check)
    monkeypatch.setattr(DDP, "library", "omegaconf", raising=False)
    with quiet():
        assert framework("ddp", ALONE, CPU) == ("ddp", value, remark)
    assert capsys.readouterr().out == ""


def test_frameworks_are_checked_for_the_ranks_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch("srun", world_size=8)
    assert framework("single", launch, CPU)[1] == "unsupported here"
    assert framework("ddp", launch, CPU)[1] == f"runs, torch {torch.__version__}"
    monkeypatch.setattr(DDP, "check", never)
    assert framework("ddp", launch, CPU)[2] == "not on 8 ranks"


@pytest.mark.parametrize("name", ["channel", "spatial"])
def test_a_framework_of_images_runs_here(name: str) -> None:
    assert framework(name, ALONE, CPU)[1] == f"runs, torch {torch.__version__}"


def test_a_choice_that_cannot_be_composed_is_broken() -> None:
    _, value, remark = framework("nobody", ALONE, CPU)
    assert (value, "nobody" in remark) == ("broken", True)


def test_what_a_loader_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def pictures(_: Synthetic, dataset: Dataset, *__: object) -> None:
        if dataset.kind != "images":
            raise Unsupported("pictures only")

    torch_version = f"torch {torch.__version__}"
    assert loader("native", CPU) == ("native", f"reads images and text, {torch_version}", "")
    monkeypatch.setattr(Synthetic, "check", pictures)
    assert loader("synthetic", CPU) == ("synthetic", f"reads images, {torch_version}", "pictures only")
    monkeypatch.setattr(Synthetic, "check", refuse(Unavailable("pip install lost")))
    assert loader("synthetic", CPU) == ("synthetic", "unavailable", "pip install lost")


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
    done = run(sys.executable, "-m", "ddlbench.doctor", cwd=tmp_path, RANK="0", CUDA_VISIBLE_DEVICES="")
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


def test_a_terminal_of_ascii_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(doctor, "report", lambda _: "Devices\n  cpu  Intel\u00ae Xeon\u00ae\n\nLinks")
    assert doctor.main([]) == 0
    assert written.getvalue() == b"Devices\n  cpu  Intel\\xae Xeon\\xae\n\nLinks\n"
