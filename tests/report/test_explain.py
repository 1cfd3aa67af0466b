"""Waterfalls on records made by hand: a sample takes 0.01 s on one device, so the ideal of 32 samples a rank is 0.32 s.

The measured step of two ranks is 0.64 s, twice the ideal, except where a test says otherwise.

Which rank of a run that hung is behind, from files of last collectives made by hand.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from ddlbench.config.compose import configuration
from ddlbench.errors import UserError
from ddlbench.figures.bars import draw_waterfall
from ddlbench.figures.plotting import grid
from ddlbench.report.__main__ import main
from ddlbench.report.explain import NO_CAUSE, Explanation, behind, explain
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.support.published import cells, csv_facts, store
from tests.support.records import edited, write_run

NO_WAIT = {"data_wait_share": 0.0, "mfu": None}
SLOW_RANK: dict[str, Any] = {"straggler_rank": 1, "straggler_host": "node1"}


def window(*parts_of_ranks: tuple[float, float, float, float], step_s: float = 0.64) -> dict[str, Any]:
    """The section `profile` of one step. parts_of_ranks: computing, exposed communication, data and idle of each"""
    ranks = [tuple(part * step_s / sum(parts) for part in parts) for parts in parts_of_ranks]
    lines = [
        {"rank": n, "host": "node1", "stage": 0, "window_s": sum(parts), "own_step_s": parts[0] + parts[3]}
        | dict(zip(("compute_s", "exposed_s", "data_s", "idle_s"), parts, strict=True))
        for n, parts in enumerate(ranks)
    ]
    return {"profile": {"status": "ok", "steps": 1, "ranks": lines}}


def explanation_of(results: Path, attempt: Path) -> Explanation:
    records = read_all([results])
    return explain(make_tables(records), records, attempt.parent.name)


def explained(
    results: Path, sections: Any = None, rate: float = 100.0, base: float = 100.0, device: str = "cuda", **summary: Any
) -> tuple[Explanation, dict[str, float | None]]:
    """Two ranks at `rate` samples a second beside one device at `base`."""
    write_run(results, gpus=1, rate=base, device=device, summary=NO_WAIT)
    path = write_run(results, gpus=2, rate=rate, device=device, summary=NO_WAIT | summary, sections=sections)
    explanation = explanation_of(results, path)
    assert sum(bar.seconds or 0.0 for bar in explanation.bars) == pytest.approx(explanation.step_s) == 64 / rate
    return explanation, {bar.bar: bar.seconds for bar in explanation.bars}


@pytest.mark.parametrize("usual", [False, True], ids=["alone", "beside a healthy run"])
@pytest.mark.parametrize(
    ("cause", "ranks", "summary"),
    [
        ("exposed communication", [(1, 1, 0, 0), (1, 1, 0, 0)], {}),
        ("host and launch", [(1, 0, 0, 1), (1, 0, 0, 1)], {}),
        ("kernels", [(2, 0, 0, 0), (2, 0, 0, 0)], {}),
        ("input", [(1, 0, 1, 0), (1, 0, 1, 0)], {"data_wait_share": 0.5}),
        ("input", [(1, 0, 1, 0), (1, 1, 0, 0)], {"data_wait_share": 0.5}),
        ("bubble", [(1, 1, 0, 0), (1, 1, 0, 0)], {"bubble": 0.5}),
    ],
)
def test_a_cause_of_half_the_step_is_named(
    tmp_path: Path, cause: str, ranks: list[tuple[float, float, float, float]], summary: dict[str, Any], usual: bool
) -> None:
    if usual:
        healthy = window((96, 4, 0, 0), (96, 4, 0, 0), step_s=64 / 192)
        write_run(tmp_path, gpus=2, rate=192.0, summary=NO_WAIT, sections=healthy, train={"seed": 1})
    sections = window(*ranks) | {"framework": {"bubble": summary.get("bubble")}}
    explanation, seconds = explained(tmp_path, sections, **summary)
    assert explanation.cause == cause
    assert seconds["ideal"] == seconds[cause] == pytest.approx(0.32)
    assert seconds["unexplained"] == pytest.approx(0)


def test_a_rank_that_sleeps_is_named_and_the_waits_for_it_are_no_communication(tmp_path: Path) -> None:
    explanation, seconds = explained(tmp_path, window((1, 1, 0, 0), (1, 0, 0, 1)), **SLOW_RANK)
    assert explanation.cause == "slow rank 1 on node1"
    assert seconds["slow rank"] == pytest.approx(0.32)
    assert seconds["exposed communication"] == 0


def test_a_slow_core_is_as_slow_where_it_communicates(tmp_path: Path) -> None:
    """Rank 1 takes twice as long as rank 0 for its own work, 0.16 s, and communicates 0.32 s: half of it is its own
    slowness, and with what its work takes beyond rank 0's the larger part."""
    sections = window((1, 3, 0, 0), (2, 2, 0, 0))
    explanation, seconds = explained(tmp_path, sections, base=200.0, device="cpu", **SLOW_RANK)
    assert seconds["slow rank"] == pytest.approx(0.32)
    assert seconds["exposed communication"] == pytest.approx(0.16)
    assert explanation.cause == "slow rank 1 on node1"


