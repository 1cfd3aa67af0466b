"""Studies are read as plain data: what a hostile one could do is refused, with one line."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ddlbench.config.choices import choices, published
from ddlbench.config.command_line import parsed
from ddlbench.config.keys import Checkpoint
from ddlbench.errors import UserError
from ddlbench.sweep import study as study_module
from ddlbench.sweep.study import load
from ddlbench.sweep.study_entries import PATHS, parse_word, word
from tests.sweep.studies import KEYS, write


def test_points_are_the_product_of_the_axes_less_what_is_excluded(tmp_path: Path) -> None:
    study = load(str(write(tmp_path)))
    assert [tuple(point.values()) for point in study.points()] == [("single", 1), ("ddp", 1), ("ddp", 2)]
    assert study.results_dir == "results/tiny"


def test_a_key_that_a_framework_lacks_adds_no_cell_of_it(tmp_path: Path) -> None:
    axes = {"framework": ["ddp", "tensor"], "framework.bucket_cap_mb": [1, 25], "framework.tp": [1, 2], "gpus": [2]}
    study = load(str(write(tmp_path, axes=axes, exclude=[])))
    points = [{key.removeprefix("framework."): value for key, value in point.items()} for point in study.points()]
    assert points == [
        {"framework": "ddp", "bucket_cap_mb": 1, "gpus": 2},
        {"framework": "ddp", "bucket_cap_mb": 25, "gpus": 2},
        {"framework": "tensor", "tp": 1, "gpus": 2},
        {"framework": "tensor", "tp": 2, "gpus": 2},
    ]


@pytest.mark.parametrize(
    ("words", "ddp", "tensor"),
    [
        ("framework=[ddp]", [""], []),
        ("framework.bucket_cap_mb=[1,25]", ["framework.bucket_cap_mb=1", "framework.bucket_cap_mb=25"], [""]),
        ("framework.bucket_cap_mb=1 framework.bucket_cap_mb=[25]", ["framework.bucket_cap_mb=25"], [""]),
        ("framework.bucket_cap_mb=1 framework.tp=2", ["framework.bucket_cap_mb=1"], ["framework.tp=2"]),
        ("loader=dali loader.device=[cpu,gpu]", *[["loader.device=cpu", "loader.device=gpu"]] * 2),
        ("loader=[native,dali] loader.threads=2", *[["", "loader.threads=2"]] * 2),
        ("model.layers=[1,2,1,1]", *[["model.layers=[1,2,1,1]"]] * 2),
    ],
)
def test_lists_of_the_command_line_are_axes_and_a_cell_has_the_keys_of_its_options(
    tmp_path: Path, words: str, ddp: list[str], tensor: list[str]
) -> None:
    path = write(
        tmp_path, axes={"framework": ["ddp", "tensor"]}, exclude=[], keys={"model": "resnet50", "framework.tp": 1}
    )
    study = load(str(path), words.split())
    dotted = [[word for word in study.words(point) if "." in word] for point in study.points()]
    assert [" ".join(cell).removeprefix("framework.tp=1").strip() for cell in dotted] == ddp + tensor


def test_an_axis_of_frameworks_that_the_command_line_leaves_out_is_left_out_too(tmp_path: Path) -> None:
    path = str(write(tmp_path, axes={"framework": ["ddp", "tensor"], "framework.tp": [1, 2], "gpus": [2]}, exclude=[]))
    assert list(load(path, ["framework=[ddp]"]).points()) == [{"framework": "ddp", "gpus": 2}]


@pytest.mark.parametrize(
    ("axes", "words", "key"),
    [
        ({"framework.sp": [2]}, [], "axis framework.sp"),
        ({}, ["framework.bucket=[1]"], "axis framework.bucket"),
        ({}, ["framework.bucket=1"], "framework.bucket"),
        ({}, ["framework.tp=1", "framework=ddp"], "framework.tp"),
        ({"framework.tp": [1, 2]}, ["framework=[ddp]", "framework.tp=[2]"], "axis framework.tp"),
    ],
)
def test_a_key_that_no_framework_of_the_study_has_is_refused(
    tmp_path: Path, axes: dict[str, Any], words: list[str], key: str
) -> None:
    path = str(write(tmp_path, axes={"framework": ["ddp", "tensor"]} | axes, exclude=[]))
    with pytest.raises(UserError, match=f"^tiny: {re.escape(key)}: no framework of this study has this key: leave"):
        load(path, words)


def test_a_key_without_content_counts_as_left_out(tmp_path: Path) -> None:
    study = load(str(write(tmp_path, exclude=None, settings=None, repeats=None)))
    assert (len(list(study.points())), study.settings, study.repeats) == (4, [], 1)


def test_a_study_changes_another_one(tmp_path: Path) -> None:
    """What it gives comes after what the other one has; rules of the other one that hit no cell are no mistake."""
    path = tmp_path / "small.yaml"
    path.write_text(
        "base: lin2022\naxes: {gpus: [1, 2]}\nexclude: [{framework: zero2}]\nkeys: {train.epochs: 1}\nrepeats: 2\n"
        "settings: [{where: {model: vgg16}, keys: {batch: 8}}]\nfigures: {9a: null, 10: {kind: memory}}\n"
    )
    base, study = load("lin2022"), load(str(path))
    assert (study.name, study.results_dir, study.repeats) == ("small", "results/small", 2)
    expected = [point for point in base.points() if point["gpus"] in (1, 2) and point["framework"] != "zero2"]
    assert list(study.points()) == expected
    words = study.words({"framework": "ddp", "model": "vgg16", "gpus": 1})
    assert {"train.epochs=1", "train.batch_per_gpu=8", "train.precision=fp16", "recipe=lin2022_vgg"} <= set(words)
    assert (study.across, study.gpus_per_node, study.seeds) == (base.across, 4, base.seeds)
    assert set(base.figures) - set(study.figures) == {"9a"}
    assert study.figures["10"].kind == "memory"
    assert study.figures["4"] == base.figures["4"]


def test_a_study_has_the_time_limits_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of single GPU counts too. A limit of the same count is replaced, and all by that of the command line."""
    base = write(tmp_path, "base", limit_s=600, limits_s={2: 7200, 4: 900})
    read = study_module._of_file
    monkeypatch.setattr(study_module, "_of_file", lambda name: read(str(base) if name == "laptop" else name))
    for name, content in {"same": "", "other": "limits_s: {4: 60}\n"}.items():
        (tmp_path / f"{name}.yaml").write_text(f"base: laptop\n{content}")
    same, other = (load(str(tmp_path / f"{name}.yaml")) for name in ("same", "other"))
    short = load(str(tmp_path / "same.yaml"), ["limit_s=60"])
    assert (same.limit_s, same.limits_s) == (600, {2: 7200, 4: 900})
    assert (short.limit_s, short.limits_s) == (60, {})
    assert other.limits_s == {2: 7200, 4: 60}


