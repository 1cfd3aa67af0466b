from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddlbench.config.compose import configuration
from ddlbench.errors import Unavailable, UserError
from ddlbench.measure import clock
from ddlbench.oracle.machine import machine as machines
from ddlbench.oracle.machine.collectives import path
from ddlbench.oracle.measured import inputs, network
from ddlbench.oracle.measured.inputs import OneStep, calibration, from_calibration, from_one_step
from ddlbench.oracle.predictor import Inputs, predict
from ddlbench.oracle.timing.computation import Computation
from ddlbench.predict import __main__ as command
from ddlbench.predict.question import ask
from tests.oracle.made import ABCI

TINY = ("+framework=ddp", "+model=gpt2_small", "model.n_layer=1", "model.n_embd=32", "model.n_head=4",
        "model.vocab_size=64", "model.seq_len=16", "train.batch_per_gpu=2")  # fmt: skip
CPU, LOCAL = torch.device("cpu"), machines.load("local")


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDLBENCH_HOME", str(tmp_path))
    return tmp_path / "oracle"


def test_a_calibration_is_kept_for_its_batch_precision_and_version(own_home: Path) -> None:
    config, half = configuration(*TINY), configuration(*TINY, "train.precision=bf16")
    first, update_s = calibration(config, CPU, 2)
    assert [item.forward > 0 and item.backward > 0 for item in first] == [True] * 4  # embed, h0, ln_f, head
    assert calibration(config, CPU, 2) == (first, update_s)
    (path,) = own_home.iterdir()
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "key": {**content["key"], "torch": "1.0"}, "update_s": -1.0}))
    assert calibration(config, CPU, 2)[1] > 0
    calibration(config, CPU, 1)
    calibration(half, CPU, 2)
    assert len(list(own_home.iterdir())) == 3


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Computation]:
    """The blocks of the tiny model on this machine; a micro batch is measured when it is asked for first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDLBENCH_HOME", str(tmp_path_factory.mktemp("home")))
        yield from_calibration(configuration(*TINY), LOCAL)


def test_blocks_are_measured_up_to_twice_one_gpu_s_batch(measured: Computation) -> None:
    exact, larger = measured.blocks(4), measured.blocks(64)
    assert exact[1].forward == measured.measured[4][1].forward
    assert larger[1].forward > exact[1].forward
    assert [measured.marks(4), measured.marks(64)] == [[], ["calibration at a micro batch of 4, not 64"]]


def test_a_predicted_step_has_the_measured_blocks_and_update(measured: Computation) -> None:
    """Not the update by the bytes of a device whose bandwidth is unknown."""
    row = predict(configuration(*TINY), 1, Inputs(LOCAL, lambda _: measured))
    passes, update_s = measured.measured[2], (measured.update_s or 0.0) * measured.counts.parameter_count
    assert row.compute_s == pytest.approx(sum(item.forward + item.backward for item in passes) + update_s)


def test_a_measured_step_is_divided_in_the_proportions_of_the_blocks(measured: Computation) -> None:
    """The update, too, is a part of the step of 1 s, and was measured with the blocks."""
    config, numbers = configuration(*TINY), measured.counts.parameter_count
    divided = from_one_step(config, LOCAL, OneStep(1.0), blocks=measured)
    assert predict(config, 1, Inputs(LOCAL, lambda _: divided)).step_s == pytest.approx(1.0)
    assert divided.update(numbers) == pytest.approx(measured.update(numbers) / measured.step(2))


def test_blocks_are_measured_with_the_switches_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch rounds the inputs of convolutions to TF32, which a run does with train.tf32=true alone."""
    seen = list[object]()
    monkeypatch.setattr(inputs, "set_switches", lambda *given: seen.append(given))
    config = configuration(*TINY)
    inputs.measure(config, CPU, 2)
    assert seen == [(config.train, CPU)]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "oracle").touch()
    monkeypatch.setenv("DDLBENCH_HOME", str(tmp_path))
    config = configuration(*TINY)
    with pytest.raises(UserError, match=r"cannot be written .* set DDLBENCH_HOME to another folder"):
        calibration(config, CPU, 2)


