"""docs/frameworks.md is what the frameworks answer, on every machine; and its words say what was answered."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from ddlbench.config.choices import choices, conf_dir
from ddlbench.errors import Unavailable, Unsupported, UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.job import Job
from scripts.pages.frameworks import Reasons, cell, page, scope
from scripts.pages.survey import Case, Knob, Survey, knobs

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
ALL = [Case(*case) for case in product(("ResNet", "GPT2"), ("fp32", "bf16", "fp16"))]


@pytest.fixture(scope="module")
def survey() -> Survey:
    return Survey.compose()


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@dataclass
class Picky(DDP):
    """Refuses by model, precision, knob of its own, device and number of ranks."""

    def __post_init__(self) -> None:
        if self.static_graph:
            raise UserError("picky: no static graphs")

    def check(self, job: Job) -> None:
        if job.world_size != 1:
            raise Unsupported("picky: alone or not at all")
        if job.model.name == "vgg16" and job.precision == "fp16" and self.comm_hook != "fp16":
            raise Unsupported("picky: no VGG in fp16")
        if job.clip_norm is not None and job.device.type == "cpu":
            raise Unsupported("picky: clips on GPUs only")


@dataclass
class Missing(DDP):
    def check(self, job: Job) -> None:
        raise Unavailable("pip install abacus")


def test_the_page_is_what_the_frameworks_answer(
    survey: Survey, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Survey, "compose", lambda: survey)
    monkeypatch.delitem(sys.modules, "scripts.pages.frameworks")  # runpy warns of a module that is there
    runpy.run_module("scripts.pages.frameworks", run_name="__main__")
    assert PAGE.read_text() == capsys.readouterr().out, "run `make docs`"
    assert not torch.cuda.is_initialized()


def test_a_framework_that_refuses_more_changes_the_page(survey: Survey) -> None:
    text = page(replace(survey, frameworks={"ddp": Picky()}))
    assert "The checks are for 4 GPUs (`ddp`: 1), models of full size" in text
    assert "| `ddp` | yes | yes | yes | yes | yes | fp32, bf16 ([1]) |\n" in text
    own = section(text, "Each framework's own options")
    assert "- `static_graph=true`: no ([2])\n" in own
    assert "- `comm_hook=fp16`: also VGG in fp16\n" in own
    assert "- `train.clip_norm=1`: `ddp` no ([3])\n" in section(text, "On CPU")
    messages = ("no VGG in fp16", "no static graphs", "clips on GPUs only")
    lines = [f'{number}. <a id="reason-{number}"></a>{message}' for number, message in enumerate(messages, start=1)]
    assert section(text, "Reasons").splitlines()[-7:] == [*lines, "", *(f"[{n}]: #reason-{n}" for n in (1, 2, 3))]


def test_a_library_that_is_not_installed_changes_nothing(survey: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("deepspeed", "horovod", "horovod.torch", "horovod.torch.mpi_ops"):
        monkeypatch.setitem(sys.modules, module, None)
    own = replace(survey, frameworks={name: survey.frameworks[name] for name in ("horovod", "zero3")})
    rows = [line for line in page(own).splitlines() if line.startswith(("| `horovod`", "| `zero3`"))]
    assert len(rows) == 6
    here = [line.partition(" (")[0] for line in PAGE.read_text().splitlines()]
    assert {row.partition(" (")[0] for row in rows} <= set(here)


def test_a_framework_that_needs_a_missing_library_to_answer_leaves_no_page(survey: Survey) -> None:
    with pytest.raises(Unavailable, match="pip install abacus"):
        page(replace(survey, frameworks={"ddp": Missing()}))


def test_every_framework_and_knob_is_on_the_page(survey: Survey) -> None:
    own = section(PAGE.read_text(), "Each framework's own options")
    assert tuple(sorted(survey.names)) == choices("framework")
    for group in survey.groups:
        text = own.partition(f"### {', '.join(group)}\n")[2].partition("\n### ")[0]
        keys = {key for name in group for key in OmegaConf.load(conf_dir() / "framework" / f"{name}.yaml")}
        assert {key for key in keys if f"\n| `{key}` | " in text} == keys - {"_target_", "name"}, group


@pytest.mark.parametrize(
    ("some", "words"),
    [
        (ALL, ""),
        ([case for case in ALL if case.model == "GPT2"], "GPT2"),
        ([case for case in ALL if case.precision != "fp16"], "fp32, bf16"),
        ([Case("ResNet", "bf16")], "ResNet in bf16"),
        ([*ALL[:3], Case("GPT2", "fp16")], "ResNet; GPT2 in fp16"),
    ],
)
def test_a_cell_names_the_cases_that_it_holds_for(some: list[Case], words: str) -> None:
    assert scope(some, ALL) == words


def test_a_cell_shows_which_cases_run_and_why_others_do_not() -> None:
    reasons = Reasons()
    assert cell({}, reasons) == "-"
    assert cell(dict.fromkeys(ALL), reasons) == "yes"
    assert cell(dict.fromkeys(ALL, "ddp: 3 are too many"), reasons) == "no ([1])"
    other = {case: "too few" if case.precision == "fp16" else None for case in ALL}
    assert cell(other, reasons) == "fp32, bf16 ([2])"
    mixed = {case: "fsdp: 4 are too many" if case.model == "GPT2" else reason for case, reason in other.items()}
    assert cell(mixed, reasons) == "ResNet in fp32, bf16 ([1], [2])"
    assert list(reasons.messages.values()) == ["3 are too many", "too few"]


def test_a_knob_is_read_with_its_comment(survey: Survey) -> None:
    meaning, values = next(iter(knobs(["zero0", "deepspeed"]).values()))
    assert values == {"zero0": "0", "deepspeed": "1"}
    assert meaning.startswith("what is sharded: 0 nothing | 1")
    words = Knob("none | fp16 | all of it: what travels", {"ddp": "bf16"})
    ddp = replace(survey, frameworks={"ddp": DDP("ddp", comm_hook="bf16")})
    assert list(ddp.tried({"comm_hook": words})) == ["comm_hook=none", "comm_hook=fp16"]