def test_keys_settings_axes_and_command_line_win_in_this_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        axes={"framework": ["single", "ddp"]},
        exclude=[],
        keys=KEYS | {"train.epochs": 1, "train.warmup_steps": 0},
        settings=[{"where": {"framework": "ddp"}, "keys": {"train.epochs": 2, "batch": 8}}],
    )
    single, ddp = load(str(path)).points()
    study = load(str(path), ["train.epochs=5", "train.steps=[3]"])
    assert "train.epochs=1" in load(str(path)).words(single)
    assert {"train.epochs=2", "train.steps=2", "train.global_batch=8"} <= set(load(str(path)).words(ddp))
    (_, ddp) = study.points()
    assert {"train.epochs=5", "train.warmup_steps=0", "train.steps=3"} <= set(study.words(ddp))


@pytest.mark.parametrize(
    ("scaling", "expected"), [("strong", "train.global_batch=4"), ("weak", "train.batch_per_gpu=4")]
)
def test_the_batch_rule(tmp_path: Path, scaling: str, expected: str) -> None:
    study = load(str(write(tmp_path)), [f"scaling={scaling}"])
    assert {expected} == {result for point in study.points() for result in study.words(point) if result.endswith("=4")}


def test_the_command_line_replaces_axes_and_numbers(tmp_path: Path) -> None:
    study = load(str(write(tmp_path)), ["framework=[ddp]", "gpus=2", "repeats=3", "seeds=[1,2]", "results_dir=x y"])
    assert [tuple(point.values()) for point in study.points()] == [("ddp", 2)]
    assert (study.repeats, study.seeds, study.results_dir) == (3, [1, 2], "x y")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("framework", "ddp", "+framework=ddp"),
        ("loader", "dali", "loader=dali"),
        ("model.layers", [1, [2, 3]], "model.layers=[1,[2,3]]"),
        ("train.compile", True, "train.compile=true"),
        ("train.clip_norm", None, "train.clip_norm=null"),
        ("recipe.optimizer.lr", 1e-5, "recipe.optimizer.lr=1e-05"),
        ("cluster.notes", "a, b", 'cluster.notes="a, b"'),
        ("cluster.notes", "null", 'cluster.notes="null"'),
        ("cluster.notes", "Jülich", 'cluster.notes="Jülich"'),
    ],
)
def test_a_value_as_a_word_of_the_command_line(key: str, value: Any, expected: str) -> None:
    assert word(key, value) == expected
    assert parsed(expected).value() == value


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"keys": KEYS | {"model._target_": "os.system"}}, "model._target_ cannot be set"),
    ({"keys": KEYS | {"_target_": "os.system"}}, "_target_ cannot be set"),
    ({"keys": KEYS | {"results_dir": "/etc"}}, "results_dir cannot be set in a study's file"),
    ({"axes": {"framework": ["ddp"], "checkpoint.dir": ["../a"]}}, "checkpoint.dir cannot be set in a study's file"),
    ({"keys": KEYS | {"framework": "ddp"}}, "keys: framework=ddp, but framework is an axis"),
    ({"settings": [{"where": {"gpus": 2}, "keys": {"gpus": 1}}]}, "settings: gpus=1, but gpus is an axis"),
    ({"keys": KEYS | {"hydra.run.dir": "/etc"}}, "Hydra's own settings are fixed"),
    ({"keys": KEYS | {"cluster.notes": "${oc.env:HOME}"}}, "which have a meaning of their own"),
    ({"keys": KEYS | {"framework": "../../../etc/passwd"}}, "is no choice of one framework"),
    ({"keys": KEYS | {"train.seed": 1}}, "use seeds="),
    ({"keys": KEYS | {"~train.seed": 1}}, "is no key of ddlbench"),
    ({"keys": KEYS | {"train": {"seed": 1}}}, "is no value"),
    ({"axes": {"framework": ["ddp"], "gpus": [0]}}, "gpus=0 must be a whole number from 1 on"),
    ({"axes": {"framework": ["ddp"], "gpus": [True]}}, "gpus=True must be a whole number"),
    ({"axes": {"framework": ["ddp"], "gpus": list(range(1, 999)), "batch": list(range(1, 999))}}, "996,004 cells"),
    ({"axes": {"framework": ["ddp", "ddp"]}}, "names a value twice"),
    ({"axes": {"framework": []}}, "has no values"),
    ({"exclude": [{"framework": "fsdp"}]}, "framework=fsdp is on no axis"),
    ({"exclude": [{}]}, "exclude: {} names no cells"),
    ({"exclude": [None]}, "exclude: None names no cells"),
    ({"exclude": [{"gpus": []}]}, "exclude: {'gpus': []} names no cells"),
    ({"exclude": False}, "exclude: False is no section of keys"),
    ({"exclude": [{"framework": "ddp"}], "axes": {"framework": ["ddp"]}}, "exclude leaves no cell"),
    ({"settings": [{"where": {}, "keys": {"train.epochs": 2}}]}, "settings: {} names no cells"),
    ({"seeds": []}, "seeds=[] has no values"),
    ({"seeds": [0, 0]}, "seeds=[0, 0] names a value twice"),
    ({"repeats": 10**9}, "3,000,000,000 cells"),
    ({"repeats": "6"}, "repeats=6 must be a whole number"),
    ({"nothing": 1}, "nothing is no key of a study"),
    ({"base": "../../etc/passwd"}, "base=../../etc/passwd is no ready study: choose one of"),
    ({"base": ["laptop"]}, "base=['laptop'] is no ready study"),
    ({"base": "lin2022", "keys": {}, "exclude": [{"gpus": 64}], "axes": {"gpus": [1]}}, "gpus=64 is on no axis"),
]


