"""What runs with several GPU counts say of a cluster: steps of a cluster whose terms are known lead back to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.oracle.bands import BANDS
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import Learned, OneStep
from ddlbench.oracle.predictor import Inputs, Prediction, predict
from ddlbench.oracle.runs import Results
from ddlbench.results.tables.merge import AttemptRow
from tests.oracle.made import ABCI, by_one_step, record

COUNTS = 1, 4, 8, 16, 32


@pytest.fixture(scope="module")
def config() -> Config:
    """VGG-16 sends 553 MB a step, so links matter."""
    return configuration("+framework=ddp", "+model=vgg16", "train.batch_per_gpu=8")


def machine(inner: float = 1.0, outer: float = 1.0) -> Machine:
    """ABCI with faster or slower links."""
    links = [
        replace(link, bytes_per_s=link.bytes_per_s * rate)
        for link, rate in zip(ABCI.links, (inner, outer), strict=True)
    ]
    return replace(ABCI, links=tuple(links))


def on(cluster: Machine, config: Config, gpus: int) -> float:
    step_s = by_one_step(config, gpus, cluster, OneStep(0.1)).step_s
    assert step_s is not None
    return step_s


def learned(config: Config, steps: dict[int, float]) -> tuple[Results, Learned]:
    results = Results(Path("results"), [record(config, gpus, seconds) for gpus, seconds in steps.items()])
    result = results.learned(config, ABCI)
    assert result is not None
    return results, result


def predicted(config: Config, results: Results, terms: Learned, gpus: int) -> Prediction:
    inputs = Inputs(terms.machine, lambda asked: results.computation(asked, terms.machine), learned=terms)
    return predict(config, gpus, inputs)


@pytest.mark.parametrize(("inner", "outer"), [(0.7, 1.0), (1.0, 0.6), (1.3, 1.4)])
def test_slower_and_faster_links_are_learned(config: Config, inner: float, outer: float) -> None:
    there = machine(inner, outer)
    results, terms = learned(config, {gpus: on(there, config, gpus) for gpus in COUNTS})
    assert terms.factors["links between nodes"] == pytest.approx(outer, rel=0.1)
    row = predicted(config, results, terms, 1024)
    assert row.step_s == pytest.approx(on(there, config, 1024), rel=0.02)
    assert outer == 1 or abs(on(ABCI, config, 1024) / on(there, config, 1024) - 1) > 0.1


def test_runs_as_predicted_change_nothing(config: Config) -> None:
    _, terms = learned(config, {gpus: on(ABCI, config, gpus) for gpus in COUNTS})
    assert terms.rest == pytest.approx(1)
    assert [link.bytes_per_s for link in terms.machine.links] == pytest.approx(
        [link.bytes_per_s for link in ABCI.links]
    )


def test_what_no_run_depends_on_is_named(config: Config) -> None:
    """Runs within a node say nothing of the links between nodes."""
    _, terms = learned(config, {gpus: on(machine(inner=0.5), config, gpus) for gpus in (1, 2, 4)})
    assert terms.factors["links between nodes"] is None
    assert terms.machine.links[1] == ABCI.links[1]
    told, missing = terms.lines()
    assert told.startswith("learned: link within a node x0.")
    assert missing.startswith("not learned, because no run depends on it enough: links between nodes")


def test_what_the_terms_do_not_explain_is_carried_on(config: Config) -> None:
    """Half as fast from two nodes on is more than the links explain: the largest count comes back as measured."""
    steps = {gpus: on(ABCI, config, gpus) * (3 if gpus > 4 else 1) for gpus in COUNTS}
    results, terms = learned(config, steps)
    row = predicted(config, results, terms, 32)
    assert terms.rest != pytest.approx(1, abs=0.01)
    assert row.step_s == pytest.approx(steps[32])
    assert row.step_s is not None
    assert row.unexplained_s == pytest.approx(row.step_s * (1 - 1 / terms.rest))
    assert predicted(config, results, terms, 64).unexplained_s != 0
    base = predicted(config, results, terms, 1)
    assert (base.step_s, base.unexplained_s) == (pytest.approx(steps[1]), 0)


def test_strong_scaling_comes_back_as_measured_where_one_device_has_two_batches() -> None:
    """One device takes 0.60 s for 64 samples and 0.17 s for 16: four of them with 16 each start from the second run."""
    config, runs = configuration("+framework=ddp", "+model=vgg16", "train.global_batch=64"), list[AttemptRow]()
    for gpus, samples, seconds in ((1, 16, 0.17), (1, 64, 0.60), (2, 64, 0.34), (4, 64, 0.20)):
        ledger = {"global_batch": samples, "data_size": gpus, "micro_batches": 1}
        runs.append(
            record(config, gpus, seconds, ledger=ledger, summary={"throughput_samples_per_s": samples / seconds})
        )
    results = Results(Path("results"), runs)
    terms = results.learned(config, ABCI)
    assert terms is not None
    assert predicted(config, results, terms, 4).step_s == pytest.approx(0.20)


def test_no_network_is_learned_on_which_the_base_could_not_have_sent(config: Config) -> None:
    """16 GPUs take twice as long as 8, the base. A network so slow would take the base longer than it took."""
    steps = {8: 0.139, 16: 0.278, 32: 0.278}
    results, terms = learned(config, steps)
    assert terms.factors["links between nodes"] == pytest.approx(0.32, abs=0.01)
    rows = [predicted(config, results, terms, gpus) for gpus in (8, 32)]
    assert [row.step_s for row in rows] == pytest.approx([steps[8], steps[32]])


def test_other_batches_and_clusters_teach_nothing(config: Config) -> None:
    """A smaller batch takes less time a step, and ABCI's links say nothing of another cluster with the same GPU."""
    steps = {gpus: on(ABCI, config, gpus) for gpus in COUNTS}
    runs = [record(config, gpus, seconds) for gpus, seconds in steps.items()]
    small = {"global_batch": 2 * 64, "data_size": 64, "micro_batches": 1}
    runs.append(record(config, 64, 0.03, ledger=small, summary={"throughput_samples_per_s": 2 * 64 / 0.03}))
    elsewhere = {**config.resolved, "cluster": {**config.resolved["cluster"], "name": "elsewhere"}}
    runs += [record(config, gpus, 2 * seconds, config=elsewhere) for gpus, seconds in steps.items()]
    labelled = {**config.resolved, "cluster": {**config.resolved["cluster"], "name": "abci"}}
    here = [record(config, gpus, seconds, config=labelled) for gpus, seconds in steps.items()]
    for others in (runs[: len(steps) + 1], [*here, *runs[len(steps) + 1 :]]):
        terms = Results(Path("results"), others).learned(config, ABCI)
        assert terms is not None
        assert terms.factors["links between nodes"] == pytest.approx(1.0, rel=0.05)
        assert terms.rest == pytest.approx(1.0, rel=0.01)
    mixed = Results(Path("results"), [*runs[: len(steps)], *runs[len(steps) + 1 :]]).computation(config, ABCI)
    assert mixed.remarks == ("a run of cluster elsewhere among those of elsewhere, local",)


