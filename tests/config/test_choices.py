"""A label cannot lie: no option can be changed into another one, and other sizes of a model are visible."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from ddlbench.config.choices import changed, check_label, choices
from ddlbench.config.command_line import LABELS, check_words
from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.results.tables.labels import ALWAYS_SHOWN

RESNET = ("+framework=ddp", "+model=resnet50")


@pytest.mark.parametrize("key", sorted(LABELS))
def test_a_label_is_no_users_key(key: str) -> None:
    names = {f"{group}.name" for group in ("framework", "model", "loader", "data", "recipe")}
    assert names | {"model.kind", "data.kind"} == LABELS
    for sign in ("", "+", "++"):
        with pytest.raises(UserError, match=rf"{key} belongs to the option: .* \+?{key.split('.')[0]}=NAME"):
            check_words([f"{sign}{key}=ddp"])


def test_the_name_of_a_site_and_of_an_optimizer_are_free() -> None:
    check_words(["cluster.name=mine", "recipe.optimizer.name=adam", "recipe.schedule.name=step"])


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("+framework=zero1", "framework.zero_stage=3"), r"zero_stage=3 is not zero1, .* 1: choose \+framework=zero3$"),
        (("+framework=gpipe", "framework.schedule=1f1b"), r"is not gpipe, .* gpipe: choose \+framework=1f1b$"),
        (("+framework=1f1b", "framework.schedule=interleaved"), r"choose \+framework=interleaved$"),
        (("+framework=pipedream", "framework.double_buffered=true"), r"=true is not .* \+framework=pipedream_2bw$"),
        (("+framework=pipedream_2bw", "framework.double_buffered=false"), r"=false is not .* \+framework=pipedream$"),
    ],
)
def test_an_option_cannot_be_changed_into_another(words: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        configuration(*words, "+model=resnet50")


@pytest.mark.parametrize(
    "words",
    [
        ("+framework=deepspeed", "framework.zero_stage=3"),
        ("+framework=hybrid", "framework.schedule=zero_bubble"),
        ("+framework=zero1", "framework.zero_stage=1", "framework.overlap_comm=true"),
        ("+framework=interleaved", "framework.virtual_stages=4"),
    ],
)
def test_a_generic_option_and_other_keys_are_free(words: tuple[str, ...]) -> None:
    assert configuration(*words, "+model=resnet50").framework.name == words[0].partition("=")[2]


def test_where_no_option_has_the_value_the_generic_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without = [name for name in choices("framework") if name != "zero3"]
    result = {"framework": without, "model": choices("model")}
    monkeypatch.setattr("ddlbench.config.choices.choices", lambda group: result.get(group, []))
    with pytest.raises(UserError, match=r"choose \+framework=deepspeed framework\.zero_stage=3$"):
        configuration("+framework=zero1", "framework.zero_stage=3", "+model=resnet50")


def test_the_report_shows_what_defines_a_generic_option() -> None:
    generic: dict[str, str] = {}
    for name in choices("framework"):
        made: Any = configuration(f"+framework={name}", "+model=resnet50").framework
        generic |= {field.metadata["defines"]: field.name for field in fields(made) if field.metadata.get("defines")}
    assert generic == ALWAYS_SHOWN


def test_a_class_under_the_name_of_another_option() -> None:
    with pytest.raises(UserError, match=r"framework\.name=fsdp is the name of .*\.FSDP, not of x\.DDP: choose another"):
        check_label("framework", "x.DDP", DDP(name="fsdp"))
    check_label("framework", "x.DDP", DDP(name="of_the_users_own_file"))


def model_of(*words: str) -> Config:
    return configuration("+framework=ddp", *words)


def test_a_model_cannot_be_changed_into_another_one() -> None:
    with pytest.raises(UserError, match=r"^model\.layers=\[3,4,23,3\] is resnet101, not resnet50: .*=resnet101$"):
        model_of("+model=resnet50", "model.layers=[3,4,23,3]", "model.image_size=64")
    medium = ("model.n_layer=24", "model.n_embd=1024", "model.n_head=16")
    with pytest.raises(UserError, match=r"is gpt2_medium, not gpt2_small: choose \+model=gpt2_medium$"):
        model_of("+model=gpt2_small", *medium)
    assert model_of("+model=gpt2_small", medium[0], medium[2]).model.name == "gpt2_small"


def test_other_sizes_are_known_as_such() -> None:
    made = model_of("+model=resnet50", "model.layers=[1,1,1,1]", "model.image_size=64").model
    assert changed(vars(made)) == {"image_size": 64, "layers": [1, 1, 1, 1]}
    for name in choices("model"):
        assert changed(vars(model_of(f"+model={name}").model)) == {}
    assert changed({"name": "of_the_users_own_file", "layers": [1]}) == {}
    assert changed({}) == changed({"name": ["x"]}) == {}