@pytest.mark.parametrize(("content", "expected"), HOSTILE, ids=lambda value: str(value)[:40])
def test_a_hostile_or_wrong_study_is_refused(tmp_path: Path, content: dict[str, Any], expected: str) -> None:
    content = {"exclude": []} | content
    if "repeats" in content:
        content["axes"] = {"framework": ["ddp", "fsdp", "gpipe"]}
    with pytest.raises(UserError, match=re.escape(expected)):
        load(str(write(tmp_path, **content)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("axes: !!python/object/apply:os.system ['touch owned']", "for the tag 'tag:yaml.org,2002:python/object/apply"),
        ("a: !!set {1}", "Value 'set' is not a supported primitive type"),
        ("a: &a [1]\nb: *a", "study.yaml: aliases are refused"),
        ("a: {b: 1, c: 2, b: 3}", "found duplicate key b"),
        ("axes: 1\nkeys: 2\naxes: 3", "found duplicate key axes"),
        ("a: ${b", "study.yaml: no viable alternative"),
        (f"a: {'[' * 1000}{']' * 1000}", "study.yaml"),
        ("- a list", "holds no keys"),
        ("a: \x00", "study.yaml"),
        ("", "holds no keys"),
    ],
)
def test_yaml_is_plain_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(expected)):
        load(str(path))
    assert [result.name for result in tmp_path.iterdir()] == ["study.yaml"]


