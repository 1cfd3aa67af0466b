"""A label cannot lie: no option can be changed into another one, and other sizes of a model are visible."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from ddlbench.config.choices import changed, check_label, choices, published
from ddlbench.config.command_line import LABELS, check_words
from ddlbench.config.compose import configuration
from ddlbench.errors import UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.results.tables.labels import ALWAYS_SHOWN


@pytest.mark.parametrize("key", sorted(LABELS))
def test_a_label_is_no_users_key(key: str) -> None:
    names = {f"{group}.name" for group in ("framework", "model", "loader", "data", "recipe")}
    assert names | {"model.kind", "data.kind"} == LABELS
    for sign in ("", "+", "++"):
        with pytest.raises(UserError, match=rf"{key} belongs to the option: .* \+?{key.split('.')[0]}=NAME"):
            check_words([f"{sign}{key}=ddp"])


def test_the_name_of_a_site_and_of_an_optimizer_are_free() -> None:
    check_words(["cluster.name=mine", "recipe.optimizer.name=adam", "recipe.schedule.name=step"])


IMAGES, TEXT, MEDIUM = "+model=resnet50", "+framework=ddp +model=gpt2_small", "model.n_layer=24 model.n_head=16"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (f"+framework=zero1 {IMAGES} framework.zero_stage=3", r"=3 is not zero1, .* 1: choose \+framework=zero3$"),
        (f"+framework=gpipe {IMAGES} framework.schedule=1f1b", r"not gpipe, .* gpipe: choose \+framework=1f1b$"),
        (f"+framework=1f1b {IMAGES} framework.schedule=interleaved", r"choose \+framework=interleaved$"),
        (f"+framework=pipedream {IMAGES} framework.double_buffered=true", r"=true .* \+framework=pipedream_2bw$"),
        (f"+framework=pipedream_2bw {IMAGES} framework.double_buffered=false", r"=false .* \+framework=pipedream$"),
        (
            f"+framework=ddp {IMAGES} model.layers=[3,4,23,3] model.image_size=64",
            r"^model\.layers=\[3,4,23,3\] is resnet101, not resnet50: .*=resnet101$",
        ),
        (f"{TEXT} {MEDIUM} model.n_embd=1024", r"is gpt2_medium, not gpt2_small: choose \+model=gpt2_medium$"),
    ],
)
def test_an_option_cannot_be_changed_into_another(words: str, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        configuration(*words.split())


@pytest.mark.parametrize(
    "words",
    [
        f"+framework=deepspeed {IMAGES} framework.zero_stage=3",
        f"+framework=hybrid {IMAGES} framework.schedule=zero_bubble",
        f"+framework=zero1 {IMAGES} framework.zero_stage=1 framework.overlap_comm=true",
        f"+framework=interleaved {IMAGES} framework.virtual_stages=4",
        f"{TEXT} {MEDIUM}",
    ],
)
def test_a_generic_option_and_other_keys_are_free(words: str) -> None:
    framework, model = (word.partition("=")[2] for word in words.split()[:2])
    made = configuration(*words.split())
    assert (made.framework.name, made.model.name) == (framework, model)


def test_where_no_option_has_the_value_the_generic_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without = [name for name in choices("framework") if name != "zero3"]
    result = {"framework": without, "model": choices("model")}
    monkeypatch.setattr("ddlbench.config.choices.choices", lambda group: result.get(group, []))
    with pytest.raises(UserError, match=r"choose \+framework=deepspeed framework\.zero_stage=3$"):
        configuration("+framework=zero1", "framework.zero_stage=3", "+model=resnet50")


def test_a_copied_model_needs_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = replace(configuration("+framework=ddp", IMAGES).model, layers=[1, 1, 1, 1])  # pyright: ignore
    target = published("model", "resnet50")["_target_"]

    def copied(group: str, option: str) -> dict[str, Any]:
        return (
            {**published(group, "resnet50"), "layers": [1, 1, 1, 1]} if option == "mine" else published(group, option)
        )

    monkeypatch.setattr("ddlbench.config.choices.published", copied)
    monkeypatch.setattr("ddlbench.config.choices.choices", lambda group: [*choices(group), "mine"])
    with pytest.raises(
        UserError, match=r"conf/model/mine\.yaml is a model of the name resnet50: write name: mine there"
    ):
        check_label("model", target, model)


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


def test_other_sizes_are_known_as_such() -> None:
    made = configuration("+framework=ddp", IMAGES, "model.layers=[1,1,1,1]", "model.image_size=64").model
    assert changed("model", vars(made)) == {"image_size": 64, "layers": [1, 1, 1, 1]}
    for name in choices("model"):
        assert changed("model", vars(configuration("+framework=ddp", f"+model={name}").model)) == {}
    assert changed("model", {"name": "of_the_users_own_file", "layers": [1]}) == {}
    assert changed("model", {}) == changed("model", {"name": ["x"]}) == {}
