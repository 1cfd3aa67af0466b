"""A campaign of slow runs: a known cause is planted in each, and `--explain` has to name it; in healthy runs it has to
name none.

    python -m tests.faults.causes                     # all plantings, then all healthy runs
    python -m tests.faults.causes --only link         # one kind
    python -m tests.faults.causes --keep FOLDER       # keep the records; with --again they are explained again

The ranks are processes of this machine that are connected by gloo, in a network namespace of their own, in which a slow
link limits the rate of the loopback interface. Needs root and tc(8), or the kind `link` is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from ddlbench.errors import RunError
from ddlbench.report.explain import NO_CAUSE, Explanation, explain
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.support.faults import end, run_planted, variables
from tests.support.ranks import Forked

NAMES = {  # how the explanation has to begin
    "input": "input",
    "slow rank": "slow rank 1",
    "buckets": "exposed communication",
    "link": "exposed communication",
    "bubble": "bubble",
    "host": "host and launch",
    "healthy": NO_CAUSE,
}
TEXT = (
    "+model=gpt2_small", "model.n_layer=2", "model.n_embd=128", "model.n_head=2", "model.vocab_size=2048",
    "model.seq_len=64", "train.global_batch=8",
)  # fmt: skip
DEEP = (  # 292 small parameters: an all-reduce for each takes about as long as the computing
    "+model=gpt2_small", "model.n_layer=24", "model.n_embd=16", "model.n_head=2", "model.vocab_size=2048",
    "model.seq_len=32", "train.global_batch=8",
)  # fmt: skip
IMAGES = (
    "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32",
    "train.global_batch=8",
)  # fmt: skip
DECODED = (*IMAGES[:-1], "train.global_batch=32")
SYNTHETIC = (*IMAGES, "loader=synthetic")
PASSES = (  # a pass takes longer with more samples: micro batches of two do not cost more than they hide
    "+model=gpt2_small", "model.n_layer=6", "model.n_embd=96", "model.n_head=2", "model.vocab_size=2048",
    "model.seq_len=64", "train.global_batch=32",
)  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
ALWAYS = (
    "train.steps=16", "train.epochs=2", "train.validate=false", "progress=false", "profile=true", "profile_steps=12",
    "train.timeout_s=200",
)  # fmt: skip
REPEATS = 3  # of each run that the others are compared with: they show the spread of this machine


@dataclass(frozen=True)
class Trial:
    """kind: of NAMES; words: of the command; planted: words of tests/support/planted.py; paused: milliseconds of ten
    in which rank 1 is stopped; rate: of the link, as tc has it"""

    kind: str
    ranks: int
    words: tuple[str, ...]
    planted: tuple[str, ...] = ()
    paused: int = 0
    rate: str = ""
    seed: int = 0

    def __str__(self) -> str:
        model = "resnet50" if IMAGES[0] in self.words else "deep gpt2" if DEEP[1] in self.words else "gpt2"
        changed = [word for word in self.words if word not in (*TEXT, *DEEP, *IMAGES, *PASSES)]
        faults = [*changed, *self.planted, f"rank 1 stopped {self.paused}0 %" if self.paused else "", self.rate]
        return f"{self.kind}: {model} x {self.ranks} " + " ".join(filter(None, faults))


def layouts() -> list[Trial]:
    """What the trials run: one device, and each framework without a fault."""
    single = [Trial("reference", 1, ("+framework=single", *model)) for model in (TEXT, SYNTHETIC)]
    ddp = [Trial("reference", 2, ("+framework=ddp", *model)) for model in (TEXT, SYNTHETIC)]
    others = [Trial("reference", 2, (f"+framework={name}", *TEXT)) for name in ("fsdp", "gpipe")]
    deep = [Trial("reference", ranks, (f"+framework={name}", *DEEP)) for ranks, name in ((1, "single"), (2, "ddp"))]
    pipelines = [Trial("reference", 2, (f"+framework={name}", *PASSES, "train.micro_batch=2")) for name in SCHEDULES]
    return [*single, *ddp, *others, *deep, Trial("reference", 1, ("+framework=single", *PASSES)), *pipelines]


def plantings() -> list[Trial]:
    """Forty."""
    ddp, fsdp, images = ("+framework=ddp", *TEXT), ("+framework=fsdp", *TEXT), ("+framework=ddp", *SYNTHETIC)
    deep = ("+framework=ddp", *DEEP)

    def busy(how: str, seconds: float) -> tuple[str, ...]:
        return f"framework.how={how}", "framework.on=1", f"framework.after_s={seconds}"

    return [
        *(Trial("input", 2, words, ("data=SlowDisk",)) for words in (ddp, fsdp, ("+framework=gpipe", *TEXT))),
        *(Trial("input", 1, ("+framework=single", *TEXT, f"loader.workers={n}"), ("data=SlowDisk",)) for n in (1, 2)),
        Trial("input", 1, ("+framework=single", *DECODED, "loader.workers=0")),
        *(Trial("input", 2, (f"+framework={name}", *DECODED, "loader.workers=0")) for name in ("ddp", "fsdp")),
        *(Trial("slow rank", 2, words, paused=9) for words in (ddp, fsdp, images)),
        *(Trial("slow rank", 2, words, busy("busy", 0.1)) for words in (ddp, fsdp, images)),
        Trial("slow rank", 2, ddp, busy("busy", 0.2)),
        *(Trial("buckets", 2, (*deep, f"framework.bucket_cap_mb={cap}")) for cap in (1e-5, 2e-5, 5e-5, 1e-4)),
        *(
            Trial("buckets", 2, (*deep, f"framework.bucket_cap_mb={cap}", "framework.gradient_as_bucket_view=false"))
            for cap in (1e-5, 5e-5, 1e-4)
        ),
        *(Trial("link", 2, words, rate=rate) for words in (ddp, fsdp, images) for rate in ("100mbit", "200mbit")),
        *(
            Trial("bubble", 2, (f"+framework={name}", *PASSES, f"train.micro_batch={size}"))
            for name, size in (("gpipe", 32), ("gpipe", 16), ("1f1b", 16), ("zero_bubble", 16))
        ),
        *(  # no reference has this batch
            Trial("bubble", 2, ("+framework=gpipe", *PASSES[:-1], f"train.global_batch={n}", f"train.micro_batch={n}"))
            for n in (8, 16)
        ),
        *(Trial("host", 2, words, busy("host", 0.1)) for words in (ddp, fsdp, images)),
        *(Trial("host", 2, words, busy("host", 0.2)) for words in (ddp, fsdp)),
        Trial("host", 2, images, busy("host", 0.05)),
    ]


def healthy() -> list[Trial]:
    """Twenty."""
    return [replace(trial, kind="healthy", seed=seed) for seed in range(REPEATS, 5) for trial in layouts()][:20]


def run(trial: Trial, folder: Path) -> str:
    """Run the trial below `folder`; why it has no record, "" where it has one."""
    folder.mkdir(parents=True)
    words = [*trial.words, *ALWAYS, f"results_dir={folder}", f"train.repeat={trial.seed}"]
    with limited(trial.rate):
        ranks = [
            Forked(run_planted, ["planted", *trial.planted, "--", *words], **own, OMP_NUM_THREADS="1")
            for own in variables(trial.ranks)
        ]
        with paused(ranks[-1].pid, trial.paused, folder):
            codes, said = end(ranks)
    return "" if codes == [0] * trial.ranks else f"exit codes {codes}:\n" + "\n".join(said)


@contextmanager
def limited(rate: str) -> Generator[None]:
    """The loopback interface of this namespace has no higher rate."""
    if not rate:
        yield
        return
    limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]  # a packet has up to 64 KiB
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *limit], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


@contextmanager
def paused(pid: int, tenths: int, folder: Path) -> Generator[None]:
    """From its first epoch on, the process is stopped for so many tenths of the time, 5 ms each."""
    ended = Event()

    def pause() -> None:
        with suppress(ProcessLookupError):  # it has ended
            while not ended.wait(0.005 * (10 - tenths)):
                if list(folder.glob("*/*/epochs.jsonl")):
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(0.005 * tenths)
                    os.kill(pid, signal.SIGCONT)

    thread = Thread(target=pause)
    if tenths:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if tenths:
            thread.join()


def explained(folder: Path, beside: Path) -> Explanation:
    """The explanation of the run below `folder`, compared with the reference runs below `beside`."""
    records = read_all([beside, folder])
    (path,) = folder.glob("*/attempt-*")
    return explain(make_tables(records), records, str(path))


def campaign(kept: Path, only: str | None, again: bool, count: int | None) -> int:
    """Print a line for each trial; the number of wrong ones."""
    beside = kept / "references"
    repeats = [replace(trial, seed=seed) for seed in range(REPEATS) for trial in layouts()]
    for number, trial in enumerate(repeats):
        if not (beside / str(number)).exists() and (wrong := run(trial, beside / str(number))):
            raise SystemExit(f"{trial}: {wrong}")
    numbered = enumerate([*plantings(), *healthy()])
    trials = [(number, trial) for number, trial in numbered if only in (None, trial.kind)][:count]
    right = {trial.kind: [0, 0] for _, trial in trials}
    for number, trial in trials:
        folder = kept / f"{trial.kind.replace(' ', '-')}-{number}"
        if not again:
            shutil.rmtree(folder, ignore_errors=True)
        wrong = "" if folder.exists() else run(trial, folder)
        explanation = None
        if not wrong:
            try:
                explanation = explained(folder, beside)
            except RunError as error:
                wrong = str(error)
        cause = explanation.cause if explanation else wrong
        good = cause.startswith(NAMES[trial.kind])
        right[trial.kind][0] += good
        right[trial.kind][1] += 1
        print(f"{'right' if good else 'WRONG'}; {trial}; named: {cause}", flush=True)
        if explanation and not good:
            print(*explanation.lines(), sep="\n", flush=True)
    for kind, (good, total) in right.items():
        print(f"{kind}: {good} of {total}")
    return sum(total - good for good, total in right.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NAMES, help="the trials of this kind alone")
    parser.add_argument("--count", type=int, help="at most so many trials")
    parser.add_argument("--keep", type=Path, help="folder in which the records are kept")
    parser.add_argument("--again", action="store_true", help="explain the runs that the folder has again")
    given = parser.parse_args()
    if os.getuid() == 0 and shutil.which("tc") and not os.environ.get("IN_NAMESPACE"):
        script = f'ip link set lo up && exec {sys.executable} -m tests.faults.causes "$@"'
        os.environ["IN_NAMESPACE"] = "1"
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", script, "sh", *sys.argv[1:]])
    with TemporaryDirectory() as folder:
        return campaign(given.keep or Path(folder), given.only, given.again, given.count)


if __name__ == "__main__":
    sys.exit(main())