def test_a_slow_rank_whose_window_has_no_work_of_its_own_is_no_traceback(tmp_path: Path) -> None:
    record = window((1, 2, 0, 0), (0, 1, 2, 0))
    _, bars = explained(tmp_path, record, device="cpu", **SLOW_RANK)
    assert (bars["exposed communication"], bars["slow rank"]) == (pytest.approx(0.64 / 3), pytest.approx(-0.64 / 3))


def test_what_repeats_differ_by_is_no_cause(tmp_path: Path) -> None:
    """0.08 s of waiting for data in a step of 0.4 s, where the steps of two other repeats differ by 0.112 s."""
    for repeat, rate in ((1, 160.0), (2, 125.0)):
        write_run(tmp_path, gpus=2, rate=rate, summary=NO_WAIT, repeat=repeat)
    sections = window((4, 0, 1, 0), (4, 0, 1, 0), step_s=0.4)
    assert explained(tmp_path, sections, rate=160.0, data_wait_share=0.2)[0].cause == NO_CAUSE


def test_what_all_runs_without_a_window_have_is_no_cause(tmp_path: Path) -> None:
    """Two ranks on shared cores compute for the double time of one, in every repeat."""
    own: dict[str, Any] = {"own_step_s": 0.6, "own_step_median_rank_s": 0.6, "own_step_source": "thread"}
    assert explained(tmp_path / "alone", device="cpu", **own)[0].cause == "kernels"
    for repeat in (1, 2):
        write_run(tmp_path / "all", gpus=2, device="cpu", summary=NO_WAIT | own, repeat=repeat)
    assert explained(tmp_path / "all", device="cpu", **own)[0].cause == NO_CAUSE


@pytest.mark.parametrize(
    ("parts", "step_s", "how", "bars"),
    [
        ((96, 4, 0, 0), 64 / 192, {"rate": 192.0}, {}),  # 4 % of communication with one run
        # The window's step took 0.4 s of communication and computing, the measured one 0.64 s.
        ((1, 1, 0, 0), 0.4, {}, {"exposed communication": 0.2, "unexplained": 0.64 - 0.4}),
        # 0.128 s of waiting for data, beside 0.192 s of the step that the window does not have.
        ((1, 0, 0, 0), 0.32, {"data_wait_share": 0.2}, {"input": 0.128, "unexplained": 0.192}),
        # The ideal of 0.32 s contains the base's idle time; the run computes 0.29 s of its 0.32 s.
        ((9, 0, 0, 1), 0.32, {"rate": 200.0}, {"kernels": 0, "host and launch": 0}),
        ((2, 0, 0, 0), 0.64, {"device": "cpu", "cpu_others_share": 0.6}, {}),
    ],
    ids=["healthy", "not in the window", "less than what is unexplained", "the base's idle time", "other processes"],
)
def test_what_is_no_cause(tmp_path: Path, parts: Any, step_s: float, how: Any, bars: dict[str, float]) -> None:
    explanation, seconds = explained(tmp_path, window(parts, parts, step_s=step_s), **how)
    assert explanation.cause == NO_CAUSE
    assert {name: seconds[name] for name in bars} == pytest.approx(bars)


