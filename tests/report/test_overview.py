"""The summary table of the terminal and of the page."""

from __future__ import annotations

import json

import pytest

from ddlbench.report.figures import Drawing
from ddlbench.report.overview import WIDTH, number, seconds, summary_text
from ddlbench.report.page import render
from ddlbench.report.read import read_all
from ddlbench.report.tables import make_tables, records
from tests.support.records import strong_scaling, weak_scaling, write_run


def text_of(results):
    return summary_text(make_tables(read_all([results])).scaling)


def line_of(text, *cells):
    (line,) = [line.split() for line in text.splitlines() if line.split()[: len(cells)] == list(cells)]
    return " ".join(line)


def test_one_line_a_measurement(tmp_path):
    weak_scaling(tmp_path)
    strong_scaling(tmp_path)
    text = text_of(tmp_path)
    head = text.splitlines()[0].split("  ")
    assert [name.strip() for name in head if name.strip()] == [
        "framework", "model", "loader", "gpus", "scaling", "status", "n", "epoch time", "samples/s", "peak memory",
        "top-1/ppl", "speedup", "efficiency", "best single",
    ]  # fmt: skip
    assert line_of(text, "ddp", "resnet50", "native", "4") == (
        "ddp resnet50 native 4 weak ok 1 3.66 s 280.0 3.50 GiB 63.3 % 2.80 70.0 % single@1"
    )
    assert line_of(text, "ddp", "gpt2_small", "native", "8", "strong", "ok") == (
        "ddp gpt2_small native 8 strong ok 1 32.0 s 32.0 4.00 GiB ppl 133.3"
    )
    assert line_of(text, "ddp", "gpt2_small", "native", "8", "strong", "1") == (
        "ddp gpt2_small native 8 strong 1 3.20, 80.0 % of ddp@2"
    ), "nothing ran on one GPU"
    assert line_of(text, "ddp", "resnet50", "native", "8") == "ddp resnet50 native 8 weak oom 0 single@1"
    assert "oom: ddp resnet50 on 8 GPUs: CUDA out of memory" in text


def test_speedup_is_against_the_best_single_gpu_here_as_in_the_csv(tmp_path):
    weak_scaling(tmp_path)
    tables = make_tables(read_all([tmp_path]))
    for row in records(tables.scaling):
        cells = line_of(summary_text(tables.scaling), row["framework"], "resnet50", "native", str(row["gpus"])).split()
        assert cells[-1] == "single@1"
        if row["speedup"] is not None:
            assert cells[-4:-1] == [f"{row['speedup']:.2f}", f"{100 * row['efficiency']:.1f}", "%"]


def test_ratios_have_intervals_from_six_repeats_on(tmp_path):
    """Rates of the repeats: single 100 to 105, ddp on one GPU 80 to 84, on two 90 to 110.2."""
    for repeat in range(6):
        write_run(tmp_path, framework="single", rate=100.0 + repeat, repeat=repeat)
        write_run(tmp_path, framework="ddp", rate=80.0 + 0.8 * repeat, repeat=repeat)
        write_run(tmp_path, framework="ddp", gpus=2, rate=90.0 + 4 * repeat, repeat=repeat)
    text = text_of(tmp_path)
    assert "ddp resnet50 native 1 weak 6 0.76 to 0.84 76.2 % to 84.0 % 93.8 %" in [
        " ".join(line.split()) for line in text.splitlines()
    ]
    # 90/105 = 0.857 and 110/100 = 1.1: the interval includes 1
    assert line_of(text, "ddp", "resnet50", "native", "2", "weak", "6").endswith(
        "0.86 to 1.10 42.9 % to 55.0 % 1.07 to 1.38 93.8 %"
    )
    assert line_of(text, "ddp", "resnet50", "native", "2", "weak", "ok").endswith("none shown 48.8 % single@1")
    assert "none shown: 1 is inside" in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH


def test_the_bases_have_their_absolute_time(tmp_path):
    weak_scaling(tmp_path)
    assert "base single@1, resnet50: 10.0 ms a sample, epoch 10.2 s" in text_of(tmp_path)


def test_too_few_repeats_are_marked(tmp_path):
    write_run(tmp_path)
    assert "n < 6: no 95 % CI" in text_of(tmp_path)
    for repeat in range(1, 6):
        write_run(tmp_path, repeat=repeat)
    assert "n < 6" not in text_of(tmp_path)


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


def test_an_overview_without_a_readable_record_says_so(tmp_path):
    write_run(tmp_path, sections={"schema_version": 0})
    assert "no attempt has a configuration" in text_of(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"), [(1234.56, "1,234.6 s"), (12.34, "12.3 s"), (1.234, "1.23 s"), (0.01234, "0.0123 s"), (None, "")]
)
def test_seconds(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(12345.6, "12,346"), (123.45, "123.5"), (1.234, "1.23"), (None, "")])
def test_numbers(value, text):
    assert number(value) == text


def test_a_model_of_other_sizes_is_marked_and_never_compared_with_the_published_one(tmp_path):
    write_run(tmp_path, framework="single", rate=100.0)
    small = {"layers": [1, 1, 1, 1], "image_size": 64}
    write_run(tmp_path, rate=900.0, changed=small)
    write_run(tmp_path, gpus=2, rate=950.0, changed={"image_size": 96})
    tables = make_tables(read_all([tmp_path]))
    text = summary_text(tables.scaling)
    assert line_of(text, "ddp", "resnet50*", "native", "1").endswith("ddp@1"), "its own base, not the full model's"
    assert "resnet50*: image_size=64 layers=[1,1,1,1], not as published" in text
    assert "resnet50*2: image_size=96, not as published" in text
    assert len(set(tables.scaling["comparison"])) == len(set(tables.scaling["measurement"])) == 3
    assert set(tables.runs["model"]) == set(tables.scaling["model"]) == {"resnet50"}, "scripts group by the option"
    assert set(tables.scaling["model_changed"].dropna()) == {"image_size=64 layers=[1,1,1,1]", "image_size=96"}
    page = render(tables, Drawing(), tmp_path)
    assert ">resnet50*2<" in page
    assert "resnet50*2: image_size=96, not as published" in page


def test_a_record_that_does_not_say_is_compared_with_the_published_values(tmp_path):
    folder = write_run(tmp_path)
    record = json.loads((folder / "run.json").read_text())
    record["config"]["model"] |= {"layers": [1, 1, 1, 1], "image_size": 224}
    del record["model"]
    (folder / "run.json").write_text(json.dumps(record))
    assert list(make_tables(read_all([tmp_path])).runs["model_changed"]) == ["layers=[1,1,1,1]"]
