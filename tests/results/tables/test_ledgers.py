"""Rows whose framework changed what is trained are named before they are compared."""

from __future__ import annotations

from ddlbench.figures.figures import Drawing
from ddlbench.report.page import render
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.support.records import write_run


def warnings_of(results):
    return make_tables(read_all([results])).warnings


def run(results, framework, **ledger):
    shared = {"global_batch": 64, "samples": 3072, "updates": 48, "lr_last": 0.1, "weights_hash_start": "abc"}
    write_run(results, framework=framework, gpus=2, sections={"ledger": shared | ledger})


def test_the_same_training_gives_no_warning(tmp_path):
    run(tmp_path, "ddp")
    run(tmp_path, "fsdp")
    assert warnings_of(tmp_path) == []


def test_other_initial_weights_are_named(tmp_path):
    run(tmp_path, "ddp")
    run(tmp_path, "fsdp", weights_hash_start="def")
    assert warnings_of(tmp_path) == [
        "not the same training: resnet50, global batch 64, differs in weights_hash_start "
        "(abc: ddp on 2; def: fsdp on 2)"
    ]


def test_fewer_updates_and_another_rate_are_two_warnings(tmp_path):
    run(tmp_path, "ddp")
    run(tmp_path, "fsdp", updates=47, lr_last=0.2)
    updates, rate = warnings_of(tmp_path)
    assert "differs in updates (48: ddp on 2; 47: fsdp on 2)" in updates
    assert "differs in lr_last" in rate


def test_values_that_begin_alike_are_shown_to_differ(tmp_path):
    run(tmp_path, "ddp", lr_last=0.30000000000000004)
    run(tmp_path, "fsdp", lr_last=0.3)
    for framework, number in (("gpipe", "6248"), ("single", "6338")):
        environment = {"cpu_model": f"Intel(R) Xeon(R) Gold {number} CPU @ 2.50GHz", "nccl": f"{number}" * 30}
        write_run(tmp_path, framework=framework, gpus=8, sections={"environment": environment})
    rate, around = warnings_of(tmp_path)
    assert "(0.30000000000000004: ddp on 2; 0.3: fsdp on 2)" in rate
    assert '"Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz": gpipe on 8; ' in around
    assert '"Intel(R) Xeon(R) Gold 6338 CPU @ 2.50GHz": single on 8)' in around
    assert around.count("…") == 2


def test_other_batches_are_not_compared(tmp_path):
    run(tmp_path, "ddp")
    run(tmp_path, "fsdp", global_batch=128, updates=24)
    assert warnings_of(tmp_path) == []


def test_what_failed_is_not_compared(tmp_path):
    run(tmp_path, "ddp")
    write_run(tmp_path, framework="fsdp", gpus=2, status="oom", sections={"ledger": {"global_batch": 64, "updates": 3}})
    assert warnings_of(tmp_path) == []


def test_merged_commits_are_named_once(tmp_path):
    for repeat, commit in enumerate(("abc", "def")):
        write_run(tmp_path, repeat=repeat, sections={"environment": {"git_commit": commit}})
    tables = make_tables(read_all([tmp_path]))
    page = render(tables, Drawing(), tmp_path)
    assert page.count("git_commit (") == 1
    assert "different commits" not in page
