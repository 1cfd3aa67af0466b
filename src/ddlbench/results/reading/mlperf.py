"""Folders of MLPerf Training results: result_0.txt and its repeats, with the description of the system.

A log has lines with `:::MLLOG {json}`, whose time stamps give the seconds of the run and of its epochs. A log that
contradicts itself is refused, never repaired.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ddlbench.errors import UserError
from ddlbench.foreign import Object, parse, read_bytes, section
from ddlbench.measure.formulas.summary_formulas import from_epochs
from ddlbench.results.reading.attempts import reason_of
from ddlbench.results.reading.published import gpu_family
from ddlbench.results.rows import Row, group_by
from ddlbench.texts import shortened

TOKEN = b":::MLLOG "
TOLERANCE = 0.01  # of the seconds of a block and of its epochs
LATEST_MS = 10**13  # a time stamp of the year 2286
MOST_EPOCHS = 100_000
LOG = re.compile(r"result_[0-9]{1,4}\.txt")
MODELS = {"resnet": "ResNet-50 v1.5"}  # benchmarks, by the name that other sources give their model
BY_EPOCH = ("resnet", "ssd", "retinanet", "maskrcnn", "unet3d", "rnnt")  # their epochs have all training samples
LONGEST = 200  # letters of a text of a system's description
NOT_STATED = ("", "N/A")


def read_results(place: Path, source: str | None, url: str, strategy: str) -> tuple[list[Row], list[str]]:
    """The runs of all folders of results at or below a folder, and a line for each log that cannot be used. UserError
    where there is no log.

    source: the publication; None: named after the year and the submitter
    url:    the address of `place`; strategy: what the logs do not state themselves
    """
    logs = sorted(path for path in place.rglob("result_*.txt") if LOG.fullmatch(path.name))
    if not logs:
        raise UserError(f"{place} has no result_0.txt: give a folder of MLPerf Training results")
    runs, left_out = list[Row](), list[str]()
    for folder, same in group_by(logs, lambda path: path.parent).items():
        below = "/".join([url.rstrip("/"), *folder.relative_to(place).parts])
        for log in same:
            try:
                runs.append(_facts(log, system_of(folder), source, below, strategy))
            except (OSError, ValueError) as error:
                left_out.append(f"{log}: {reason_of(error)}")
    return runs, left_out


def system_of(folder: Path) -> Object:
    """The description of a folder's system: the file beside the logs, or, as in submissions, ORG/systems/SYSTEM.json
    for ORG/results/SYSTEM/BENCHMARK. UserError without one."""
    place = folder.absolute()
    submitted = place.parents[min(2, len(place.parents) - 1)] / "systems" / f"{place.parent.name}.json"
    for path in (folder / "system.json", submitted):
        if path.is_file():
            return parse(read_bytes(path))
    raise UserError(f"no description of its system: put it beside the log as {folder / 'system.json'}")


def _facts(path: Path, system: Object, source: str | None, url: str, strategy: str) -> Row:
    """One run, as `record_of` takes it. ValueError with the reason where log or system cannot be used."""
    log = Log(read_bytes(path))
    nodes, per_node = _count(system, "number_of_nodes"), _count(system, "accelerators_per_node")
    gpu = str(system.get("accelerator_model_name"))
    if gpu_family(gpu) is None:
        raise ValueError(f"unknown GPU {gpu!r}")
    benchmark, samples = str(log.one("submission_benchmark").value), log.count("train_samples")
    if benchmark not in BY_EPOCH:
        raise ValueError(f"an epoch of benchmark {benchmark!r} is no pass over its training samples")
    lines = log.epochs(of_images=benchmark == "resnet")
    times = [line["epoch_time_s"] for line in lines[1:] or lines]
    accuracies = [event.value for event in log.events.get("eval_accuracy", [])] if benchmark == "resnet" else []
    year = datetime.fromtimestamp(log.run.start / 1e3, UTC).year
    seeds = [event.value for event in log.events.get("seed", [])]
    optimizers = [str(event.value) for event in log.events.get("opt_name", [])]
    return {
        "source": source or f"MLPerf Training {year}, {log.one('submission_org').value}",
        "url": url,
        "model": MODELS.get(benchmark, benchmark),
        "strategy": strategy,
        "framework": _text(system, "framework"),
        "gpu_type": gpu,
        "gpus": nodes * per_node,
        "nodes": nodes,
        "sample_time_s": sum(times) / (samples * len(times)),
        "global_batch": log.count("global_batch_size"),
        "repeat": int(path.stem.removeprefix("result_")),
        "recipe": optimizers[0] if optimizers else None,
        "system": _text(system, "system_name"),
        "seed": seeds[0] if seeds and type(seeds[0]) is int else None,
        "train_samples": samples,
        "environment": {
            "cpu_model": _text(system, "host_processor_model_name"),
            "topology": _text(system, "accelerator_interconnect"),
        },
        "summary": {
            "epochs_done": len(lines),
            **from_epochs({}, lines),
            "val_top1": _share(accuracies[-1]) if accuracies else None,
        },
        "epochs": lines,
        "more": {
            "year": year,
            "time_to_train_s": log.run.ms / 1e3,
            "network": _text(system, "host_networking"),
            "system": {key: text for key in system if (text := _text(system, key))},
        },
    }


def _count(system: Object, key: str) -> int:
    """A whole number above 0, which descriptions write as a text."""
    text = str(system.get(key))
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) < 1:
        raise ValueError(f"{key} of its system is {text!r}: unknown number of GPUs")
    return int(text)


def _share(value: object) -> float | None:
    """A number between 0 and 1; None where it is something else."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else None


