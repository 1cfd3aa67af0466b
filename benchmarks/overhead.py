"""What the harness costs: the same work through ddlbench and through a script of benchmarks/bare/, turn by turn.

python -m benchmarks.overhead [--pairs 16] [--only ddp-resnet50 heap=freed-single-resnet50]

Both sides have the same settings: threads, heap of the C library, GPT-2's cache and activation, DDP's buffers and
buckets. A pair's ratio is steps a second of ddlbench over steps a second of the bare script, in two turns that follow
each other (benchmarks/turns.py). Printed: the median over pairs, its distribution-free 95 % interval, and the number of
lost pairs. The aim is 0.98 or better.

The second part says what each of these settings brings: the ratio of the bare script with the setting as in ddlbench to
the same script with the library's default.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pairs import ratio_text, show
from benchmarks.turns import Pairs, Program, take_turns

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
STEPS_A_TURN = 5
LR = 1e-9  # as in benchmarks/bare/work.py
ENDLESS = 10**6  # steps: the program is ended after its last turn
# A MALLOC_ variable makes ddlbench leave the heap as it is. glibc knows none of this name, so nothing else changes.
FREED = {"MALLOC_UNCHANGED": "1"}


@dataclass(frozen=True)
class Work:
    """One comparison: batch is samples a rank; size is the images' side or the sequence's length.

    script: of benchmarks/bare/, where the framework has more than one
    setting: of that script: what it brings is measured, and ddlbench does not run
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
        """What starts a module in all ranks."""
        return [sys.executable, "-m"] if self.framework == "single" else [*TORCHRUN, "-m"]

    def bare(self, *settings: str) -> list[str]:
        """The script that does the same with the library alone."""
        script = self.script or SCRIPTS.get(self.framework, self.framework)
        start = HOROVODRUN if script == "horovod" else self.start()
        return [*start, f"benchmarks.bare.{script}", self.model, str(self.batch), str(self.size), *settings]

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
    Work("single", "resnet50", freed=True),
    Work("single", "resnet50", setting="heap=freed"),
    Work("single", "gpt2_small", setting="heap=freed"),
    Work("single", "gpt2_small", setting="cache=on"),
    Work("single", "gpt2_small", setting="activation=eager"),
    Work("ddp", "resnet50", setting="buffers=broadcast"),
    Work("ddp", "resnet50", setting="buckets=copies"),
]


def start_both(work: Work, folder: Path) -> Iterator[Program]:
    """The two programs, each warm and stopped before the next one starts."""
    environment = os.environ | (FREED if work.freed else {})
    heap = ["heap=freed"] if work.freed else []
    own = work.bare() if work.setting else work.ddlbench(folder / "records")
    other = work.bare(work.setting) if work.setting else work.bare(*heap)
    for name, command in (("own", own), ("other", other)):
        yield (program := Program(folder / name, command, environment))
        program.wait_until_warm()


def measure(work: Work, pairs: int, folder: Path) -> Pairs:
    programs: list[Program] = []
    try:
        for program in start_both(work, folder):
            programs.append(program)
        first, second = programs
        seconds = STEPS_A_TURN * max(program.step_s() for program in programs)
        return take_turns((first, second), pairs, seconds)
    finally:
        for program in programs:
            program.kill()


def startup_s(records: Path) -> float:
    (path,) = records.glob("*/attempt-1/run.json")
    return json.loads(path.read_text())["summary"]["startup_s"]


def compare(work: Work, pairs: int, folder: Path) -> None:
    found = measure(work, pairs, folder)
    started = "" if work.setting else f", start-up {startup_s(folder / 'records'):.1f} s"
    show(work.name, f"ratio {ratio_text(found.ratios())}, {found.remark()}{started}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=[work.name for work in WORKS], help="some comparisons")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank stands for a device
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`: a stopped process would stay
    for work in WORKS:
        if arguments.only and work.name not in arguments.only:
            continue
        if work.framework == "horovod" and not Path(HOROVODRUN[0]).exists():
            show(work.name, "not compared: build Horovod first (make horovod)")
        else:
            with tempfile.TemporaryDirectory() as folder:
                compare(work, arguments.pairs, Path(folder))


if __name__ == "__main__":
    main()