def test_other_settings_and_single_counts_teach_nothing(config: Config) -> None:
    other = configuration("+framework=ddp", "+model=vgg16", "train.batch_per_gpu=8", "framework.bucket_cap_mb=1")
    runs = [record(config, 1, 0.1), record(other, 8, 0.3)]
    assert Results(Path("results"), runs).learned(config, ABCI) is None
    assert Results(Path("results"), []).learned(config, ABCI) is None


def test_a_learned_prediction_has_the_band_of_its_class(config: Config) -> None:
    results, terms = learned(config, {gpus: on(ABCI, config, gpus) for gpus in COUNTS})
    row = predicted(config, results, terms, 64)
    assert row.step_s is not None
    (low, _), (_, high) = BANDS["learned"]
    assert (row.low_80_s, row.high_95_s) == (pytest.approx(low * row.step_s), pytest.approx(high * row.step_s))


def test_a_row_on_one_device_has_no_band(config: Config) -> None:
    """Bands are made from predictions of more devices than their base. The run on one device may lie outside of them:
    its step is 0.1 s, and the band of CPUs would begin at 0.101 s."""
    cpu = replace(ABCI, device=replace(ABCI.device, name="cpu", type="cpu"), cores=4)
    one, two = (by_one_step(config, gpus, cpu, OneStep(0.1)) for gpus in (1, 2))
    assert one.step_s == pytest.approx(0.1)
    assert (one.low_80_s, one.high_80_s, one.low_95_s, one.high_95_s) == (None, None, None, None)
    assert two.low_80_s is not None