def _text(system: Object, key: str) -> str | None:
    """A short text of the description; None where it states none."""
    value = system.get(key)
    return shortened(value, LONGEST) if isinstance(value, str) and value.strip() not in NOT_STATED else None


class Event(NamedTuple):
    """A line of a log. ms: its time stamp"""

    key: str
    ms: int
    value: Any
    metadata: Object


class Interval(NamedTuple):
    """The time from one event to another. number: that of its first epoch; epochs: how many it has"""

    number: int
    start: int
    stop: int
    epochs: int = 1

    @property
    def ms(self) -> int:
        return self.stop - self.start

    def holds(self, other: Interval) -> bool:
        return self.start <= other.start and other.stop <= self.stop


class Log:
    """The events of a log. All methods raise ValueError with the reason where the log cannot be used."""

    def __init__(self, content: bytes) -> None:
        self.events: dict[str, list[Event]] = group_by(_events(content), lambda event: event.key)
        start, stop = self.one("run_start"), self.one("run_stop")
        self.run = Interval(0, start.ms, stop.ms)
        if self.run.ms <= 0:
            raise ValueError("broken time stamps: run_stop is not after run_start")
        if (status := stop.metadata.get("status")) != "success":
            raise ValueError(f"run_stop has the status {status!r}")

    def one(self, key: str) -> Event:
        """The only event of a key. Several processes may log the same value, but a run has one begin and one end."""
        events = self.events.get(key, [])
        if len({(repr(event.value), event.ms if key.startswith("run_") else 0) for event in events}) != 1:
            raise ValueError(f"{key} occurs {len(events)} times instead of once")
        return events[0]

    def count(self, key: str) -> int:
        """The value of the only event of a key, a whole number above 0."""
        value = self.one(key).value
        if type(value) is not int or value < 1:
            raise ValueError(f"{key} is {value!r}, no whole number above 0")
        return value

    def epochs(self, of_images: bool = True) -> list[Object]:
        """The epochs in order, as lines of epochs.jsonl, without the evaluations within them. Without events of epochs
        each has an equal part of its block.
        of_images: whether the accuracy is a share of right first guesses"""
        stated, blocks = self._intervals("epoch", "epoch_num"), self._intervals("block", "first_epoch_num")
        evaluations = self._intervals("eval", "epoch_num")

        def trained_ms(interval: Interval) -> int:
            return interval.ms - sum(evaluation.ms for evaluation in evaluations if interval.holds(evaluation))

        epochs = [(epoch.number, trained_ms(epoch)) for epoch in stated]
        for block in blocks:
            trained = trained_ms(block)
            if not stated:
                ms = trained // block.epochs if block.epochs else 0
                epochs += [(block.number + n, ms) for n in range(max(1, block.epochs))]
                continue
            of_epochs = sum(trained_ms(epoch) for epoch in stated if block.holds(epoch))
            if abs(trained - of_epochs) > TOLERANCE * trained:
                raise ValueError(
                    f"epochs and blocks disagree by more than 1 %: the block of epoch {block.number} trained for "
                    f"{trained / 1e3:.3f} s, its epochs for {of_epochs / 1e3:.3f} s"
                )
        if not epochs:
            raise ValueError("it has neither epochs nor blocks")
        if untrained := [number for number, ms in epochs if ms <= 0]:
            raise ValueError(f"broken time stamps: epoch {untrained[0]} trained for no time")
        after = {evaluation.number: evaluation.ms / 1e3 for evaluation in evaluations}
        reached = {_number(event, "epoch_num"): event.value for event in self.events.get("eval_accuracy", [])}
        lines, elapsed_s = list[Object](), 0.0
        for number, (of_log, ms) in enumerate(epochs):
            validation_s, accuracy = after.get(of_log), reached.get(of_log)
            elapsed_s += ms / 1e3 + (validation_s or 0.0)
            line = {
                "epoch": number,
                "warmup": number == 0 and len(epochs) > 1,
                "epoch_time_s": ms / 1e3,
                "elapsed_s": round(elapsed_s, 3),
                "validation_time_s": validation_s,
                "val_top1": _share(accuracy) if of_images else None,
            }
            lines.append({key: value for key, value in line.items() if value is not None})
        return lines

    def _intervals(self, name: str, number: str) -> list[Interval]:
        """The pairs of NAME_start and NAME_stop, in order. number: of the metadata, which both share"""
        starts, stops = (
            group_by(self.events.get(f"{name}_{end}", []), lambda event: _number(event, number))
            for end in ("start", "stop")
        )
        if starts.keys() != stops.keys() or any(len(same) > 1 for same in (*starts.values(), *stops.values())):
            raise ValueError(f"{name}_start and {name}_stop are no pairs")
        intervals: list[Interval] = []
        for epoch, (start,) in starts.items():
            epochs = _number(start, "epoch_count") if "epoch_count" in start.metadata else 1
            intervals.append(Interval(epoch, start.ms, stops[epoch][0].ms, epochs))
        intervals.sort(key=lambda interval: interval.number)
        ends = [self.run.start, *(ms for one in intervals for ms in (one.start, one.stop)), self.run.stop]
        if ends != sorted(ends) or (name != "eval" and any(interval.ms == 0 for interval in intervals)):
            raise ValueError(f"broken time stamps of {name}s")
        return intervals


def _events(content: bytes) -> Iterator[Event]:
    """The events of all lines. Other output may stand before the token, because several processes write the file."""
    for number, line in enumerate(content.split(b"\n"), 1):
        _, token, text = line.rpartition(TOKEN)
        if not token:
            continue
        try:
            event = parse(text)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON ({error})") from None
        key, ms = event.get("key"), event.get("time_ms")
        if not isinstance(key, str) or type(ms) is not int or not 0 < ms < LATEST_MS:
            raise ValueError(f"broken time stamps: line {number} has key = {key!r} and time_ms = {ms!r}")
        yield Event(key, ms, event.get("value"), section(event, "metadata"))


def _number(event: Event, name: str) -> int:
    """A whole number from 0 in the metadata."""
    value = event.metadata.get(name)
    if type(value) is not int or not 0 <= value <= MOST_EPOCHS:
        raise ValueError(f"{event.key} has {name} = {value!r}")
    return value
