"""What a report of a large campaign costs: `python -m ddlbench.report` on made-up runs, phase by phase.

python -m benchmarks.reporting [--runs 10000] [--epochs 10] [--folder DIR]

The runs are those of a study over frameworks, models, GPU counts, loaders, precisions and repeats, in the random order
of a sweep, with records as the harness writes them. One in 50 fails. Every number is drawn at random.

Printed for each phase: seconds by the clock, CPU seconds, and the most memory that was resident so far; then what the
report holds. The aim for 10,000 runs of 10 epochs is 60 s and 2 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count, islice, product
from pathlib import Path
from typing import Any

from ddlbench.measure.formulas.summary_formulas import from_epochs

PHASES = ("read_all", "make_tables", "make_figures", "write_documents", "render")
ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("ddp", "horovod", "fsdp", "zero1", "zero2", "zero3", "tensor", "gpipe", "1f1b", "pipedream", "hybrid")
IMAGES, TEXT = ("resnet50", "resnet152", "vgg16"), ("gpt2_small", "gpt2_medium")
GPUS = (4, 8, 16, 32, 64, 128, 256)
PRECISIONS = ("fp32", "bf16")
LOADERS = ("native", "dali")
REPEATS = 6
FAIL_EVERY = 50
STARTED = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Made:
    """One run. seed: of its repeats, which also is the seed of training"""

    framework: str
    model: str
    gpus: int
    loader: str
    precision: str
    repeat: int
    seed: int

    @property
    def run_id(self) -> str:
        parts = (self.framework, self.model, self.loader, f"{self.gpus}x", self.precision, self.seed, self.repeat)
        return "-".join(map(str, parts))

    @property
    def rate(self) -> float:
        """Samples a second: some loss at each doubling, one percent between repeats."""
        drawn = random.Random(self.run_id)
        rate_of_one = 50 + 7 * FRAMEWORKS.index(self.framework) if self.framework in FRAMEWORKS else 100
        return rate_of_one * self.gpus**0.9 * drawn.uniform(0.99, 1.01)


def every(repeats: int) -> Iterator[Made]:
    """Runs without end: the whole study with one seed, then with the next."""
    for seed in count():
        for model, precision in product((*IMAGES, *TEXT), PRECISIONS):
            for repeat in range(repeats):
                yield Made("single", model, 1, "native", precision, repeat, seed)
        for loader, precision, model, gpus, framework in product(
            LOADERS, PRECISIONS, (*IMAGES, *TEXT), GPUS, FRAMEWORKS
        ):
            if loader == "native" or model in IMAGES:
                for repeat in range(repeats):
                    yield Made(framework, model, gpus, loader, precision, repeat, seed)


def write_campaign(folder: Path, runs: int, epochs: int, template: Path | None = None, repeats: int = REPEATS) -> None:
    """The first `runs` of them, each of `epochs` epochs. template: the folder of an attempt whose record has the keys
    and the environment; None: one of results/example"""
    record, line = read_template(template or next(iter(sorted((ROOT / "results" / "example").glob("*/attempt-1")))))
    made = list(islice(every(repeats), runs))
    order = list(range(runs))
    random.Random(0).shuffle(order)
    for place, run in zip(order, made, strict=True):
        attempt = folder / run.run_id / "attempt-1"
        attempt.mkdir(parents=True)
        failed = place % FAIL_EVERY == 0
        content = record_of(run, record, place, epochs, failed)
        if not failed:
            lines = list(lines_of(run, line, epochs))
            content["summary"] |= summary_of(lines, content)
            (attempt / "epochs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (attempt / "run.json").write_text(json.dumps(content, indent=1))


def read_template(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """run.json, and a line of epochs.jsonl."""
    lines = (folder / "epochs.jsonl").read_text().splitlines()
    return json.loads((folder / "run.json").read_text()), json.loads(lines[-1])


def record_of(run: Made, template: dict[str, Any], place: int, epochs: int, failed: bool) -> dict[str, Any]:
    """place: of the run in the order of the campaign"""
    record = deepcopy(template)
    start = STARTED + timedelta(minutes=place)
    config, batch = record["config"], 32 * run.gpus
    config["framework"] = {"name": run.framework}
    config["model"] = {"name": run.model}
    config["loader"]["name"] = run.loader
    config["recipe"]["name"] = "adamw" if run.model in TEXT else "sgd"
    config["train"] |= {
        "epochs": epochs, "steps": None, "global_batch": None, "batch_per_gpu": 32, "precision": run.precision,
        "seed": run.seed, "repeat": run.repeat,
    }  # fmt: skip
    record |= {
        "run_id": run.run_id,
        "times": {"start": start.isoformat(), "end": (start + timedelta(hours=1)).isoformat()},
        "status": "oom" if failed else "ok",
        "reason": "CUDA out of memory" if failed else None,
    }
    record["launch"] |= {"world_size": run.gpus, "ranks_per_node": min(4, run.gpus), "nodes": -(-run.gpus // 4)}
    record["ledger"] |= {"global_batch": batch, "replica_batch": 32, "precision": run.precision, "seed": run.seed}
    record["model"] |= {"name": run.model, "changed": {}}
    record["summary"] |= {"epochs_done": epochs, "throughput_samples_per_s_per_gpu": run.rate / run.gpus}
    return record if not failed else {key: value for key, value in record.items() if key not in ("summary", "ledger")}


def summary_of(lines: list[dict[str, Any]], record: dict[str, Any]) -> dict[str, Any]:
    """The columns of the summary that follow from the lines; those that the record's summary has."""
    run = {"gpus": record["launch"]["world_size"], **record["model"], **record["summary"]}
    return {column: value for column, value in from_epochs(run, lines).items() if run.get(column) is not None}


