"""Only the settings that differ are shown."""

from __future__ import annotations

from dataclasses import replace

from ddlbench.results.tables import labels
from ddlbench.results.tables.labels import layout, settings_text
from ddlbench.results.tables.merge import AttemptRow

VERSIONS = {"dataset_hash": "abc", "device_model": "GPU", "torch": "2.14.1", "cuda": "13.0"}


def run(framework="ddp", options=None, **row):
    names = {"framework": framework, "model": "resnet50", "loader": "native", "data": "sample", "recipe": "sgd"}
    names |= {"precision_scheme": None, "model_changed": None, "device": "cuda", "gpus": 1, "nodes": 1}
    return AttemptRow(names | VERSIONS | row, options or {})


def knobs(runs):
    return list(map(settings_text, labels.knobs(runs)))


def variants(runs, **options):
    return list(map(settings_text, labels.variants(runs, **options)))


def test_equal_settings_are_not_shown():
    runs = [run(options={"framework.bucket_cap_mb": None, "train.seed": 0})] * 2
    assert knobs(runs) == ["", ""]
    assert variants(runs) == ["", ""]


def test_settings_that_are_not_those_of_the_option_are_shown_even_if_all_runs_have_them():
    options = {"framework.comm_hook": "powersgd", "framework.bucket_cap_mb": None}
    assert knobs([run(options=options)] * 2) == ["comm_hook=powersgd"] * 2
    assert knobs([run("of_an_earlier_version", options=options)]) == [""]


def test_knobs_are_the_frameworks_own_and_the_micro_batch():
    runs = [
        run(options={"framework.hook": "none", "train.micro_batch": None, "framework.tp": 2}),
        run(options={"framework.hook": "fp16", "train.micro_batch": 8, "framework.tp": 4}),
        run("single", options={"train.micro_batch": None}),
    ]
    assert knobs(runs) == ["hook=none train.micro_batch=null", "hook=fp16 train.micro_batch=8", ""]


def test_what_only_the_environment_of_gpus_has_is_no_difference_to_cpus():
    gpu = replace(run(), environment={"cpu_model": "CPU", "driver": "580", "nccl": "2.27"})
    cpu = replace(run(device="cpu"), environment={"cpu_model": "CPU"})
    assert knobs([gpu, cpu]) == ["", ""]
    assert knobs([gpu, replace(gpu, environment=gpu.environment | {"driver": "590"})]) == ["driver=580", "driver=590"]


def test_a_row_shows_mixed_precision_without_autocast():
    options = {"framework.replicate": 1}
    runs = [
        run("fsdp", options=options, precision_scheme="policy"),
        run("fsdp", options={"framework.replicate": 2}, precision_scheme="autocast"),
        run("ddp", precision_scheme="autocast"),
        run("single"),
    ]
    assert knobs(runs) == ["precision_scheme=policy replicate=1", "replicate=2", "", ""]


def test_variants_are_everything_else_and_versions():
    runs = [
        run(options={"train.compile": True, "framework.hook": "fp16"}, torch="2.14.1"),
        run("single", options={"train.compile": False}, torch="2.13.0"),
    ]
    assert variants(runs) == ["torch=2.14.1 train.compile=true", "torch=2.13.0 train.compile=false"]


def test_a_value_that_is_not_recorded_and_settings_of_another_loader_are_no_difference():
    assert variants([run(), run(torch=None)]) == ["", ""]
    runs = [run(options={"loader.workers": 2}), run(options={"loader.workers": 0}, loader="synthetic")]
    assert variants(runs) == ["", ""]


def test_a_layout_has_the_size_that_follows_from_the_others():
    options = {"framework.dp": 2, "framework.tp": 4, "framework.pp": None}
    assert layout(run(options=options, gpus=16)) == {"dp": "2", "tp": "4", "pp": "2"}
    assert layout(run(options=options, gpus=12)) == layout(run(options=options, gpus=None)) == {"dp": "2", "tp": "4"}
    assert layout(run()) == {}


def test_what_defines_a_generic_option_is_always_shown():
    runs = [run("deepspeed", options={"framework.zero_stage": 1, "framework.overlap_comm": None})] * 2
    assert knobs(runs) == ["zero_stage=1"] * 2
    assert knobs([run("hybrid", options={"framework.schedule": "1f1b"})]) == ["schedule=1f1b"]
    assert knobs([run("zero3", options={"framework.zero_stage": 3})]) == [""]


def test_a_key_that_only_a_later_version_has_is_shown():
    assert knobs([run(options={}), run(options={"framework.overlap": 2})]) == ["", "overlap=2"]


def test_a_variant_without_the_seed_keeps_values_that_look_like_one():
    runs = [run(options={"train.seed": seed, "data.note": f"{seed} train.seed=5"}) for seed in (0, 1)]
    assert variants(runs, without="train.seed") == ["data.note=0 train.seed=5", "data.note=1 train.seed=5"]
