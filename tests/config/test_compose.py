"""Thousands of configurations: Hydra composes few of them, and nothing else is different."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hydra import compose as hydras
from omegaconf import OmegaConf

from ddlbench.config import compose
from ddlbench.config.choices import choices, choose, published
from ddlbench.config.compose import configuration, configurations
from ddlbench.config.schema import resolve
from ddlbench.errors import UserError

pytestmark = pytest.mark.usefixtures("composed_anew")
WORDS = ("+framework=ddp", "+model=resnet50")
REPLACED = [
    ("train.seed=3", "train.clip_norm=1", "train.precision=bf16"),
    ("model.layers=[1,1,1,1]", "model.image_size=64", "data.crop_scale=[0.5,1]"),
    ("recipe.optimizer.lr=0.5", "recipe.schedule.milestones=[1,2]", "recipe.optimizer.fused=null"),
    ("results_dir='/a b/c'", "cluster.notes=''", "mode=loader", "++train.steps=5"),
    ("train.seed=1", "train.seed=2"),
    ("data.root=${results_dir}", "cluster.name='${mode}'"),
    ("recipe.optimizer={lr: 0.7}",),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What Hydra is asked to compose."""
    result: list[list[str]] = []

    def counted(name: str, overrides: list[str]) -> Any:
        result.append(overrides)
        return hydras(name, overrides)

    monkeypatch.setattr(compose, "compose", counted)
    return result


def test_hydra_composes_once_for_each_combination_of_options(calls: list[list[str]]) -> None:
    """Not for each framework and loader."""
    options = [
        (f"+framework={framework}", f"+model={model}", f"loader={loader}")
        for framework, model, loader in itertools.product(("ddp", "fsdp"), ("resnet50", "vgg16"), ("native", "dali"))
    ]
    keys = [f"train.{key}" for key in ("precision=bf16", "precision=fp32", "batch_per_gpu=8", "clip_norm=1")]
    with configurations():
        made = [
            configuration(*chosen, key, f"train.seed={seed}")
            for chosen, key, seed in itertools.product(options, keys, range(5))
        ]
    assert len(made) == 160
    assert sorted(calls) == [["+model=resnet50"], ["+model=vgg16"]]
    assert {config.train.seed for config in made} == set(range(5))
    assert {(config.framework.name, config.model.name, config.loader.name) for config in made} == {
        tuple(word.partition("=")[2] for word in chosen) for chosen in options
    }


@pytest.mark.parametrize("group", compose.PLAIN_GROUPS)
def test_the_section_of_a_framework_or_loader_is_its_yaml(group: str) -> None:
    with configurations():
        for option in choices(group):
            composed = hydras("config", [choose(group, option)])
            assert OmegaConf.to_container(composed[group], resolve=True) == published(group, option)


@pytest.mark.parametrize("words", REPLACED, ids=lambda words: words[0])
def test_it_is_what_hydra_would_have_composed(words: tuple[str, ...]) -> None:
    with configurations():
        expected = resolve(hydras("config", [*WORDS, *words]))
        configuration(*WORDS)  # composed before: keys are replaced
        assert configuration(*WORDS, *words).resolved == expected.resolved
        assert configuration(*WORDS).resolved == resolve(hydras("config", list(WORDS))).resolved


def test_no_object_is_returned_twice() -> None:
    with configurations():
        one, two = configuration(*WORDS), configuration(*WORDS)
    assert one.framework == two.framework
    for name in ("framework", "model", "loader", "data", "recipe", "cluster", "train"):
        assert getattr(one, name) is not getattr(two, name)
    one.recipe.optimizer.lr = 9.0
    with configurations():
        assert configuration(*WORDS).recipe.optimizer.lr == two.recipe.optimizer.lr != 9.0


def test_the_environment_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for site in ("here", "there"):
        monkeypatch.setenv("SLURM_CLUSTER_NAME", site)
        with configurations():
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
        (("recipe=sdg",), r"Could not find 'recipe/sdg'"),
    ],
)
def test_mistakes_are_those_of_the_command_line(words: tuple[str, ...], message: str) -> None:
    with configurations(), pytest.raises(UserError, match=message):
        configuration(*WORDS, *words)
    with configurations(), pytest.raises(UserError, match=r"^no model: give \+model=NAME"):
        configuration("+framework=ddp", "train.seed=1")


def main() -> None:
    """python -m tests.config.test_compose prints the time of 5,000 configurations."""
    options = [(f"+framework={name}", f"+model={model}") for name in ("ddp", "fsdp") for model in ("resnet50", "vgg16")]
    began = time.perf_counter()
    with configurations():
        for chosen, batch, seed in itertools.product(options, range(1, 51), range(25)):
            configuration(*chosen, f"train.batch_per_gpu={batch}", f"train.seed={seed}")
    print(f"5,000 configurations of {len(options)} combinations: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