def test_what_the_profiler_adds_to_all_comparable_runs_hides_no_cause(tmp_path: Path) -> None:
    """Both windows take 0.2 s more than the measured steps. The run communicates 0.17 s more than the healthy one."""
    healthy = window((58, 2, 0, 0), (58, 2, 0, 0), step_s=0.6)
    write_run(tmp_path, gpus=2, rate=160.0, summary=NO_WAIT, sections=healthy, train={"seed": 1})
    explanation, seconds = explained(tmp_path, window((65, 19, 0, 0), (65, 19, 0, 0), step_s=0.84))
    assert [seconds["exposed communication"], seconds["unexplained"]] == pytest.approx([0.19, -0.2])
    assert explanation.cause == "exposed communication"


def test_a_slow_rank_in_a_window_that_took_longer_than_the_measured_steps_is_no_cause(tmp_path: Path) -> None:
    """Rank 1 takes 0.1 s more in windows that take 0.2 s more than the step, in this run and in a comparable one."""
    healthy = window((60, 0, 0, 0), (60, 0, 0, 0), step_s=0.6)
    write_run(tmp_path, gpus=2, rate=160.0, summary=NO_WAIT, sections=healthy, train={"seed": 1})
    explanation, seconds = explained(tmp_path, window((5, 1, 0, 0), (6, 0, 0, 0), step_s=0.6), rate=160.0, **SLOW_RANK)
    assert [seconds["slow rank"], seconds["unexplained"]] == pytest.approx([0.1, -0.2])
    assert explanation.cause == NO_CAUSE


def test_communication_that_other_runs_of_the_framework_have_is_no_cause(tmp_path: Path) -> None:
    sections = window((1, 1, 0, 0), (1, 1, 0, 0))
    write_run(tmp_path, gpus=2, rate=100.0, summary=NO_WAIT, sections=sections, train={"seed": 1})
    assert explained(tmp_path, sections)[0].cause == NO_CAUSE


def test_without_a_window_the_rest_is_unexplained_and_no_cause_is_invented(tmp_path: Path) -> None:
    explanation, seconds = explained(tmp_path)
    assert explanation.cause == NO_CAUSE
    assert seconds["unexplained"] == pytest.approx(0.32)
    assert seconds["kernels"] is seconds["exposed communication"] is seconds["host and launch"] is None
    assert any("profile=true" in line for line in explanation.lines())


def test_the_next_run_has_each_key_once(tmp_path: Path) -> None:
    bars = explained(tmp_path, window((1, 0, 1, 0), (1, 0, 1, 0)), data_wait_share=0.5)[0].bars
    (command,) = [bar.next_run for bar in bars if bar.bar == "input"]
    assert "loader=native" not in command
    assert command.startswith("torchrun --nproc-per-node=2 -m ddlbench +framework=ddp +model=resnet50 ")
    assert command.endswith(" loader=synthetic")


def test_the_next_run_fits_the_device_and_the_nodes_and_reads_the_same_data(tmp_path: Path) -> None:
    sections = window((1, 1, 1, 0), (1, 1, 1, 0))
    path = write_run(tmp_path, gpus=2, device="cpu", rate=100.0, summary=NO_WAIT, sections=sections)
    with edited(path) as record:
        record["launch"]["nodes"] = 2
        record["config"]["data"] |= {"root": "/my data", "val_limit": 700}
    bars = explanation_of(tmp_path, path).bars
    (command,) = [bar.next_run for bar in bars if bar.bar == "exposed communication"]
    assert command.startswith("srun --nodes=2 --ntasks-per-node=1 python -m ddlbench ")
    assert {"data.root=/my data", "data.val_limit=700", "train.reduce_dtype=fp16"} <= set(shlex.split(command))


