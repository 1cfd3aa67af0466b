"""What the harness costs: the same work through ddlbench and through a script of benchmarks/bare/, turn by turn.

python benchmarks/overhead.py [--pairs 25] [--only ddp-resnet50]

Both sides are started once and stay alive; from then on one runs while the other is stopped (SIGSTOP), a few steps at a
time. So the two turns of a pair are a second apart, not a minute, and a slow spell of the machine falls on both. Steps
in which a stop fell are left out. A pair's ratio is steps a second of ddlbench over steps a second of the bare script.
Printed: the median over pairs and its distribution-free 95 % interval. The aim is 0.98 or better.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pyarrow.parquet as pq

from ddlbench.report.stats import confidence, median, median_interval

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable, "-m"]
# A GPT-2 whose step is as short as ResNet-50's at this size; as in benchmarks/bare/work.py.
SHAPES = {
    "resnet50": [],
    "gpt2_small": [
        "model.n_layer=4",
        "model.n_embd=512",
        "model.n_head=8",
        "model.vocab_size=8192",
        "model.dropout=0.1",
    ],
}
SCRIPTS = {"single": "ddp", "zero1": "deepspeed"}  # of benchmarks/bare/; others have the framework's name
STEPS_A_TURN = 4
LIMIT_S = 600


@dataclass(frozen=True)
class Work:
    """One comparison: batch is samples a rank; size is the images' side or the sequence's length.

    script: of benchmarks/bare/, where the framework has more than one"""

    framework: str
    model: str
    batch: int
    size: int
    script: str | None = None

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.framework, self.model, self.script)))

    def start(self) -> list[str]:
        """What starts a module in all ranks."""
        return [sys.executable, "-m"] if self.framework == "single" else [*TORCHRUN, "-m"]

    def bare(self) -> list[str]:
        """What starts the script that does the same with the library alone."""
        script = self.script or SCRIPTS.get(self.framework, self.framework)
        return [*(HOROVODRUN if script == "horovod" else self.start()), f"benchmarks.bare.{script}"]


WORKS = [
    Work("single", "resnet50", 2, 64),
    Work("ddp", "resnet50", 2, 64),
    Work("horovod", "resnet50", 2, 64),
    Work("single", "gpt2_small", 2, 64),
    Work("horovod", "gpt2_small", 2, 64),
    Work("ddp", "gpt2_small", 2, 64),
    Work("zero1", "gpt2_small", 2, 64),
    Work("fsdp", "gpt2_small", 2, 64),
    Work("tensor", "gpt2_small", 2, 64),
    Work("tensor", "gpt2_small", 2, 64, "megatron"),
    Work("gpipe", "gpt2_small", 4, 64),
]


class Side:
    """One of the two programs, with all its processes. It writes under `folder`."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder, self.command = folder, command
        folder.mkdir()
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, cwd=ROOT)

    def signal(self, number: int) -> None:
        family = psutil.Process(self.process.pid)
        for process in [*family.children(recursive=True), family]:
            process.send_signal(number)

    def turn(self, seconds: float) -> None:
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        if self.process.poll() is not None:
            raise SystemExit(f"{' '.join(self.command)} ended before its last turn:\n{self.errors()}")
        self.signal(signal.SIGSTOP)

    def wait_for(self, found: Callable[[], Any]) -> Any:
        """What `found` gives as soon as it gives something; stopped from there on."""
        until = time.monotonic() + LIMIT_S
        while (value := found()) is None:
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(self.command)} did not begin its steps:\n{self.errors()}")
            time.sleep(0.1)
        self.signal(signal.SIGSTOP)
        return value

    def finish(self) -> None:
        self.signal(signal.SIGCONT)
        if self.process.wait(LIMIT_S):
            raise SystemExit(f"{' '.join(self.command)} exited with {self.process.returncode}:\n{self.errors()}")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait(LIMIT_S)

    def errors(self) -> str:
        return (self.folder / "err").read_text()

    def printed(self, word: str) -> list[float] | None:
        """The numbers behind `word` in a line of the output. horovodrun puts "[rank]<stdout>:" before it."""
        lines = [line.rpartition(">:")[2] for line in (self.folder / "out").read_text().splitlines()]
        return next(([float(number) for number in line.split()[1:]] for line in lines if line.startswith(word)), None)

    def record(self) -> dict[str, Any] | None:
        """The summary of the run, from the moment it is set up."""
        for path in self.folder.glob("*/attempt-1/run.json"):
            return json.loads(path.read_text()).get("summary")
        return None

    def steps(self) -> list[float]:
        table = pq.read_table(next(self.folder.glob("*/attempt-1/steps.parquet")), filters=[("rank", "=", 0)])
        return table.column("step_time_s").to_pylist()


