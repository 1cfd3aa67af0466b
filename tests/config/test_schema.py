"""Every YAML composes and builds; a wrong value names its key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ddlbench.config.choices import choices, choose, conf_dir, keys
from ddlbench.config.compose import configuration
from ddlbench.config.keys import Checkpoint, Train
from ddlbench.config.schema import GROUPS
from ddlbench.errors import UserError

BASE = {"framework": "ddp", "model": "resnet50"}
WORDS = ("+framework=ddp", "+model=resnet50")
ALL = [(group, choice) for group in GROUPS for choice in choices(group)]


def overrides_of(group: str, choice: str) -> list[str]:
    """The shortest command line with that choice. Text needs a text model, and the other way round."""
    text = choice.startswith(("gpt2", "wikitext", "sample_text"))
    wanted = {**BASE, "model": "gpt2_small" if text else "resnet50", group: choice}
    return [choose(name, value) for name, value in wanted.items()]


NO_KEYS = {  # not the user's to choose
    "sample_images": {"train_dir", "val_dir"},
    "sample_text": {"tokenizer", "cache_dir", "train", "valid"},
}


@pytest.mark.parametrize(("group", "choice"), ALL, ids=str)
def test_every_yaml_composes_and_lists_every_key_of_its_class(group: str, choice: str) -> None:
    """Hydra refuses a key that is not listed: one left out could not be set from the command line."""
    config = configuration(*overrides_of(group, choice))
    assert getattr(config, group).name == choice
    assert group != "framework" or {"check", "setup"} <= set(dir(config.framework))
    listed = {key.name.partition(".")[0] for key in keys(group, choice)} - {"_target_"}
    known = {field.name for field in fields(getattr(config, group))}
    assert listed - {"kind"} == known - {"kind"} - NO_KEYS.get(choice, set())
    if group in ("data", "loader"):  # its values are the class's
        assert getattr(config, group) == type(getattr(config, group))(choice)


def test_gpt2_selects_its_data_and_recipe_unless_others_are_given() -> None:
    config = configuration("+framework=ddp", "+model=gpt2_small")
    assert (config.data.name, config.recipe.name) == ("sample_text", "adamw")
    config = configuration("+framework=ddp", "+model=gpt2_small", "recipe=lamb", "data=wikitext103")
    assert (config.data.name, config.recipe.name) == ("wikitext103", "lamb")


def test_ranks_share_a_gpu_for_developers_only() -> None:
    plain = configuration(*WORDS)
    assert plain.backend is None
    assert "backend" not in plain.identity()
    shared = configuration(*WORDS, "backend=cuda:nccl")
    assert shared.identity() == plain.identity() | {"backend": "cuda:nccl"}
    with pytest.raises(UserError, match=r"backend=nccl must be one of cuda:nccl, or null"):
        configuration(*WORDS, "backend=nccl")


def test_identity_leaves_out_what_is_not_measured() -> None:
    same = [
        configuration(*overrides_of("data", "imagenet"), f"results_dir={where}", f"data.root={where}").identity()
        for where in ("/here", "/there")
    ]
    assert same[0] == same[1]
    assert same[0] != configuration(*overrides_of("data", "imagenet"), "train.seed=1").identity()


def test_the_schema_and_config_yaml_agree() -> None:
    assert configuration(*WORDS).train == Train()
    assert configuration(*WORDS).checkpoint == Checkpoint()


def test_the_global_batch() -> None:
    assert Train(global_batch=64).samples_per_update(4) == 64
    assert Train(batch_per_gpu=64).samples_per_update(4) == 256
    assert Train().samples_per_update(4) == 128
    with pytest.raises(UserError, match=r"train\.global_batch=64 and train\.batch_per_gpu=16 say the same thing twice"):
        Train(global_batch=64, batch_per_gpu=16)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("framework.bucket_cap_mb=0", r"framework\.bucket_cap_mb=0.0 must be greater than 0"),
        ("framework.comm_hook=zip", r"framework\.comm_hook=zip must be one of none, fp16, bf16, powersgd, topk"),
        ("train.clip_norm=-1", r"train\.clip_norm=-1.0 must be greater than 0, or null"),
        ("model.image_size=big", r"model\.image_size: Value 'big'"),
        ("recipe.optimizer.name=sdg", r"recipe\.optimizer\.name=sdg"),
        ("profile_steps=0", r"profile_steps=0 must be greater than 0"),
        ("profile_trace=true", r"set profile=true too"),
        ("checkpoint.every=0", r"checkpoint\.every=0 must be 1 or more"),
        ("checkpoint.keep=0", r"checkpoint\.keep=0 must be 1 or more"),
        ("checkpoint.resume=true", r"checkpoint\.resume=true continues a run that saves: set checkpoint\.every=1"),
        ("train.time_limit_s=0", r"train\.time_limit_s=0.0 must be greater than 0"),
    ],
)
def test_a_wrong_value_names_its_key(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        configuration(*WORDS, override)


def test_a_loader_alone_has_nothing_to_save() -> None:
    with pytest.raises(UserError, match=r"checkpoint\.every=1 saves a model in training, mode=loader has none"):
        configuration(*WORDS, "mode=loader", "checkpoint.every=1")


def test_a_requeued_job_continues_by_itself_where_it_saves() -> None:
    requeued, first = {"SLURM_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "0"}
    assert Checkpoint(every=1).resumes(requeued)
    assert not Checkpoint(every=1).resumes(first)
    assert not Checkpoint(every=1).resumes({})
    assert not Checkpoint().resumes(requeued)
    assert not Checkpoint(every=1, resume=False).resumes(requeued)
    assert Checkpoint(every=1, resume=True).resumes({})


def test_that_a_run_saves_is_measured_and_that_it_continues_is_not() -> None:
    plain, saving = configuration(*WORDS).identity(), configuration(*WORDS, "checkpoint.every=2").identity()
    assert "checkpoint" not in plain  # as records from before there were checkpoints
    assert saving == plain | {"checkpoint": {"every": 2}}
    more = ("checkpoint.resume=true", "checkpoint.dir=/scratch", "checkpoint.keep=5", "train.time_limit_s=60")
    assert configuration(*WORDS, "checkpoint.every=2", *more).identity() == saving


def test_conf_is_the_repositorys() -> None:
    assert conf_dir() == Path(__file__).parents[2] / "conf"
