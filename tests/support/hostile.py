"""Records and folders that no run writes: a bad one must not prevent the report of the others."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddlbench.foreign import LARGEST_BYTES
from tests.support.records import edit_epochs, edited, write_run

NUMBERS = (True, -1, -0.5, 0, 1.5, 5e-324, 1e308, 2**63, -(2**63) - 1, 10**400, float("nan"), float("inf"))
TEXTS = (
    "", "NaN", "3", "$x_{$", "=1+1", "@SUM(A1)", "_hidden", "\x1b[31mred", "a\nb\r\tc", "\u202egnp", "\ud800",
    "<script>", "你好", "x" * 100_000, "tpu", "a|b", "%s {0}", "../..",
)  # fmt: skip
OTHERS = (None, [], {}, ["a", 1, None], {"a": {"b": [1]}}, [[[[]]]], {"name": "\x07"}, {"\ud800\x1b": 1})
VALUES = (*NUMBERS, *TEXTS, *OTHERS)

SECTIONS = (
    "status", "reason", "run_id", "attempt", "times", "config", "launch", "environment", "dataset", "ledger", "model",
    "summary", "framework", "loader", "spans", "staging",
)  # fmt: skip
NAMES = (
    "config.mode", "config.framework.name", "config.framework.bucket_cap_mb", "config.framework.dp",
    "config.model.name", "config.loader.name", "config.data.name", "config.recipe",
    "config.cluster", "config.train", "launch.device_type",
    "launch.hosts", "environment.torch", "environment.gpu_model", "environment.git_commit", "environment.git_dirty",
    "dataset.hash", "times.start",
)  # fmt: skip
# Each with the smallest and the largest value that it may have.
MEASURED = {
    "launch.world_size": (1, 1e6),
    "launch.nodes": (0, 1e12),
    "ledger.global_batch": (0, 1e12),
    "ledger.micro_batches": (0, 1e12),
    "model.flops_per_sample": (0, 1e24),
    "model.tokens_per_sample": (0, 1e12),
    "summary.epoch_time_s": (1e-6, 1e9),
    "summary.throughput_samples_per_s": (1e-9, 1e15),
    "summary.memory_host_peak_bytes": (0, 1e18),
    "summary.allocator_retries": (0, 1e12),
    "summary.val_top1": (0, 1),
    "summary.val_perplexity_token": (1, 1e30),
    "summary.mfu": (0, 1),
}
WHOLE = ("launch.", "ledger.", "model.tokens", "summary.memory", "summary.alloc")
EPOCH_FIELDS = {"epoch": (0, 1e9), "epoch_time_s": (1e-6, 1e9), "elapsed_s": (0, 1e9), "val_top1": (0, 1)}


def odd_record(results: Path, field: str, value: Any, number: int) -> Path:
    """A run that is like any other but for one value. Its seed keeps it apart from the good run."""
    folder = write_run(results, framework="odd", repeat=number, attempt=1 + number % 9, train={"seed": 1})
    *sections, key = field.split(".")
    with edited(folder) as place:
        for section in sections:
            place = place[section]
        place[key] = value
    return folder


def odd_epoch(results: Path, field: str, value: Any, number: int) -> Path:
    """A run of which one value in the second line of epochs.jsonl is odd."""
    folder = write_run(results, framework="odd", repeat=number, train={"seed": 1})
    edit_epochs(folder, {}, {field: value}, {})
    return folder


def fits(field: str, value: Any, ends: tuple[float, float]) -> bool:
    """Whether a value may be in a numeric column, by a rule of the test's own."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None or value in ([], {})
    whole = field.startswith(WHOLE) or field == "epoch"
    return ends[0] <= value <= ends[1] and (not whole or value == int(value))


def _content(content: bytes | str, file: str = "run.json") -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def _replaced(by: Callable[[Path], Any], file: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / file).unlink()
        by(folder / file)

    return make


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(LARGEST_BYTES + 1)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(here)


def _linked(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


KINDS: dict[str, Callable[[Path], Any]] = {
    "is not a regular file": os.mkfifo,
    "not a regular file": Path.mkdir,
    "a regular file": _socket,
    "regular file": _linked("/dev/zero"),
    "No such file": _linked("nowhere"),
    "Too many levels of symbolic links": _linked("run.json"),
    f"{LARGEST_BYTES + 1:,} bytes, more than the {LARGEST_BYTES:,}": _sparse,
    "Permission denied": lambda path: path.touch(mode=0),
}
# The warning about the folder, and how its files are damaged.
FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{f"run.json: {said}": (said, _replaced(by, "run.json")) for said, by in KINDS.items()},
    **{
        f"epochs.jsonl: {said}": (f"epochs.jsonl cannot be read ({'it ' if 'regular' in said else ''}", make)
        for said, by in KINDS.items()
        if not said.startswith("Too many")
        for make in [_replaced(by, "epochs.jsonl")]
    },
    "empty": ("run.json cannot be read (Expecting value", _content("")),
    "binary": ("can't decode byte", _content(bytes(range(256)) * 9)),
    "UTF-16": ("can't decode byte", _content("{}".encode("utf-16"))),
    "half": ("run.json cannot be read (", _content('{"schema_version": 1, "run_id"')),
    "a list": ("not a JSON object", _content("[1, 2]")),
    "deep": ("nested more than 50 levels deep", _content("[" * 100_000)),
    "deep and whole": ("nested more than 50", _content('{"a":' * 100 + "1" + "}" * 100)),
    "10,000 digits": ("run.json cannot be read (Exceeds the limit", _content('{"a": ' + "9" * 10_000 + "}")),
    "version true": ("schema_version True is refused", _content('{"schema_version": true}')),
    "version long": (
        "is refused, this ddlbench reads 1 and 2",
        _content(json.dumps({"schema_version": "9" * 10**6})),
    ),
    "no status": ("run.json has no status", _content('{"schema_version": 1}')),
    "status null": ("run.json has no status", _content('{"schema_version": 1, "status": null}')),
    "epochs binary": ("line(s) of epochs.jsonl cannot be read", _content(b"\xff\xfe\0\n\0" * 9, "epochs.jsonl")),
    "epochs deep": ("1 line(s) of epochs.jsonl cannot", _content('{"a":' * 10**5, "epochs.jsonl")),
    "epochs null": (
        "without the number of their epoch",
        _content('{"epoch": null, "val_top1": 0.5}\n', "epochs.jsonl"),
    ),
    "epochs of many lines": ("it has 200,001 lines, more than", _content("{}\n" * 200_001, "epochs.jsonl")),
    "epochs twice": (
        "1 line(s) of epochs.jsonl that repeat",
        _content('{"epoch": 0}\n{"epoch": 0}\n{"epoch": 1}\n{"epoch": 2}', "epochs.jsonl"),
    ),
}
FOLDERS = (
    os.fsdecode(b"attempt-\xff"), "attempt-²", "attempt-", "attempt-1.bak", "attempt-٣", "attempt-" + "9" * 200,
    "attempt-\x1b[2J", "attempt-a\nb", "attempt-$x", "attempt-\u202e1", "attempt- 1", "attempt--1", "attempt-1e9",
)  # fmt: skip


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A temporary folder and, for root too, a user whom permissions bind."""
    with tempfile.TemporaryDirectory() as name:
        folder, root = Path(name), os.geteuid() == 0
        folder.chmod(0o777)
        try:
            if root:
                os.seteuid(65534)
            yield folder
        finally:
            if root:
                os.seteuid(0)
