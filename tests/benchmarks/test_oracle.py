"""The benchmark's arithmetic by hand, and its processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import calibration, oracle
from benchmarks.calibration import COUNTS, FRAMEWORKS, MICRO, MODELS, SIZES, Calibration, Measurement, needed, words
from benchmarks.oracle import Kept, measure_all, missing, rows, table
from benchmarks.worlds import WorkFailed, World
from ddlbench.config.compose import configuration
from ddlbench.job import Job
from ddlbench.oracle.machine.machine import load
from ddlbench.oracle.measured import network
from ddlbench.oracle.measured.inputs import proportions

Found = dict[Measurement, list[list[float]]]
DDP = [Measurement("step", "gpt2_small", "ddp", ranks) for ranks in COUNTS]


def calibrated() -> Found:
    """One process takes 0.5 s a step, two beside each other 0.6, four 1.1; an all-reduce 1 ms a MiB, hidden or not."""
    config = configuration(*words(DDP[0]))
    blocks = len(proportions(config, load("local")).counts.blocks)
    result: Found = {each: [[0.5, 0.5]] for each in needed(["gpt2_small"], ["ddp"])}
    for ranks, seconds in ((1, 0.5), (2, 0.6), (4, 1.1)):
        result[Measurement("beside", "gpt2_small", "", ranks)] = [[seconds]]
    result[Measurement("blocks", "gpt2_small", "", 1)] = [[1.0] * (2 * blocks) + [1.0]]
    for ranks in COUNTS:
        sweep = [size / 2**20 * 1e-3 for size in SIZES] * len(network.COLLECTIVES)
        result[Measurement("collectives", "", "", ranks)] = [[*sweep, 1.0]]
    return result


def test_a_row_has_the_measured_median_the_prediction_and_the_signed_error() -> None:
    result = calibrated() | {DDP[0]: [[0.9], [1.0, 1.1, 0.8], [1.3]]}
    two, four = rows(DDP, result)
    parameters = proportions(configuration(*words(DDP[0])), load("local")).counts.parameter_count
    expected = 0.5 * 0.6 / 0.5 + 4 * parameters / 2**20 * 1e-3
    assert two.measured == pytest.approx(1.0)
    assert two.prediction is not None
    assert two.prediction.step_s == pytest.approx(expected)
    assert two.error == pytest.approx(expected - 1)
    assert (four.measured, four.error) == (None, None)
    text = table([two, four])
    share = f"{expected:.1%}"
    assert f"| gpt2_small | ddp | 2 | 1000.0 ms | 3 | 40% | {expected * 1e3:.1f} ms | 600.0 ms |" in text
    assert f"| {share} |" in text
    assert "| gpt2_small | ddp | 4 | not measured | 0 |" in text
    assert f"mean accuracy of 1 of 2 rows: {share}" in text


def test_nothing_of_a_test_run_moves_a_prediction() -> None:
    """Calibration and test runs are different runs."""
    before = rows(DDP, calibrated() | {DDP[0]: [[1.0]]})
    after = rows(DDP, calibrated() | {DDP[0]: [[7.0]], DDP[1]: [[9.0]]})
    assert [row.prediction for row in before] == [row.prediction for row in after]
    kinds = {(each.kind, each.framework, each.ranks) for each in needed([*MODELS], [*FRAMEWORKS])}
    assert not {ranks for kind, framework, ranks in kinds if framework and ranks > 1}


def test_without_a_calibration_there_is_no_prediction() -> None:
    result = calibrated()
    del result[Measurement("beside", "gpt2_small", "", 4)]
    row = rows(DDP, result | {DDP[0]: [[1.0]]})[0]
    assert row.prediction is None
    assert "not calibrated" in table([row])
    assert Calibration({}).covers(DDP[0]) is False


def test_an_interrupted_run_goes_on_and_failures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Measurement] = []

    def measure(of: Measurement, _: object) -> list[float]:
        done.append(of)
        if of.ranks == 4:
            raise WorkFailed("rank 3 of 4 ended")
        return [0.1]

    monkeypatch.setattr(oracle, "measure", measure)
    kept = Kept(tmp_path / "seconds.jsonl")
    kept.add(DDP[0], [0.2])
    measure_all(DDP, DDP, 2, tmp_path, 1.0)
    assert sorted(done, key=lambda of: of.ranks) == [DDP[0], DDP[1], DDP[1]]
    assert kept.read() == {DDP[0]: [[0.2], [0.1]]}
    assert "failed: rank 3 of 4 ended" in capsys.readouterr().err
    assert "| gpt2_small | ddp | 2 | 150.0 ms | 2 |" in (tmp_path / "table.md").read_text()
    assert json.loads(kept.path.read_text().splitlines()[0])["of"] == ["step", "gpt2_small", "ddp", 2]


def test_processes_beside_each_other_are_measured_three_times_in_a_repeat() -> None:
    beside, step = Measurement("beside", "gpt2_small", "", 2), DDP[0]
    assert [missing(beside, there, 0) for there in (0, 2, 3)] == [3, 1, 0]
    assert [missing(beside, there, 1) for there in (0, 3, 5)] == [3, 3, 1]  # no more, whatever failed before
    assert [missing(step, there, 1) for there in (0, 1)] == [1, 1]
    assert missing(step, 2, 1) <= 0


def test_every_case_computes_the_same_samples_in_the_same_micro_batches() -> None:
    """Weak scaling, so that nothing depends on how computing grows with the batch."""
    from ddlbench.oracle.predictor import job_of

    for model in MODELS:
        for name in FRAMEWORKS:
            for ranks in (1, *COUNTS):
                of = Measurement("step", model, name, ranks)
                job: Job = job_of(configuration(*words(of)), ranks, load("local"))
                assert (job.global_batch, job.micro_batch) == (calibration.SAMPLES * ranks, MICRO)


def rank_and_sum(add: int) -> tuple[int, int]:
    import torch

    total = torch.tensor(dist.get_rank() + add)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("made to fail")


def own_process() -> int:
    return os.getpid()


@pytest.mark.slow
def test_a_world_stays_alive_and_starts_again_after_a_failure() -> None:
    world = World(2)
    try:
        before = world.run(own_process)
        assert world.run(rank_and_sum, 10) == [(0, 21), (1, 21)]
        assert world.run(own_process) == before
        with pytest.raises(WorkFailed, match=r"(?s)rank 1 of 2.*made to fail"):
            world.run(fail_on_rank_1)
        assert world.run(rank_and_sum, 0) == [(0, 1), (1, 1)]
        assert not set(world.run(own_process)) & set(before)
    finally:
        world.close()