@pytest.mark.parametrize("name", ["../config", "/etc/passwd", "nothing", ".", "a/b", "missing.yaml"])
def test_a_name_that_is_no_study(name: str) -> None:
    with pytest.raises(UserError, match=r"is no study|cannot be read"):
        load(name)


@pytest.mark.parametrize("name", ["..", ".", "${oc.env:HOME}", '"'])
def test_a_file_whose_name_is_no_folder_below_results_is_refused(tmp_path: Path, name: str) -> None:
    """results/.. would be the folder that holds results."""
    path = write(tmp_path, name=name)
    assert path.name == f"{name}.yaml"
    with pytest.raises(UserError, match="a study's name becomes that of a folder"):
        load(str(path))


def test_every_path_of_the_configuration_belongs_to_the_command_line() -> None:
    """A key that is added later and holds a path must be added to PATHS."""
    words = ("dir", "root", "path", "file", "folder", "stage_to", "tokenizer")
    result = {"results_dir"}
    for group in ("data", "loader", "framework", "cluster"):
        for option in choices(group):
            result |= {f"{group}.{key}" for key in published(group, option) if key.endswith(words)}
    result |= {f"checkpoint.{field.name}" for field in fields(Checkpoint) if field.name.endswith(words)}
    assert result <= set(PATHS)


@pytest.mark.parametrize(
    "given",
    ["model._target_=os.system", "framework=[../x]", "gpus=-1", "order=x", "train.seed=3", "dryrun=true", "nonsense",
     "cluster.notes=${oc.env:HOME}", "cluster.notes=!!python/name:os.system", "hydra.run.dir=/tmp", "x=*a",
     'results_dir=a"b', "results_dir=${oc.env:HOME}", "results_dir=", "results_dir= ", "results_dir=~/x", "seeds=[]",
     "scaling=[[strong]]", "scaling=[none]", "scaling=none", "train.epochs=010", "train.epochs=[010,18]",
     "train.epochs=1:30", "train.epochs=0x1f", "cluster.notes=run #3", "cluster.notes=#3", "train.steps=",
     "data.root= "],
)  # fmt: skip
def test_words_of_the_command_line_are_checked_alike(tmp_path: Path, given: str) -> None:
    with pytest.raises(UserError):
        load(str(write(tmp_path)), [given])


@pytest.mark.parametrize("folder", ["null", "010", "no", "2026-01-01", "x y", "a: b"])
def test_the_results_folder_is_the_text_that_was_given(tmp_path: Path, folder: str) -> None:
    """YAML takes some of them for numbers, truth values and dates."""
    assert load(str(write(tmp_path)), [f"results_dir={folder}"]).results_dir == folder


@pytest.mark.parametrize(
    ("given", "value"),
    [("train.epochs=3", 3), ("data.root=1_000", "1_000"), ("train.steps=1_000", 1000),
     ("gpus=-1", -1), ("model.layers=[3,4,6]", [3, 4, 6]),
     ("cluster.notes='run #3'", "run #3"), ('cluster.notes="#3"', "#3"), ("cluster.notes=a#3", "a#3")],
)  # fmt: skip
def test_a_value_is_what_was_written(given: str, value: object) -> None:
    assert parse_word(given) == (given.partition("=")[0], value)


def test_a_path_comes_from_the_command_line_and_is_no_axis(tmp_path: Path) -> None:
    study = load(str(write(tmp_path)), ["data.root=/data/my images"])
    assert 'data.root="/data/my images"' in study.words(next(study.points()))
    with pytest.raises(UserError, match=r"or be an axis: give data\.root=PATH on the command line$"):
        load(str(write(tmp_path)), ["data.root=[/a,/b]"])
