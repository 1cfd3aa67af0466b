"""How far the oracle is off on this machine: measured steps of 2 and 4 processes beside predictions from one process.

python -m benchmarks.oracle [--repeats 3] [--only ddp] [--model gpt2_small] [--keep FOLDER]

First the collectives between processes are measured, and how processes that share cores slow each other
(oracle/network.py). Then every framework runs with one process, which the predictions start from, and with 2 and with
4, which they are compared with: different runs, in random order. One row a framework, model and number of processes,
misses included; accuracy is 1 - |predicted - measured| / measured (Kahira et al. 2021). The aim is 90 % on average.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from ddlbench.config.compose import configuration, configurations
from ddlbench.oracle import machine as machines
from ddlbench.oracle import network
from ddlbench.oracle.command import machine_of
from ddlbench.oracle.predictor import Known, Prediction, predict
from ddlbench.oracle.question import ask
from ddlbench.oracle.results import Results
from ddlbench.report.read import Attempt

MODELS = {
    "resnet50": ("model.layers=[1,1,1,1]", "model.image_size=64", "model.num_classes=10"),
    "vgg16": ("model.channels=[16,32,64,64,64]", "model.hidden=256", "model.image_size=64", "model.num_classes=10"),
    "gpt2_small": (
        "model.n_layer=4",
        "model.n_embd=256",
        "model.n_head=4",
        "model.vocab_size=2048",
        "model.seq_len=64",
    ),
}
# Words of each number of processes, where a framework has more than its default.
FRAMEWORKS: dict[str, dict[int, tuple[str, ...]]] = {
    **{name: {} for name in ("ddp", "zero1", "zero2", "zero3", "fsdp", "tensor", "gpipe", "1f1b")},
    "hybrid": {4: ("framework.tp=2", "framework.pp=2"), 2: ("framework.pp=2",)},
}
# The same micro batch everywhere, so that no prediction depends on how computing grows with it.
COMMON = ("loader=synthetic", "train.batch_per_gpu=8", "train.micro_batch=4", "train.epochs=2", "train.steps=10")
QUIET = ("train.validate=false", "progress=false")
COUNTS = (2, 4)
LIMIT_S = 300


@dataclass(frozen=True)
class Case:
    framework: str
    model: str
    ranks: int

    @property
    def words(self) -> tuple[str, ...]:
        own = FRAMEWORKS[self.framework].get(self.ranks, ())
        return (f"+framework={self.framework}", f"+model={self.model}", *MODELS[self.model], *COMMON, *QUIET, *own)


def run(case: Case, folder: Path, repeat: int) -> None:
    """One measured run; a failure says so and leaves its row out."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    words = [*case.words, f"train.repeat={repeat}", f"results_dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "-m", "ddlbench", *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        print(f"{case}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}", file=sys.stderr)


def measured(attempts: Sequence[Attempt], case: Case) -> list[float]:
    """Seconds of a step of each complete run."""
    found: list[float] = []
    for record in (attempt.record for attempt in attempts):
        if record.get("status") != "ok" or record["launch"]["world_size"] != case.ranks:
            continue
        if (record["config"]["framework"]["name"], record["model"]["name"]) == (case.framework, case.model):
            found.append(record["ledger"]["global_batch"] / record["summary"]["throughput_samples_per_s"])
    return found


def predicted(case: Case, results: Results) -> Prediction:
    """From the runs of one process."""
    machine = machine_of(ask(["cluster=local", "+model=x"]))
    config = configuration(*case.words)
    known = Known(machine, lambda asked, job: results.computation(asked, machine))
    return predict(config, config.framework, case.ranks, known)


def table(cases: Sequence[Case], results: Results) -> str:
    lines = [
        "| model | framework | processes | measured | n | predicted | error | accuracy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    accuracies: list[float] = []
    for case in cases:
        seconds = measured(results.attempts, case)
        if not seconds:
            lines.append(f"| {case.model} | {case.framework} | {case.ranks} | no run | 0 | | | |")
            continue
        row, middle = predicted(case, results), median(seconds)
        if row.step_s is None:
            lines.append(f"| {case.model} | {case.framework} | {case.ranks} | {middle:.4f} s | {len(seconds)} | | | |")
            continue
        error = (row.step_s - middle) / middle
        accuracies.append(1 - abs(error))
        lines.append(
            f"| {case.model} | {case.framework} | {case.ranks} | {middle:.4f} s | {len(seconds)} | {row.step_s:.4f} s "
            f"| {error:+.1%} | {1 - abs(error):.1%} |"
        )
    mean = f"{fmean(accuracies):.1%}" if accuracies else "nothing measured"
    return "\n".join([*lines, "", f"mean accuracy of {len(accuracies)} rows: {mean}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--keep", type=Path, help="folder of the runs; those that are there already count")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, configurations():
        folder: Path = given.keep or Path(temporary)
        network.calibrate(machines.load("local").device.type, COUNTS)
        base = [Case(framework, model, 1) for framework in given.only for model in given.model]
        cases = [replace(case, ranks=ranks) for case in base for ranks in COUNTS]
        runs = [(case, repeat) for case in (*base, *cases) for repeat in range(given.repeats)]
        random.Random(0).shuffle(runs)
        for number, (case, repeat) in enumerate(runs, start=1):
            print(f"{number} of {len(runs)}: {case}", file=sys.stderr)
            run(case, folder, repeat)
        print(table(cases, Results.read(folder)))


if __name__ == "__main__":
    main()