def start_bare(work: Work, folder: Path, steps: int) -> Side:
    return Side(folder, [*work.bare(), work.model, *map(str, (work.batch, steps, work.size))])


def start_ddlbench(work: Work, folder: Path, steps: int) -> Side:
    return Side(
        folder,
        [
            *work.start(), "ddlbench", f"+framework={work.framework}", f"+model={work.model}",
            *SHAPES[work.model],
            f"model.{'image_size' if work.model == 'resnet50' else 'seq_len'}={work.size}",
            "loader=synthetic", f"train.batch_per_gpu={work.batch}", "train.epochs=1", "train.warmup_steps=0",
            f"train.steps={steps}", "train.validate=false", "progress=false", f"results_dir={folder}",
        ],
    )  # fmt: skip


def turns(steps: list[float], turn_s: float) -> list[list[float]]:
    """Seconds of the whole steps, turn by turn; what came before the first stop is no turn. A step in which the program
    was stopped is as long as the other's turn: there the turns part."""
    stops = [at for at, seconds in enumerate(steps) if seconds > 0.9 * turn_s]
    return [steps[a + 1 : b] for a, b in pairwise(stops)]


def compare(work: Work, pairs: int, folder: Path) -> None:
    steps = (pairs + 3) * STEPS_A_TURN
    sides: list[Side] = []
    try:
        sides.append(own := start_ddlbench(work, folder / "ddlbench", steps))
        startup_s: float = own.wait_for(own.record)["startup_s"]
        sides.append(bare := start_bare(work, folder / "bare", steps))
        [step_s] = bare.wait_for(lambda: bare.printed("ready"))
        turn_s = step_s * STEPS_A_TURN
        for _ in range(pairs):
            own.turn(turn_s)
            bare.turn(turn_s)
        own.finish()
        bare.finish()
        printed = bare.printed("steps")
        assert printed is not None
        own_s, bare_s = turns(own.steps(), turn_s), turns(printed, turn_s)
    finally:
        for side in sides:
            side.kill()
    # In a slow spell of the machine a turn may end before a step does.
    ratios = [fmean(b) / fmean(a) for a, b in zip(own_s, bare_s, strict=False) if a and b]
    print(" ".join(f"{ratio:.3f}" for ratio in ratios), file=sys.stderr)
    interval = median_interval(ratios)
    shown = f"{interval.low:.3f} .. {interval.high:.3f}, " if interval else ""
    shown += confidence(len(ratios), interval)
    print(f"{work.name:27s} ratio {median(ratios):.3f} ({shown}), start-up {startup_s:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--only", help="one comparison: " + ", ".join(work.name for work in WORKS))
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank stands for a device
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`: a stopped process would stay
    for work in WORKS:
        if arguments.only not in (None, work.name):
            continue
        if work.framework == "horovod" and not Path(HOROVODRUN[0]).exists():
            print(f"{work.name:27s} not compared: build Horovod first (make horovod)")
        else:
            with tempfile.TemporaryDirectory() as folder:
                compare(work, arguments.pairs, Path(folder))


if __name__ == "__main__":
    main()