def test_the_median_of_the_repeats_counts_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of each repeat, forward, backward and of the update; what the system delays is in one of them."""
    ahead, back, update = (100, 1, 2, 3, 4, 90), (200, 10, 20, 30, 40, 900), (50, 7, 5, 6, 8, 70)
    blocks = [seconds for pair in zip(ahead, back, strict=True) for seconds in (0, *pair)] * 4
    times = accumulate(map(float, [*blocks, *(seconds for item in update for seconds in (0, item))]))
    for module in (clock, inputs):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    config = configuration(*TINY)
    assert inputs.measure(config, CPU, 2) == ([(3, 30)] * 4, 7)


def test_another_device_is_refused() -> None:
    config = configuration(*TINY)
    with pytest.raises(UserError, match="which has no GPU, not Tesla V100"):
        from_calibration(config, ABCI)


@pytest.mark.slow
def test_collectives_are_measured_and_used(own_home: Path) -> None:
    """Two ranks; what was measured comes back for its sizes."""
    path = network.calibrate("cpu", [2], sizes=(1024, 4096))
    content = json.loads(path.read_text())
    machine = network.calibrated(LOCAL)
    for kind in network.COLLECTIVES:
        sweep = machine.sweep(kind, 2)
        assert sweep is not None
        assert sweep.at(4096) == content["seconds"][kind]["2"][1] > 0
    assert machine.shared_cores(2) >= 1
    path.write_text(json.dumps({**content, "torch": "1.0"}))
    with pytest.raises(UserError, match="run --calibrate-network again"):
        network.calibrated(LOCAL)
    assert own_home == path.parent


@pytest.mark.slow
@pytest.mark.usefixtures("own_home")
def test_a_process_that_fails_is_one_line() -> None:
    with pytest.raises(Unavailable, match=r"with 2 processes failed \(.*\): check that gloo works here") as caught:
        network.calibrate("cpu", [2], sizes=(2**60,))  # more than a process can address
    assert "\n" not in str(caught.value)


def kept(kind: str, **changes: object) -> dict[str, object]:
    """As a calibration with 4 ranks leaves it: every collective takes 1 s, and half of a hidden one is felt."""
    seconds = {name: {"4": [1.0, 1.0]} for name in network.COLLECTIVES}
    result = {"sizes": [1024, 4096], "seconds": seconds, "contention": {"4": 1.0}, "hidden_cost": {"4": 0.5}}
    return {**network.versions(kind), **result, **changes}


def write(folder: Path, kind: str, content: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    network.path(kind).write_text(json.dumps(content))


def test_what_nccl_was_measured_to_take_is_used_on_that_gpu_alone(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(own_home, "cuda", kept("cuda"))
    assert inputs.machine_of("abci").sweep("all_reduce", 4) is None, "this machine has another device"
    monkeypatch.setattr(inputs, "local_gpu", lambda: "Tesla V100-SXM2-16GB")
    machine = inputs.machine_of("abci")
    assert path(machine, 4).seconds("all_reduce", 1e6) == 1.0
    two_nodes = [path(item, 8).seconds("all_reduce", 1e6) for item in (machine, ABCI)]
    assert two_nodes[0] == two_nodes[1]


def test_what_hiding_costs_on_a_gpu_counts_only_where_its_cluster_hides(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of abci has `overlap: false`, that of h100 has true."""
    write(own_home, "cuda", kept("cuda"))
    for cluster, cost in (("abci", 1.0), ("h100", 0.5)):
        monkeypatch.setattr(inputs, "local_gpu", lambda cluster=cluster: machines.load(cluster).device.name)
        assert inputs.machine_of(cluster).hidden_cost_with(4) == cost


def test_overlap_on_the_command_line_goes_before_what_was_measured(own_home: Path) -> None:
    write(own_home, "cpu", kept("cpu"))
    questions = {word: ask(["+model=resnet50", *word.split()]) for word in ("", "overlap=true", "overlap=false")}
    result = {
        word: inputs.machine_of(asked.machine, asked.overlap).hidden_cost_with(4) for word, asked in questions.items()
    }
    assert result == {"": 0.5, "overlap=true": 0.0, "overlap=false": 1.0}


@pytest.mark.parametrize("content", [[], {"sizes": None}, {"seconds": {"send": 3}}, {"contention": {"four": 1}}])
def test_a_kept_calibration_that_cannot_be_used_is_one_line(own_home: Path, content: object) -> None:
    write(own_home, "cpu", kept("cpu", **content) if isinstance(content, dict) else content)
    with pytest.raises(UserError, match=r"cannot be used .*run --calibrate-network again"):
        network.calibrated(LOCAL)


def test_a_network_has_two_ranks_at_least_and_is_this_machine_s(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["gpus=1"], "--calibrate-network measures between ranks: give gpus= with 2 or more"),
        (["gpus=[2,4,...,16384]"], "16384 processes do not fit in memory: give gpus= up to"),
        (["gpus=4", "cluster=abci"], "which has no GPU, not Tesla V100-SXM2-16GB: run it there"),
    ):
        assert command.main(["+model=resnet50", "--calibrate-network", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_network_is_measured_without_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "calibrate", lambda device, counts: f"{device} {counts}")
    assert command.main(["--calibrate-network", "gpus=2"]) == 0
    assert capsys.readouterr().err == "collectives are in cpu [2]\n"


@pytest.mark.usefixtures("own_home")
def test_nothing_measured_leaves_the_machine_as_it_is() -> None:
    assert network.calibrated(LOCAL) is LOCAL