def test_the_next_run_has_what_differs_from_the_defaults_in_the_run(tmp_path: Path) -> None:
    changes = ["train.batch_per_gpu=64", "train.tf32=true", "loader.workers=3", "recipe.optimizer.lr=0.5"]
    config = configuration("+framework=ddp", "+model=resnet50", *changes).resolved
    sections = {**window((1, 1, 0, 0), (1, 1, 0, 0)), "config": config}
    path = write_run(tmp_path, gpus=2, rate=100.0, summary={"data_wait_share": 0.1}, sections=sections)
    commands = {bar.bar: shlex.split(bar.next_run)[4:] for bar in explanation_of(tmp_path, path).bars}
    choice = ["+framework=ddp", "+model=resnet50", "loader=native", "data=sample_images", "recipe=sgd"]
    assert sorted(commands["exposed communication"]) == sorted([*choice, *changes, "train.reduce_dtype=bf16"])
    assert not any(word.startswith("loader.") for word in commands["input"]), "of another loader"


@pytest.mark.parametrize("model", ["resnet50", "gpt2_small"])
def test_every_next_run_can_be_composed(tmp_path: Path, model: str) -> None:
    config = configuration("+framework=gpipe", f"+model={model}", "train.micro_batch=2").resolved
    sections = {**window((1, 1, 1, 1), (1, 1, 1, 1)), "config": config}
    waits = {"data_wait_share": 0.1}
    path = write_run(tmp_path, framework="gpipe", model=model, gpus=2, summary=waits, sections=sections)
    bars = explanation_of(tmp_path, path).bars
    commands = [shlex.split(bar.next_run) for bar in bars if bar.next_run]
    assert len(commands) > 3
    for command in commands:
        configuration(*command[command.index("ddlbench") + 1 :])


def test_a_run_on_one_device_is_no_base_of_itself(tmp_path: Path) -> None:
    path = write_run(tmp_path, gpus=1, summary=NO_WAIT, sections=window((9, 0, 0, 1)))
    explanation = explanation_of(tmp_path, path)
    assert explanation.bars[0].seconds is None
    assert explanation.cause == NO_CAUSE


def test_a_failed_run_on_one_device_is_no_base(tmp_path: Path) -> None:
    """Neither has a name of a framework or a time: the failed run, and the base of a run that sends no gradients."""
    path = write_run(tmp_path, gpus=2, summary=NO_WAIT, sections=window((9, 0, 0, 1), (9, 0, 0, 1)))
    failed = write_run(tmp_path, gpus=1, status="oom")
    with edited(path) as reference, edited(failed) as record:
        reference["config"]["framework"]["comm_hook"] = "noop"
        del record["config"]["framework"]["name"]
    assert explanation_of(tmp_path, path).bars[0].seconds is None


def test_the_input_bar_is_the_wait_of_all_epochs_and_not_of_the_worst_one(tmp_path: Path) -> None:
    waits: dict[str, Any] = {"data_wait_share": 0.4, "data_wait_mean_share": 0.05}
    explanation, seconds = explained(tmp_path, window((19, 0, 1, 0), (19, 0, 1, 0)), **waits)
    assert seconds["input"] == pytest.approx(0.05 * 0.64)
    (bar,) = [bar for bar in explanation.bars if bar.bar == "input"]
    assert bar.evidence == "data_wait_mean_share"


def test_the_ideal_is_the_base_without_the_wait_of_all_its_epochs(tmp_path: Path) -> None:
    write_run(tmp_path, gpus=1, rate=100.0, summary={"data_wait_share": 0.4, "data_wait_mean_share": 0.1})
    path = write_run(tmp_path, gpus=2, rate=100.0, summary=NO_WAIT, sections=window((1, 1, 0, 0), (1, 1, 0, 0)))
    ideal = explanation_of(tmp_path, path).bars[0]
    assert ideal.seconds == pytest.approx(0.9 * 0.32)
    assert ideal.evidence.endswith("less its data_wait_mean_share")


def test_of_several_attempts_the_one_that_started_last_is_explained(tmp_path: Path) -> None:
    """Sorted as texts, attempt-10 comes before attempt-9."""
    for attempt in (9, 10):
        start = {"times": {"start": f"2026-01-{attempt:02}T10:00:00+00:00"}}
        path = write_run(tmp_path, attempt=attempt, sections=start, rate=10.0 * attempt)
    assert explanation_of(tmp_path, path).run == str(path)


def test_an_unknown_run_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, gpus=1)
    with pytest.raises(UserError, match="no attempt has this run_id"):
        explanation_of(tmp_path, Path("other/attempt-1"))


