"""Hostile values for every key of the configuration: each is refused in one line or accepted, never a traceback."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddlbench.config import schema as config
from ddlbench.config.choices import choices
from ddlbench.config.compose import hydra_line, make_job
from ddlbench.config.keys import shown
from ddlbench.config.schema import Config, resolve
from ddlbench.errors import RunError
from ddlbench.ranks.launch import Launch
from ddlbench.record.run_json import planned_run
from ddlbench.run.attempt import SCENARIOS, check
from ddlbench.run.settings import check_machine
from tests.config.test_compose import composed_by_hydra, overrides_of

VALUES: list[Any] = [
    "", None, "abc", -1, 0, 1, 10**400, float("1e999"), float("nan"), float("-inf"), 1e-300, 0.5, True, [], {}, [0],
    [1, 2], ["a"], {"a": 1}, "x" * 100_000, "\u00e9\u4e2d\U0001f600", "${oops}", "???", "~/x", 2**31, 2**63, 16, "..",
    "/", "/dev/null/x", "../x", "a\nb", "\x00", "\x1b[31m", "\udc80", "nan", "1e999", "0x10", "a/b", " ",
]  # fmt: skip
FAST = (  # the keys of native and of a ResNet are tested among the shared ones
    "fsdp", "hybrid", "interleaved", "local_sgd", "pipedream", "tensor", "dali", "synthetic", "imagenet", "sample_text",
    "wikitext2", "gpt2_small", "vgg16",
)  # fmt: skip
CPU = torch.device("cpu")
LONGEST_S = 10.0  # of one case: a loop over a size would take hours


def keys(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")


@dataclass
class Base:
    """A configuration that is right, and its parts, so that a case builds no more than the section that it changes."""

    plain: dict[str, Any]
    built: Config

    @classmethod
    def of(cls, *overrides: str) -> Base:
        result = composed_by_hydra(*overrides, "dryrun=true", "cluster=local")
        plain: Any = OmegaConf.to_container(result, resolve=True)
        return cls(plain, resolve(result))

    def with_value(self, key: str, value: object) -> Config:
        *path, name = key.split(".")
        group = path[0] if path else name
        changed = {**self.plain, group: copy.deepcopy(self.plain[group])}
        section = changed
        for part in path:
            section = section[part]
        section[name] = value
        if path:
            return replace(self.built, **{group: config.section(group, changed[group])})
        return config.build(changed)


def verdict(base: Base, key: str, value: object, world_sizes: Iterable[int]) -> str:
    """The lines that refuse the value, "" where a dry run of each size accepts it. Any other exception would be a
    traceback."""
    try:
        built = base.with_value(key, value)
        check_machine(built.train.threads_per_rank, built.loader, cores=8)
    except RunError as error:
        return line_of(error)
    except OmegaConfBaseException as error:
        return hydra_line(error)
    return "".join(dry_run(built, key, world_size) for world_size in world_sizes)


def dry_run(built: Config, key: str, world_size: int) -> str:
    try:
        job = make_job(built, Launch("alone", world_size=world_size), CPU)
        refusal = check(built, SCENARIOS[built.mode](built, job), CPU)
        if refusal:
            raise refusal
        if key.startswith(("model", "results")):
            planned_run(built, job, None)
    except RunError as error:
        return line_of(error)
    return ""


def line_of(error: RunError) -> str:
    return str(error) if error.exit_code in (2, 3, 4) else f"not before a run:\n{error}"


def fuzz(base: Base, names: Iterable[str], world_sizes: Iterable[int] = (1,)) -> dict[tuple[str, str], str]:
    """The result for each value of each key; failures are collected and shown together."""
    outcome, broken = dict[tuple[str, str], str](), list[str]()
    for key, value in itertools.product(names, VALUES):
        began = time.process_time()
        case = key, shown(repr(value), 40)
        try:
            outcome[case] = verdict(base, key, value, world_sizes)
            if "\n" in outcome[case]:
                broken.append(f"{case}: more than one line: {outcome[case]!r}")
        except Exception as error:
            broken.append(f"{case}: {type(error).__name__}: {str(error)[:200]}")
        if time.process_time() - began > LONGEST_S:
            broken.append(f"{case}: {time.process_time() - began:.0f} s")
    assert not broken, f"{len(broken)} of {len(outcome) + len(broken)}:\n" + "\n".join(broken)
    return outcome


SMALL_IMAGES = ("+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32")
SMALL_TEXT = ("+model=gpt2_small", "model.n_layer=4", "model.n_embd=16", "model.n_head=2", "model.vocab_size=512",
              "model.seq_len=16")  # fmt: skip
NO_TEXT = [value for value in VALUES if isinstance(value, str) and (not value.isprintable() or len(value) > 9999)]
NO_NUMBER = [value for value in VALUES if isinstance(value, int | float) and not abs(value) < 2**63]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDLBENCH_HOME", str(tmp_path / "home"))
    return tmp_path


def test_every_value_of_every_shared_key(folder: Path) -> None:
    base = Base.of("+framework=ddp", *SMALL_IMAGES)
    names = [key for key in keys(base.plain) if not key.endswith("_target_")]
    result = fuzz(base, names)
    assert len(names) > 70
    never = {shown(repr(value), 40) for value in ("", "~/x", {"a": 1}, *NO_TEXT, *NO_NUMBER)}
    accepted = {case for case, line in result.items() if case[1] in never and not line}
    assert accepted == {("cluster.notes", "''"), ("data.stage_to", "'~/x'")}
    assert list(folder.iterdir()) == []  # a dry run makes nothing


def cases(*groups: str) -> list[Any]:
    """Choices of these groups; one of each class, the others are marked slow."""
    return [
        pytest.param(group, choice, marks=[] if choice in FAST else pytest.mark.slow)
        for group in groups
        for choice in choices(group)
    ]


@pytest.mark.parametrize(("group", "framework"), cases("framework"))
def test_every_value_of_a_frameworks_own_keys(group: str, framework: str) -> None:
    base = Base.of(f"+framework={framework}", *(SMALL_TEXT if framework in ("tensor", "hybrid") else SMALL_IMAGES))
    names = [f"{group}.{key}" for key in base.plain[group] if key != "_target_"]
    fuzz(base, names, world_sizes=(1, 4))


@pytest.mark.parametrize(("group", "choice"), cases("loader", "data", "model"))
def test_every_value_of_a_choices_own_keys(group: str, choice: str) -> None:
    """The choices of a loader, of data or of a model. With a missing folder of data every value would be refused."""
    base = Base.of(*overrides_of(group, choice), *(["model.n_layer=1"] if choice.startswith("gpt2") else []))
    fuzz(base, [f"{group}.{key}" for key in base.plain[group] if key not in ("_target_", "name")])
