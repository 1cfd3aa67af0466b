"""A log of MLPerf Training: lines with `:::MLLOG {json}`. From its time stamps come the seconds of the run and of its
epochs. A log that contradicts itself is refused, never repaired."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ddlbench.foreign import Object, parse
from ddlbench.results.rows import group_by, section

TOKEN = b":::MLLOG "
TOLERANCE = 0.01  # of the seconds of a block and of its epochs
LATEST_MS = 10**13  # a time stamp of the year 2286
MOST_EPOCHS = 100_000


class Event(NamedTuple):
    """A line of a log. ms: its time stamp"""

    key: str
    ms: int
    value: Any
    metadata: Object


class Interval(NamedTuple):
    """From one event to another. number: of its first epoch; epochs: how many it has"""

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
        """The only event of a key. Several processes may log one value; the run has one time stamp of each end."""
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
        """The epochs in order, as lines of epochs.jsonl. Without events of epochs each has an equal part of its block.
        of_images: whether the accuracy is a share of right first guesses"""
        stated, blocks = self._intervals("epoch", "epoch_num"), self._intervals("block", "first_epoch_num")
        evaluations = self._intervals("eval", "epoch_num")
        epochs = list(stated)
        for block in blocks:
            trained = block.ms - sum(evaluation.ms for evaluation in evaluations if block.holds(evaluation))
            if not stated:
                ms = trained // block.epochs if block.epochs else 0
                if ms <= 0:
                    raise ValueError(f"broken time stamps: the block of epoch {block.number} trained for no time")
                epochs += [Interval(block.number + n, block.start, block.start + ms) for n in range(block.epochs)]
                continue
            of_epochs = sum(epoch.ms for epoch in stated if block.holds(epoch))
            if abs(trained - of_epochs) > TOLERANCE * trained:
                raise ValueError(
                    f"epochs and blocks disagree by more than 1 %: the block of epoch {block.number} trained for "
                    f"{trained / 1e3:.3f} s, its epochs for {of_epochs / 1e3:.3f} s"
                )
        if not epochs:
            raise ValueError("it has neither epochs nor blocks")
        after = {evaluation.number: evaluation.ms / 1e3 for evaluation in evaluations}
        reached = {_count(event, "epoch_num"): event.value for event in self.events.get("eval_accuracy", [])}
        lines, elapsed_s = list[Object](), 0.0
        for number, epoch in enumerate(epochs):
            validation_s, accuracy = after.get(epoch.number), reached.get(epoch.number)
            elapsed_s += epoch.ms / 1e3 + (validation_s or 0.0)
            line = {
                "epoch": number,
                "warmup": number == 0 and len(epochs) > 1,
                "epoch_time_s": epoch.ms / 1e3,
                "elapsed_s": round(elapsed_s, 3),
                "validation_time_s": validation_s,
                "val_top1": float(accuracy)
                if of_images and isinstance(accuracy, int | float) and 0 <= accuracy <= 1
                else None,
            }
            lines.append({key: value for key, value in line.items() if value is not None})
        return lines

    def _intervals(self, name: str, number: str) -> list[Interval]:
        """The pairs of NAME_start and NAME_stop, in order. number: of the metadata, which both share"""
        starts, stops = (
            group_by(self.events.get(f"{name}_{end}", []), lambda event: _count(event, number))
            for end in ("start", "stop")
        )
        if starts.keys() != stops.keys() or any(len(same) > 1 for same in (*starts.values(), *stops.values())):
            raise ValueError(f"{name}_start and {name}_stop are no pairs")
        intervals: list[Interval] = []
        for epoch, (start,) in starts.items():
            epochs = _count(start, "epoch_count") if "epoch_count" in start.metadata else 1
            intervals.append(Interval(epoch, start.ms, stops[epoch][0].ms, epochs))
        intervals.sort(key=lambda interval: interval.number)
        ends = [self.run.start, *(ms for one in intervals for ms in (one.start, one.stop)), self.run.stop]
        if ends != sorted(ends) or (name != "eval" and any(interval.ms == 0 for interval in intervals)):
            raise ValueError(f"broken time stamps of {name}s")
        return intervals


def _events(content: bytes) -> Iterator[Event]:
    """Other output may stand before the token in a line, because processes write to one file."""
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


def _count(event: Event, name: str) -> int:
    """A whole number of the metadata, from 0."""
    value = event.metadata.get(name)
    if type(value) is not int or not 0 <= value <= MOST_EPOCHS:
        raise ValueError(f"{event.key} has {name} = {value!r}")
    return value
