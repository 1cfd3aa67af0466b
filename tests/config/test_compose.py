"""Configurations that are put together without Hydra: they are those that Hydra composes."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from ddlbench.config.choices import conf_dir
from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config, resolve
from ddlbench.errors import UserError
from tests.config.test_schema import ALL, WORDS, overrides_of

REPLACED = [
    ("train.seed=3", "train.clip_norm=1", "train.precision=bf16"),
    ("model.layers=[1,1,1,1]", "model.image_size=64", "data.crop_scale=[0.5,1]"),
    ("recipe.optimizer.lr=0.5", "recipe.schedule.milestones=[1,2]", "recipe.optimizer.fused=null"),
    ("results_dir='/a b/c'", "cluster.notes=''", "mode=loader", "++train.steps=5"),
    ("train.seed=1", "train.seed=2"),
    ("data.root=${results_dir}", "cluster.name='${mode}'"),
    ("recipe.optimizer={lr: 0.7}",),
]


def hydras(*words: str) -> Config:
    """The configuration as Hydra composes it."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return resolve(compose("config", list(words)))


@pytest.mark.parametrize("words", REPLACED, ids=lambda words: words[0])
def test_it_is_what_hydra_would_have_composed(words: tuple[str, ...]) -> None:
    assert configuration(*WORDS, *words).resolved == hydras(*WORDS, *words).resolved
    assert configuration(*WORDS).resolved == hydras(*WORDS).resolved


@pytest.mark.parametrize(("group", "option"), ALL, ids=str)
def test_every_option_is_composed_as_hydra_does(group: str, option: str) -> None:
    words = overrides_of(group, option)
    assert configuration(*words).resolved == hydras(*words).resolved


def test_no_object_is_returned_twice() -> None:
    one, two = configuration(*WORDS), configuration(*WORDS)
    assert one.framework == two.framework
    for name in ("framework", "model", "loader", "data", "recipe", "cluster", "train"):
        assert getattr(one, name) is not getattr(two, name)
    one.recipe.optimizer.lr = 9.0
    assert configuration(*WORDS).recipe.optimizer.lr == two.recipe.optimizer.lr != 9.0


def test_the_environment_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for site in ("here", "there"):
        monkeypatch.setenv("SLURM_CLUSTER_NAME", site)
        assert configuration(*WORDS, "cluster=slurm").cluster.name == site


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.epoch=3",), r"^train\.epoch does not exist: did you mean train\.epochs\?"),
        (("+hallo=3",), r"^hallo does not exist: the keys are backend"),
        (("train.seed=1,2",), "gives several values"),
        (("framework.name=fsdp",), r"framework\.name belongs to the option"),
        (("train.epochs=many",), r"^train\.epochs: Value 'many'"),
        (("results_dir=???",), r"^results_dir: Missing mandatory value"),
        (("train=null",), "train=None is no section of keys"),
        (("recipe=sdg",), r"recipe=sdg does not exist: choose one of .*adamw"),
    ],
)
def test_mistakes_are_those_of_the_command_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        configuration(*WORDS, *words)
    with pytest.raises(UserError, match=r"^no model: give \+model=NAME"):
        configuration("+framework=ddp", "train.seed=1")
