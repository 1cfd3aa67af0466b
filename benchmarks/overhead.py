"""What the harness costs: the same work through ddlbench and through a script of benchmarks/bare/, turn by turn.

python -m benchmarks.overhead [--starts 8] [--pairs 4] [--only ddp-resnet50 heap=freed-single-resnet50]

Both sides have the same settings: threads, heap of the C library, GPT-2's cache and activation, DDP's buffers and
buckets. A pair's ratio is steps a second of ddlbench over steps a second of the bare script, in two turns that follow
each other (benchmarks/turns.py). Two starts of the same program can differ by 4 % for as long as they live (where their
memory lies), so one start says nothing of a cost that small: both sides are started anew --starts times. The side that
is started second can be faster (by 4 % where a script of Horovod's ran beside itself), so every second start has the
sides in the other order: --starts is even. A start counts by the median of its pairs. Printed: the median over starts,
its distribution-free interval, and how many pairs were lost. The aim is 0.98 or better. `same` compares a bare script
with itself: its interval is what this machine can tell apart.

The last part says what each of these settings brings: the ratio of the bare script with the setting as in ddlbench to
the same script with the library's default.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.turns import Pairs, Program, ratio_text, show, take_turns

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable, "-m"]
LAUNCHERS = {"single": [sys.executable, "-m"], "horovod": HOROVODRUN}
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
SAME = "same"
STEPS_A_TURN = 5
LR = 1e-9  # as in benchmarks/bare/work.py
ENDLESS = 10**6  # steps: the program is ended after its last turn
# A MALLOC_ variable makes ddlbench leave the heap as it is. glibc knows none of this name, so nothing else changes.
FREED = {"MALLOC_UNCHANGED": "1"}


@dataclass(frozen=True)
class Work:
    """One comparison: batch is samples a rank; size is the images' side or the sequence's length.

    script: of benchmarks/bare/, where the framework has more than one
    setting: of that script: what it brings is measured, and ddlbench does not run; "same": none, the script with itself
    freed: both sides return freed memory, as the C library does by itself
    """

    framework: str
    model: str
    batch: int = 2
    size: int = 64
    script: str | None = None
    setting: str | None = None
    freed: bool = False

    @property
    def name(self) -> str:
        label = "freed" if self.freed else None
        return "-".join(filter(None, (self.setting, self.framework, self.model, self.script, label)))

    def start(self) -> list[str]:
        """What starts a module in all ranks, each on a core of its own. The launcher is the same on both sides: its own
        process computes, too."""
        launcher = LAUNCHERS.get(self.framework, TORCHRUN)
        return [*launcher, "benchmarks.cores"]

    def bare(self, *settings: str) -> list[str]:
        """The script that does the same with the library alone."""
        script = self.script or SCRIPTS.get(self.framework, self.framework)
        return [*self.start(), f"benchmarks.bare.{script}", self.model, str(self.batch), str(self.size), *settings]

    def ddlbench(self, folder: Path) -> list[str]:
        return [
            *self.start(), "benchmarks.harness", f"+framework={self.framework}", f"+model={self.model}",
            *SHAPES[self.model],
            f"model.{'image_size' if self.model == 'resnet50' else 'seq_len'}={self.size}",
            "loader=synthetic", f"loader.train_samples={ENDLESS * self.batch * 2}", f"train.batch_per_gpu={self.batch}",
            "train.epochs=1", "train.warmup_steps=0", f"train.steps={ENDLESS}", "train.validate=false",
            f"recipe.optimizer.lr={LR}", "recipe.optimizer.lr_base_batch=null", "recipe.schedule.name=constant",
            "progress=false", f"results_dir={folder}",
        ]  # fmt: skip


WORKS = [
    Work("single", "resnet50"),
    Work("ddp", "resnet50"),
    Work("horovod", "resnet50"),
    Work("single", "gpt2_small"),
    Work("horovod", "gpt2_small"),
    Work("ddp", "gpt2_small"),
    Work("zero1", "gpt2_small"),
    Work("fsdp", "gpt2_small"),
    Work("tensor", "gpt2_small"),
    Work("tensor", "gpt2_small", script="megatron"),
    Work("gpipe", "gpt2_small", batch=4),
    Work("single", "resnet50", setting=SAME),
    Work("ddp", "gpt2_small", setting=SAME),
    Work("horovod", "resnet50", setting=SAME),
    Work("single", "resnet50", freed=True),
    Work("single", "resnet50", setting="heap=freed"),
    Work("single", "gpt2_small", setting="heap=freed"),
    Work("single", "gpt2_small", setting="cache=on"),
    Work("single", "gpt2_small", setting="activation=eager"),
    Work("ddp", "resnet50", setting="buffers=broadcast"),
    Work("ddp", "resnet50", setting="buckets=copies"),
]


def commands(work: Work, folder: Path) -> tuple[list[str], list[str]]:
    """The command of the side that is judged, and of the side that it is compared with."""
    if work.setting:
        return work.bare(), work.bare(*[work.setting] * (work.setting != SAME))
    return work.ddlbench(folder / "records"), work.bare(*["heap=freed"] * work.freed)


def measure(work: Work, pairs: int, folder: Path, swapped: bool) -> Pairs:
    """One start of both sides, at the same time; the judged side is the first of each pair.

    swapped: the other side is started first, and has the first turn of the first pair
    """
    environment = os.environ | (FREED if work.freed else {})
    sides = list(zip(("own", "other"), commands(work, folder), strict=True))
    programs: list[Program] = []
    try:
        for name, command in reversed(sides) if swapped else sides:
            programs.append(Program(folder / name, command, environment))
        for program in programs:
            program.wait_until_warm()
        seconds = STEPS_A_TURN * max(program.step_s() for program in programs)
        first, second = programs
        result = take_turns((first, second), pairs, seconds)
        return result.swapped() if swapped else result
    finally:
        for program in programs:
            program.kill()


def compare(work: Work, starts: int, pairs: int) -> None:
    ratios: list[float] = []
    lost = 0
    for number in range(starts):
        with tempfile.TemporaryDirectory() as folder:
            result = measure(work, pairs, Path(folder), swapped=number % 2 == 1)
        ratios += [median(result.ratios())] if result.complete else []
        lost += len(result.lost)
    show(work.name, f"ratio {ratio_text(ratios)}, {lost} of {starts * pairs} pairs lost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=8, help="of both sides, each with its own memory")
    parser.add_argument("--pairs", type=int, default=4, help="of turns in one start")
    parser.add_argument("--only", nargs="+", choices=[work.name for work in WORKS], help="some comparisons")
    arguments = parser.parse_args()
    if arguments.starts % 2:
        parser.error(f"--starts {arguments.starts} is odd: half of the starts have the sides in the other order")
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank stands for a device
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`: a stopped process would stay
    for work in WORKS:
        if arguments.only and work.name not in arguments.only:
            continue
        if work.framework == "horovod" and not Path(HOROVODRUN[0]).exists():
            show(work.name, "not compared: build Horovod first (make horovod)")
        else:
            compare(work, arguments.starts, arguments.pairs)


if __name__ == "__main__":
    main()
