"""Configurations are put together without Hydra, from every YAML: they are those that Hydra composes. A wrong value
names its key. What a run measures is its identity."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ddlbench.__main__ import compose as compose_command_line
from ddlbench.config.choices import choices, choose, conf_dir, keys
from ddlbench.config.compose import configuration, recorded_configuration
from ddlbench.config.keys import Checkpoint, Train
from ddlbench.config.schema import GROUPS, SECTIONS, Config, resolve
from ddlbench.errors import UserError

BASE = {"framework": "ddp", "model": "resnet50"}
WORDS = ("+framework=ddp", "+model=resnet50")
ALL = [(group, choice) for group in GROUPS for choice in choices(group)]


def overrides_of(group: str, choice: str) -> list[str]:
    """The shortest command line with that choice. Text needs a text model, and the other way round."""
    text = choice.startswith(("gpt2", "wikitext", "sample_text"))
    wanted = {**BASE, "model": "gpt2_small" if text else "resnet50", group: choice}
    return [choose(name, value) for name, value in wanted.items()]


def composed_by_hydra(*words: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", list(words))


def require_hydras(config: Config, *words: str) -> None:
    assert config.resolved == resolve(composed_by_hydra(*words)).resolved


NO_KEYS = {  # not the user's to choose
    "sample_images": {"train_dir", "val_dir"},
    "sample_text": {"tokenizer", "cache_dir", "train", "valid"},
}


@pytest.mark.parametrize(("group", "choice"), ALL, ids=str)
def test_every_yaml_composes_and_lists_every_key_of_its_class(group: str, choice: str) -> None:
    """Hydra refuses a key that is not listed: one left out could not be set from the command line."""
    chosen = getattr(configuration(*overrides_of(group, choice)), group)
    assert chosen.name == choice
    listed = {key.name.partition(".")[0] for key in keys(group, choice)} - {"_target_"}
    known = {field.name for field in fields(chosen)}
    assert listed - {"kind"} == known - {"kind"} - NO_KEYS.get(choice, set())
    if group in ("data", "loader", "cluster"):  # its values are the class's
        assert chosen == type(chosen)(choice)


def combination(number: int) -> dict[str, str]:
    """Options of all groups. The first combinations have each model with its own data and recipe."""
    options = {group: list(choices(group)) for group in GROUPS}
    text = options["model"][number % 6].startswith("gpt2")
    options["data"] = [name for name in options["data"] if name.startswith(("wikitext", "sample_text")) == text]
    turns = dict.fromkeys(GROUPS, number) | {"data": number // 6}
    left = {"data", "recipe"} if number < 6 else set[str]()
    return {group: options[group][turns[group] % len(options[group])] for group in GROUPS if group not in left}


COMBINATIONS = [combination(number) for number in range(len(choices("framework")))]


def test_the_combinations_have_every_option() -> None:
    assert {option for combined in COMBINATIONS for option in combined.items()} == set(ALL)


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda options: options["framework"])
def test_options_are_composed_as_hydra_does(options: dict[str, str]) -> None:
    words = [choose(group, option) for group, option in options.items()]
    require_hydras(configuration(*words), *words)


@pytest.mark.parametrize(
    "words",
    [
        ("train.seed=3", "train.clip_norm=1", "train.precision=bf16"),
        ("model.layers=[1,1,1,1]", "model.image_size=64", "data.crop_scale=[0.5,1]"),
        ("recipe.optimizer.lr=0.5", "recipe.schedule.milestones=[1,2]", "recipe.optimizer.fused=null"),
        ("results_dir='/a b/c'", "cluster.notes=''", "mode=loader", "++train.steps=5"),
        ("train.seed=1", "train.seed=2"),
        ("data.root=${results_dir}", "cluster.name='${mode}'"),
        ("recipe.optimizer={lr: 0.7}",),
    ],
    ids=lambda words: words[0],
)
def test_values_are_those_that_hydra_would_have_composed(words: tuple[str, ...]) -> None:
    require_hydras(configuration(*WORDS, *words), *WORDS, *words)


def test_the_values_of_config_yaml_are_the_classes_own() -> None:
    assert configuration(*WORDS).train == Train()
    assert configuration(*WORDS).checkpoint == Checkpoint()


def test_no_object_is_returned_twice() -> None:
    one, two = configuration(*WORDS), configuration(*WORDS)
    for name in SECTIONS:
        assert getattr(one, name) is not getattr(two, name)
    one.recipe.optimizer.lr = 9.0
    assert configuration(*WORDS).recipe.optimizer.lr == two.recipe.optimizer.lr != 9.0


def test_the_environment_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for site in ("here", "there"):
        monkeypatch.setenv("SLURM_CLUSTER_NAME", site)
        assert configuration(*WORDS, "cluster=slurm").cluster.name == site


def test_gpt2_selects_its_data_and_recipe_unless_others_are_given() -> None:
    config = configuration("+framework=ddp", "+model=gpt2_small")
    assert (config.data.name, config.recipe.name) == ("sample_text", "adamw")
    config = configuration("+framework=ddp", "+model=gpt2_small", "recipe=lamb", "data=wikitext103")
    assert (config.data.name, config.recipe.name) == ("wikitext103", "lamb")


def test_a_command_line_may_name_the_time_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    OmegaConf.clear_resolver("now")  # of Hydra, which other tests use
    monkeypatch.setattr(sys, "argv", ["ddlbench", *WORDS, "results_dir=/r/${now:%Y}"])
    config = compose_command_line()
    assert config is not None
    assert re.fullmatch(r"/r/20\d\d", str(config.results_dir))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.epoch=3", r"^train\.epoch does not exist: did you mean train\.epochs\?"),
        ("model.layers.0=1", r"^model\.layers\.0: model\.layers has no keys: give its complete value"),
        ("train.seed=1,2", "gives several values"),
        ("results_dir=???", r"^results_dir: Missing mandatory value"),
        ("train=null", "train=None is no section of keys"),
        ("recipe=sdg", r"recipe=sdg does not exist: choose one of .*adamw"),
        ("framework.bucket_cap_mb=0", r"framework\.bucket_cap_mb=0.0 must be greater than 0"),
        ("framework.comm_hook=zip", r"framework\.comm_hook=zip must be one of none, fp16, bf16, powersgd, topk"),
        ("train.clip_norm=-1", r"train\.clip_norm=-1.0 must be greater than 0, or null"),
        ("model.image_size=big", r"model\.image_size: Value 'big'"),
        ("model.layers=5", r"^model\.layers must be a list, such as \[1,2\]$"),
        ("recipe.schedule=step", r"^recipe\.schedule is a section of keys: .* such as recipe\.schedule\.name="),
        ("recipe.optimizer.name=sdg", r"recipe\.optimizer\.name=sdg"),
        ("profile_steps=0", r"profile_steps=0 must be greater than 0"),
        ("profile_trace=true", r"set profile=true too"),
        ("preflight_warn=1", r"preflight_warn=1\.0 must be greater than 1"),
        ("preflight_stop=0.5", r"preflight_stop=0\.5 must be greater than 1"),
        ("checkpoint.every=0", r"checkpoint\.every=0 must be 1 or more"),
        ("checkpoint.keep=0", r"checkpoint\.keep=0 must be 1 or more"),
        ("checkpoint.resume=true", r"checkpoint\.resume=true continues a run that saves: set checkpoint\.every=1"),
        ("mode=loader checkpoint.every=1", r"checkpoint\.every=1 saves a model in training, mode=loader has none"),
        ("train.time_limit_s=0", r"train\.time_limit_s=0.0 must be greater than 0"),
        ("train.global_batch=64 train.batch_per_gpu=16", r"=64 and train\.batch_per_gpu=16 say the same thing twice"),
        ("train.deterministic=true train.cudnn_benchmark=true", r"exclude.*leave train\.cudnn_benchmark out"),
        ("results_dir=2026_11_27", r"^results_dir=2026_11_27 is the number 20261127: quote a text, 'results_dir="),
        ("checkpoint.dir=2.10", r"^checkpoint\.dir=2\.10 is the number 2\.1"),
        ("data.root=1_000", r"^data\.root=1_000 is the number 1000"),
        ("recipe.optimizer={1:2}", r"^recipe\.optimizer\.1 does not exist"),
        ("recipe.schedule.milestones=30", r"^recipe\.schedule\.milestones must be a list, such as \[1,2\]$"),
        ("recipe.optimizer=[1]", r"^recipe has a list where keys belong"),
        ("model.layers={a:1}", r"^model has .* keys where a list belongs"),
        ("backend=nccl", r"backend=nccl must be one of cuda:nccl, or null"),
    ],
)
def test_a_mistake_names_its_key(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        configuration(*WORDS, *words.split())


def test_a_configuration_is_that_of_its_record_which_has_every_section() -> None:
    recorded = configuration(*WORDS, "train.seed=3").resolved
    assert recorded_configuration(recorded) == configuration(*WORDS, "train.seed=3")
    earlier = recorded | {"loader": recorded["loader"] | {"start_method": None}}
    assert recorded_configuration(earlier) == configuration(*WORDS, "train.seed=3"), (
        "a key that was removed and not set"
    )
    with pytest.raises(UserError, match=r"^loader\.start_method does not exist"):
        recorded_configuration(recorded | {"loader": recorded["loader"] | {"start_method": "fork"}})
    for damaged in ({}, {"name": "adam"}, None):
        with pytest.raises(UserError, match=r"^recipe=(None|adam) is no option of this version"):
            recorded_configuration(recorded | {"recipe": damaged})


def test_without_a_model_there_is_no_configuration() -> None:
    with pytest.raises(UserError, match=r"^no model: give \+model=NAME"):
        configuration("+framework=ddp", "train.seed=1")


def test_a_folder_of_checkpoints_may_not_name_an_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = configuration(*WORDS, "checkpoint.dir=$MINE/saved").checkpoint
    with pytest.raises(UserError, match=r"^checkpoint\.dir=\$MINE/saved is '\$MINE/saved' on this node"):
        _ = checkpoint.folder
    monkeypatch.setenv("MINE", "/mine")
    assert checkpoint.folder == Path("/mine/saved")


def test_the_global_batch() -> None:
    assert Train(global_batch=64).samples_per_update(4) == 64
    assert Train(batch_per_gpu=64).samples_per_update(4) == 256
    assert Train().samples_per_update(4) == 128


def test_a_requeued_job_continues_by_itself_where_it_saves() -> None:
    requeued, first = {"SLURM_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "0"}
    assert Checkpoint(every=1).resumes(requeued)
    assert not Checkpoint(every=1).resumes(first)
    assert not Checkpoint(every=1).resumes({})
    assert not Checkpoint().resumes(requeued)
    assert not Checkpoint(every=1, resume=False).resumes(requeued)
    assert Checkpoint(every=1, resume=True).resumes({})


def test_identity_leaves_out_where_data_and_results_lie() -> None:
    words = overrides_of("data", "imagenet")
    here, there = (
        configuration(*words, f"results_dir={where}", f"data.root={where}").identity() for where in ("/here", "/there")
    )
    assert here == there != configuration(*words, "train.seed=1").identity()


def test_identity_has_a_gpu_that_is_shared_and_that_a_run_saves_but_not_that_it_continues() -> None:
    """What is not asked for is not there: as in records from before there was the key."""
    plain = configuration(*WORDS).identity()
    assert not {"backend", "checkpoint"} & set(plain)
    assert configuration(*WORDS, "backend=cuda:nccl").identity() == plain | {"backend": "cuda:nccl"}
    saving = configuration(*WORDS, "checkpoint.every=2").identity()
    assert saving == plain | {"checkpoint": {"every": 2}}
    more = ("checkpoint.resume=true", "checkpoint.dir=/scratch", "checkpoint.keep=5", "train.time_limit_s=60")
    assert configuration(*WORDS, "checkpoint.every=2", *more).identity() == saving