def test_a_published_measurement_is_not_explained(tmp_path: Path) -> None:
    store(tmp_path / "results", csv_facts(tmp_path, cells()))
    records = read_all([tmp_path / "results"])
    tables = make_tables(records)
    with pytest.raises(UserError, match="a published measurement has no record of its steps"):
        explain(tables, records, tables.run_rows[0]["run_id"])


def test_the_command_writes_the_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, gpus=1)
    assert main([str(tmp_path), "--explain", path.parent.name]) == 0
    assert "cause: " in capsys.readouterr().out
    table = (tmp_path / "report/tables/explain.csv").read_text()
    assert table.startswith("bar,seconds,evidence,share,next_run\nideal,")
    assert (tmp_path / "report/figures/explain.png").exists()


SAME = "all ranks began the same last collectives"


def save(attempt: Path, rank: int, *collectives: tuple[str, str, int]) -> None:
    """collectives: group, operation and sequence number of each"""
    lines: list[dict[str, Any]] = [
        {"group": group, "operation": operation, "sequence": sequence, "message": operation.endswith(("send", "recv"))}
        for group, operation, sequence in collectives
    ]
    (attempt / "collectives").mkdir(exist_ok=True)
    saved = {"rank": rank, "host": "node1", "collectives": lines}
    (attempt / f"collectives/rank-{rank}.json").write_text(json.dumps(saved))


def test_the_rank_with_the_lowest_number_is_behind(tmp_path: Path) -> None:
    save(tmp_path, 0, ("0", "gloo:all_reduce", 4), ("0", "gloo:all_reduce", 5))
    save(tmp_path, 1, ("0", "gloo:all_reduce", 3), ("0", "gloo:barrier", 4))
    save(tmp_path, 2, ("0", "gloo:all_reduce", 5))
    assert behind(tmp_path) == (
        "1 of 3 ranks behind in group 0 of gloo: rank 1 on node1 last began gloo:barrier 4; "
        "rank 0 on node1 last began gloo:all_reduce 5; rank 2 on node1 last began gloo:all_reduce 5"
    )


def test_ranks_at_the_same_collective_are_not_behind(tmp_path: Path) -> None:
    """Both wait in it, or one left it: the numbers do not say which."""
    save(tmp_path, 0, ("0", "gloo:all_reduce", 5))
    save(tmp_path, 1, ("0", "gloo:all_reduce", 5))
    assert behind(tmp_path) == SAME


def test_numbers_of_other_groups_and_backends_and_of_messages_are_not_compared(tmp_path: Path) -> None:
    save(tmp_path, 0, ("0", "nccl:all_reduce", 50), ("0", "gloo:barrier", 2), ("1", "nccl:all_reduce", 7))
    save(tmp_path, 1, ("0", "gloo:barrier", 2), ("2", "nccl:all_reduce", 9), ("0", "nccl:all_reduce", 50))
    save(tmp_path, 2, ("0", "nccl:all_reduce", 50), ("0", "nccl:recv", 3))
    assert behind(tmp_path) == SAME


def test_of_many_ranks_the_first_are_listed(tmp_path: Path) -> None:
    for rank in range(1000):
        save(tmp_path, rank, ("0", "nccl:all_reduce", 6 if rank == 700 else 7))
    said = behind(tmp_path)
    assert said.startswith("1 of 1000 ranks behind in group 0 of nccl: rank 700 on node1")
    assert said.endswith("; and 992 more ranks")


def test_without_files_nothing_is_said_and_a_broken_file_is_named(tmp_path: Path) -> None:
    assert behind(tmp_path) == ""
    (tmp_path / "collectives").mkdir()
    (tmp_path / "collectives/rank-0.json").write_text("[]")
    with pytest.raises(UserError, match=r"rank-0\.json holds no last collectives .*: remove it"):
        behind(tmp_path)


def test_a_bar_that_runs_backwards_says_so() -> None:
    (axes,) = grid([("cause: input", [])]).axes
    draw_waterfall(axes, {"ideal": 0.45, "kernels": -0.2, "input": 0.25, "bubble": None}, step_s=0.5)
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["+90 %", "-40 %", "+50 %"]