def lines_of(run: Made, template: dict[str, Any], epochs: int) -> Iterator[dict[str, Any]]:
    """epochs.jsonl: every number of the template is drawn anew."""
    drawn, seconds = random.Random(run.run_id), 1e5 / run.rate
    for epoch in range(epochs):
        line = {
            name: value * drawn.uniform(0.9, 1) if type(value) is float else value for name, value in template.items()
        }
        learned = 1 - 0.97**epoch
        line |= {
            "epoch": epoch, "warmup": epoch == 0, "epoch_time_s": seconds, "elapsed_s": (epoch + 1) * seconds,
            "measured_samples": 100_000, "measured_time_s": seconds,
            "train_loss": 7 - 5 * learned, "val_loss": 7.1 - 5 * learned,
        }  # fmt: skip
        if run.model in TEXT:
            line |= {"val_top1": None, "val_top5": None, "val_perplexity_token": math.exp(7.1 - 5 * learned)}
        else:
            line |= {"val_top1": 0.8 * learned * drawn.uniform(0.95, 1), "val_top5": 0.9 * learned}
        yield line


def now() -> tuple[float, float]:
    """Seconds by the clock and of the CPU."""
    return time.perf_counter(), time.process_time()


def tell(name: str, began: tuple[float, float]) -> None:
    wall, cpu = (after - before for before, after in zip(began, now(), strict=True))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{name:16s} {wall:7.1f} s {cpu:7.1f} s CPU, at most {resident / 2**20:.2f} GiB")


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*arguments: Any, **more: Any) -> Any:
        began = now()
        try:
            return function(*arguments, **more)
        finally:
            tell(name, began)

    return measured


def report(folder: Path) -> None:
    began = now()
    from ddlbench.report import __main__ as program

    tell("imports", began)
    for name in PHASES:
        setattr(program, name, timed(name, getattr(program, name)))
    program.Tables.write = timed("CSV files", program.Tables.write)
    with contextlib.redirect_stderr(io.StringIO()):
        assert program.main([str(folder)]) == 0
    tell("all", began)
    show_sizes(folder / "report")


def show_sizes(folder: Path) -> None:
    figures = list((folder / "figures").iterdir())
    print(f"page: {(folder / 'report.html').stat().st_size / 1e6:.1f} MB, {len(figures)} files of figures")
    for path in sorted((folder / "tables").glob("*.csv")):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--folder", type=Path, help="where the runs are made, or are already (default: a temporary one)"
    )
    parser.add_argument("--template", type=Path, help="folder of an attempt (default: one of results/example)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder: Path = given.folder or Path(made) / "results"
        if not folder.exists():
            write_campaign(folder, given.runs, given.epochs, given.template)
        report(folder)


if __name__ == "__main__":
    main()
