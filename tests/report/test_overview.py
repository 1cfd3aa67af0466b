"""The summary table of the terminal and of the page."""

from __future__ import annotations

import re

import pytest

from ddlbench.figures.figures import Drawing
from ddlbench.report.documents import render, write_documents
from ddlbench.report.overview import WIDTH, remedy, summary_text
from tests.support.figures import names_of
from tests.support.records import edited, strong_scaling, tables_of, weak_scaling, write_repeats, write_run


def text_of(results):
    return summary_text(tables_of(results).measurements)


def line_of(text, *cells):
    (line,) = [line.split() for line in text.splitlines() if line.split()[: len(cells)] == list(cells)]
    return " ".join(line)


def columns_of(table):
    return [name for name in re.split("  +", table.splitlines()[0].strip()) if name]


def test_one_line_a_measurement(tmp_path):
    weak_scaling(tmp_path)
    strong_scaling(tmp_path)
    text = text_of(tmp_path)
    measured, ratios, *_ = text.split("\n\n")
    assert columns_of(measured) == [
        "framework", "model", "loader", "gpus", "scaling", "status", "n", "epoch time", "samples/s", "peak memory",
        "top-1/ppl",
    ]  # fmt: skip
    assert line_of(measured, "ddp", "resnet50", "native", "4") == (
        "ddp resnet50 native 4 weak ok 1 3.66 s 280.0 3.50 GiB 63.3 %"
    )
    assert line_of(measured, "ddp", "gpt2_small", "native", "8") == (
        "ddp gpt2_small native 8 strong ok 1 32.0 s 32.0 4.00 GiB ppl 133.3"
    )
    assert line_of(measured, "ddp", "resnet50", "native", "8") == "ddp resnet50 native 8 weak oom 0"
    assert columns_of(ratios) == [
        "framework", "model", "loader", "gpus", "scaling", "speedup", "efficiency", "best single", "vs own base",
    ]  # fmt: skip
    assert line_of(ratios, "ddp", "resnet50", "native", "4") == "ddp resnet50 native 4 weak 2.80 70.0 % single@1"
    assert line_of(ratios, "ddp", "gpt2_small", "native", "8") == (
        "ddp gpt2_small native 8 strong 3.20, 80.0 % of ddp@2"
    ), "nothing ran on one GPU"
    assert "single" not in [line.split()[0] for line in ratios.splitlines()], "a base is 1 by definition"


def test_one_gpu_count_has_no_ratios(tmp_path):
    write_repeats(tmp_path, 100.0, 101.0, gpus=2)
    write_repeats(tmp_path, 50.0, 50.0, framework="fsdp", gpus=2)
    made = tables_of(tmp_path)
    text = summary_text(made.measurements)
    assert not any(word in text for word in ("speedup", "efficiency", "100.0 %", "base"))
    assert not any(word in name for name in names_of(made) for word in ("speedup", "efficiency"))
    assert "own base</th>" not in render(made, Drawing(), tmp_path)
    write_documents(made.measurements, [], tmp_path)
    assert "own base" not in (tmp_path / "summary.md").read_text()
    write_run(tmp_path, gpus=4, rate=150.0)
    made = tables_of(tmp_path)
    assert "vs own base" in summary_text(made.measurements)
    assert "own base</th>" in render(made, Drawing(), tmp_path)


def test_the_range_of_repeats_and_how_certain_the_fastest_is(tmp_path):
    write_repeats(tmp_path, 100.0, 50.0, 80.0)
    write_repeats(tmp_path, 80.0, 64.0, 40.0, framework="fsdp")
    write_run(tmp_path, framework="zero1", rate=10.0)
    text = text_of(tmp_path)
    assert " ok 3 12.8 s 10.2 to 20.5 s 80.0 " in line_of(text, "ddp", "resnet50", "native", "1", "single", "ok")
    assert " ok 1 102.4 s 10.0 " in line_of(text, "zero1", "resnet50", "native", "1", "single", "ok")
    assert "range: the shortest and the longest epoch time of the n repeats" in text
    assert " ".join(text.split()).count(
        "resnet50. On 1 GPU: ddp has the shortest median time, 12.5 ms a sample (80 samples/s), 1.25 times as fast as "
        "fsdp, but with n=3 and n=3 this is not certain: an interval needs 6 repeats."
    ) == 1  # fmt: skip
    assert max(len(line) for line in text.splitlines()) <= WIDTH


def test_rows_that_differ_in_an_axis_show_it_and_an_oom_names_its_cell_and_the_next_key(tmp_path):
    write_run(tmp_path, per_gpu=32)
    ledger = {"ledger": {"global_batch": 512, "replica_batch": 512, "micro_batches": 4}}
    write_run(tmp_path, per_gpu=512, status="oom", reason="CUDA out of memory", sections=ledger)
    write_run(tmp_path, framework="fsdp", per_gpu=64, status="oom")
    text = text_of(tmp_path)
    assert line_of(text, "ddp", "resnet50", "native", "1", "single", "ok").endswith("[1]")
    assert line_of(text, "ddp", "resnet50", "native", "1", "single", "oom").endswith("[2]")
    assert "[1] batch=32\n[2] batch=512\n" in text
    oom = "oom: ddp resnet50 on 1 GPU, batch=512 (try train.micro_batch=64): CUDA out of memory"
    assert oom in text.splitlines()
    assert "oom: fsdp resnet50 on 1 GPU, batch=64 (try a smaller train.micro_batch, or a framework that" in text
    page = render(tables_of(tmp_path), Drawing(), tmp_path)
    assert page.count(">batch=512<") == 1
    assert "CUDA out of memory (try train.micro_batch=64)" in page


