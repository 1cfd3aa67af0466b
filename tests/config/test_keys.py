"""A run's identity is what it measures: neither the module of a class nor a key that a later version adds."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest

from ddlbench.config import schema
from ddlbench.config.keys import added_later, measured_part
from ddlbench.config.schema import Config
from ddlbench.errors import added
from ddlbench.frameworks.ddp import DDP
from ddlbench.record.record import run_id
from ddlbench.results.tables.merge import SEEN, AttemptRow, measured_options, measurements
from tests.support.runs import composed

WORDS = ("+framework=ddp", "+model=resnet50")


def name_of(config: Config) -> str:
    return run_id(config.identity(), 4, 1, "abc")


def moved(cls: type, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Config:
    """The command's configuration where the framework's class is `cls`, in another module."""
    module = ModuleType("planted_elsewhere")
    setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def built(name: str, content: str) -> Any:
        planted = {"_target_": f"planted_elsewhere.{cls.__name__}", **changes} if name == "framework" else {}
        return schema.section(name, json.loads(content) | planted)

    with monkeypatch.context() as patched:
        patched.setattr(schema, "_made", built)
        return composed(*WORDS)


@dataclass
class Later(DDP):
    """DDP of a later version, which has one more key."""

    overlap: int | None = added(None)


def test_a_class_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = composed(*WORDS), moved(DDP, monkeypatch)
    assert name_of(before) == name_of(after)
    assert before.resolved == after.resolved
    assert "_target_" not in json.dumps(after.resolved)
    assert "ddlbench.frameworks" not in json.dumps([after.resolved, after.identity()])


def test_a_key_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = composed(*WORDS), moved(Later, monkeypatch)
    assert after.resolved["framework"]["overlap"] is None
    assert name_of(before) == name_of(after)
    assert name_of(moved(Later, monkeypatch, overlap=2)) != name_of(before)


def run_of(config: dict[str, Any], before: dict[str, Any] | None) -> AttemptRow:
    row = dict.fromkeys(SEEN, "x")
    return AttemptRow(row | {"status": "ok", "gpus": 4, "nodes": 1}, measured_options(config, before))


def test_an_old_record_merges_with_one_that_has_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, later, used = composed(*WORDS), moved(Later, monkeypatch), moved(Later, monkeypatch, overlap=2)
    old = plain.resolved
    old["framework"] |= {"_target_": "another.module.DDP"}
    del old["backend"], old["checkpoint"], old["framework"]["topk_ratio"]  # a record of the first version
    del old["data"]["train_dir"], old["data"]["val_dir"], old["train"]["deterministic"], old["train"]["cold_cache"]
    del old["train"]["offload_activations"], old["train"]["flops_per_host_byte"], old["train"]["time_limit_s"]
    runs = [run_of(old, None), *(run_of(config.resolved, added_later(config)) for config in (plain, later, used))]
    assert [len(group) for group in measurements(runs)] == [3, 1]


def test_keys_of_nested_sections_are_found_too() -> None:
    @dataclass
    class Part:
        speed: int = added(1)

    @dataclass
    class Whole:
        part: Part = field(default_factory=Part)
        size: int = 3

    assert added_later(Whole(), "recipe.") == {"recipe.part.speed": 1}
    plain = {"recipe": {"part": {"speed": 1}, "size": 3}}
    assert measured_part(plain, {"recipe.part.speed": 1}) == {"recipe": {"part": {}, "size": 3}}
    assert measured_part(plain, {"recipe.part.speed": 2, "absent.key": 0}) == plain


def test_plain_data_follow_the_objects() -> None:
    config = composed(*WORDS)
    changed = replace(config, train=replace(config.train, seed=7), results_dir="elsewhere")
    assert changed.resolved["train"]["seed"] == 7
    assert changed.resolved["results_dir"] == "elsewhere"
    assert changed.identity()["train"]["seed"] == 7
    assert config.resolved["train"]["seed"] == 0
    assert name_of(changed) != name_of(config)