@pytest.mark.parametrize(
    ("size", "mode", "key"),
    [
        (8, "train", "train.micro_batch=4"),
        (15, "train", "train.micro_batch=1"),
        (1, "train", "train.checkpoint_activations=true"),
        (8, "loader", "a smaller loader.prefetch or loader.workers"),
        (None, "train", "a smaller train.micro_batch, or a framework that shards the weights"),
    ],
)
def test_the_next_key_after_an_out_of_memory_error(size, mode, key):
    assert remedy("oom", mode, size) == f" (try {key})"
    assert remedy("killed", mode, size) == ""


def test_ratios_have_intervals_from_six_repeats_on(tmp_path):
    """Rates of the repeats: single 100 to 105, ddp on one GPU 80 to 84, on two 90 to 110."""
    for framework, gpus, rate, step in (("single", 1, 100.0, 1), ("ddp", 1, 80.0, 0.8), ("ddp", 2, 90.0, 4)):
        write_repeats(tmp_path, *(rate + step * n for n in range(6)), framework=framework, gpus=gpus)
    text = text_of(tmp_path)
    ratios = text.split("\n\n")[1]
    assert line_of(ratios, "ddp", "resnet50", "native", "1") == (
        "ddp resnet50 native 1 weak 0.80 80.0 % single@1 0.76 to 0.84 76.2 % to 84.0 % 93.8 %"
    )
    # 90/105 = 0.857 and 110/100 = 1.1: the interval includes 1
    assert line_of(ratios, "ddp", "resnet50", "native", "2") == (
        "ddp resnet50 native 2 weak none shown 48.8 % single@1 0.86 to 1.10 42.9 % to 55.0 % 93.8 %"
    )
    assert "none shown: 1 is inside" in text
    assert "n < 6" not in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH


def test_memory_on_cpu_is_the_hosts(tmp_path):
    write_run(tmp_path, device="cpu")
    text = text_of(tmp_path)
    assert "2.00 GiB" in text
    assert "process on the host" in text


def test_it_fits_a_terminal_and_moves_settings_below(tmp_path):
    for size in (25, 50):
        options = {"bucket_cap_mb": size, "comm_hook": "powersgd" * (size // 25)}
        write_run(tmp_path, framework="deepspeed_zero2", gpus=64, rate=123456.0, knobs=options)
    write_run(tmp_path, framework="deepspeed_zero2", gpus=128, status="unavailable", reason="x" * 300)
    text = text_of(tmp_path)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert "[1] bucket_cap_mb=25 comm_hook=powersgd\n" in text
    assert "[2] bucket_cap_mb=50 comm_hook=powersgdpowersgd\n" in text


def test_names_in_sentences_and_documents_are_complete(tmp_path):
    for rate, moment in ((100.0, 0.8), (90.0, 0.9)):
        write_run(tmp_path, rate=rate, recipe={"optimizer_of_matrices": {"momentum_of_gradients": moment}})
        write_run(tmp_path, gpus=2, rate=150.0, recipe={"optimizer_of_matrices": {"momentum_of_gradients": moment}})
    measurements = tables_of(tmp_path, across=["recipe"]).measurements
    write_documents(measurements, [], tmp_path)
    name = "ddp (recipe.optimizer_of_matrices.momentum_of_gradients=0.8)"
    assert f"| {name}@1 |" in (tmp_path / "summary.md").read_text().replace("\\", "")
    text = summary_text(measurements)
    assert f": {name} has the shortest" in " ".join(text.split())
    assert " ddp (recipe.optimizer_of_m…)@1 " in text, "a cell of the terminal"


def test_a_model_of_other_sizes_is_marked_and_never_compared_with_the_published_one(tmp_path):
    write_run(tmp_path, framework="single", rate=100.0)
    small = {"layers": [1, 1, 1, 1], "image_size": 64}
    write_run(tmp_path, rate=900.0, changed=small)
    write_run(tmp_path, gpus=2, rate=950.0, changed={"image_size": 96})
    tables = tables_of(tmp_path)
    text = summary_text(tables.measurements)
    assert "ddp@1" not in text, "each is its own base"
    assert "resnet50*: image_size=64 layers=[1,1,1,1], not as published" in text
    assert "resnet50*2: image_size=96, not as published" in text
    assert len(set(tables.scaling["comparison"])) == len(set(tables.scaling["measurement"])) == 3
    assert set(tables.runs["model"]) == set(tables.scaling["model"]) == {"resnet50"}, "scripts group by the option"
    assert set(tables.scaling["model_changed"].dropna()) == {"image_size=64 layers=[1,1,1,1]", "image_size=96"}
    page = render(tables, Drawing(), tmp_path)
    assert ">resnet50*2<" in page
    assert "resnet50*2: image_size=96, not as published" in page


def test_a_record_that_does_not_say_is_compared_with_the_published_values(tmp_path):
    with edited(write_run(tmp_path)) as record:
        record["config"]["model"] |= {"layers": [1, 1, 1, 1], "image_size": 224}
        del record["model"]
    assert list(tables_of(tmp_path).runs["model_changed"]) == ["layers=[1,1,1,1]"]
