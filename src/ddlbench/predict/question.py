"""The command line of python -m ddlbench.predict: its options, and the words for Hydra."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from ddlbench.command import given_path
from ddlbench.errors import UserError
from ddlbench.oracle.machine.collectives import ALGORITHMS
from ddlbench.oracle.machine.machine import CLUSTERS, described, load
from ddlbench.results.rows import FAMILIES

LARGEST_WORLD, MOST = 2**20, 5000
EXAMPLE = "gpus=[4,8,16] or gpus=[4,8,...,1024]"
OPTION_KEYS = ("cluster", "gpus", "+framework", "overlap")  # of words that are not for Hydra
DEGREES = ("dp", "tp", "pp", "sp")  # of a layout
SHARES = FAMILIES["tensor"] + FAMILIES["hybrid"]  # whose ranks share layers or images
GRADED = ("grade", "json", "algorithm", "words")  # what --grade uses, beside the words cluster= and overlap=
IN_TEXT = ("blocks", "check_volumes", "max_gpus", "max_memory_gib")  # add lines to the table; JSON has rows only


@dataclass(frozen=True)
class Question:
    """What to predict.

    words: those for Hydra, without the framework; framework: None: every one that can run
    model: its name in the words; "": the words have none
    machine: the name of a description or a file (oracle/machine/machine.py)
    batches: of --plan, samples an update; empty: as in the words
    """

    options: argparse.Namespace
    words: list[str]
    model: str
    machine: str
    gpus: list[int]
    framework: str | None
    overlap: bool | None
    batches: Sequence[int]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see python -m ddlbench.predict --help")


def parser() -> Parser:
    made = Parser(
        prog="python -m ddlbench.predict",
        usage="%(prog)s +model=NAME [+framework=NAME] cluster=NAME gpus=[4,8,...,1024] [key=value ...] [options]",
        description="Predicts step time and memory of every framework, without running it.",
        epilog="cluster= is the description of a machine's devices and links (--from takes runs with this label "
        "cluster.name first): a YAML file or one of " + "; ".join(described(load(name)) for name in CLUSTERS),
        allow_abbrev=False,
    )
    add = made.add_argument
    # fmt: off
    add("--json", action="store_true", help="print JSON; docs/oracle.md explains its keys")
    add("--from", dest="results", type=given_path, metavar="RESULTS",
        help="start from the runs in RESULTS: those on one device, and what those on several numbers of GPUs say of "
        "the links")
    add("--one-gpu-step-s", type=float, metavar="S", help="start from the seconds of one device's step")
    add("--one-gpu-batch", type=int, metavar="B",
        help="samples of that step (default: train.batch_per_gpu, or all of train.global_batch)")
    add("--calibrate", action="store_true",
        help="measure each block here, once for each device, model and batch; with --from or --one-gpu-step-s these "
        "seconds say how that step is spread over the blocks")
    add("--calibrate-network", action="store_true", help="measure collectives here between processes")
    add("--blocks", action="store_true", help="print FLOPs, bytes and arithmetic intensity of each block")
    add("--check-volumes", action="store_true", help="print the bytes of every kind of message in a step")
    add("--exact-memory", action="store_true",
        help="rehearse every job (up to minutes each) and take its memory from there, instead of from the formula")
    add("--algorithm", choices=ALGORITHMS, default="auto", help="of all-reduces (default: ring or tree)")
    add("--samples-per-epoch", type=int, metavar="N", help="training samples, for the seconds of an epoch")
    add("--loader-samples-per-s", type=float, metavar="R", help="what the loader of one rank gives")
    add("--max-gpus", type=int, metavar="N", help="the best with so many GPUs or fewer")
    add("--max-memory-gib", type=float, metavar="M", help="the best with so much memory or less")
    add("--grade", type=given_path, metavar="POINTS.csv|RESULTS",
        help="predict the published measurements of a CSV file, or the largest runs of a folder of records from the "
        "smaller ones, and print their errors (docs/oracle.md)")
    add("--figure", type=given_path, metavar="FILE", help="draw the predictions into FILE.png and FILE.svg")
    add("--timeline", type=given_path, metavar="FILE",
        help="write the steps as a Chrome trace, which ui.perfetto.dev opens")
    add("--chakra", type=given_path, metavar="FOLDER",
        help="write the steps as Chakra execution traces, one of each rank")
    add("--plan", action="store_true",
        help="the best framework, layout, micro batch and recomputation for each number of GPUs; "
        "train.global_batch=[64,128] takes several values; --figure FILE draws a map of the best over both")
    add("words", nargs="*", help=argparse.SUPPRESS)
    # fmt: on
    return made


def ask(arguments: Sequence[str]) -> Question:
    """Parse a command line. UserError for values without a meaning."""
    options, others = parser().parse_known_args(arguments)
    words = [*options.words, *others]
    for word in words:
        if word.startswith("-") or "=" not in word:
            raise UserError(f"{word} is no option and no key=value: see python -m ddlbench.predict --help")
    given = dict(word.split("=", 1) for word in words)
    overlap = given.get("overlap")
    for key in OPTION_KEYS:
        if sum(word.startswith(f"{key}=") for word in words) > 1:
            raise UserError(f"{key} is there twice: give it once (several numbers of GPUs: {EXAMPLE})")
    if overlap not in (None, "true", "false"):
        raise UserError(f"overlap={overlap} must be true or false")
    for_hydra = [word for word in words if word.split("=", 1)[0] not in OPTION_KEYS]
    several = [word for word in for_hydra if options.plan and word.startswith("train.global_batch=[")]
    question = Question(
        options,
        [word for word in for_hydra if word not in several],
        given.get("+model", ""),
        given.get("cluster", "local"),
        numbers(given["gpus"]) if "gpus" in given else [1, 2, 4],
        given.get("+framework"),
        overlap=None if overlap is None else overlap == "true",
        batches=numbers(several[-1].partition("=")[2], "train.global_batch") if several else (),
    )
    _check(question)
    return question


def _check(question: Question) -> None:
    """UserError for values of options that make no sense, and for options and words that exclude each other."""
    options = question.options
    for name, value in vars(options).items():
        if type(value) in (int, float) and not 0 < value < float("inf"):  # not a bool
            raise UserError(f"--{name.replace('_', '-')}={value} must be a number above 0")
    if options.one_gpu_batch is not None and options.one_gpu_step_s is None:
        raise UserError(f"--one-gpu-batch={options.one_gpu_batch} is of a measured step: give --one-gpu-step-s, too")
    if options.one_gpu_step_s is not None and options.results is not None:
        raise UserError(
            f"--from {options.results} and --one-gpu-step-s={options.one_gpu_step_s:g} both say what a step on one "
            "device takes: give one of them"
        )
    for name in IN_TEXT:
        if options.json and getattr(options, name):
            raise UserError(
                f"--{name.replace('_', '-')} adds lines to the table, and --json has rows only: leave one out"
            )
    if options.grade and not options.grade.is_dir() and options.algorithm != "auto":
        raise UserError(
            f"--algorithm={options.algorithm}: the points of {options.grade} have the all-reduces of their libraries: "
            "leave it out"
        )
    if options.grade:
        given = ["from" if name == "results" else name for name, value in vars(options).items() if value]
        useless = [f"--{name.replace('_', '-')}" for name in given if name not in GRADED]
        useless += [*question.words, *([f"+framework={question.framework}"] if question.framework else [])]
        if useless:
            raise UserError(f"--grade predicts what was measured, and nothing else: leave {', '.join(useless)} out")
    if not options.plan:
        return
    for name in ("blocks", "timeline", "chakra", "check_volumes", "max_gpus", "calibrate_network", "exact_memory"):
        if getattr(options, name):
            raise UserError(f"--plan ranks many layouts: leave --{name.replace('_', '-')} out, and predict one of them")
    if question.batches and options.one_gpu_step_s is not None and options.one_gpu_batch is None:
        raise UserError("--one-gpu-step-s with several train.global_batch: give its samples with --one-gpu-batch")
    for word in question.words:
        if word.partition("=")[0].lstrip("+") in [f"framework.{degree}" for degree in DEGREES]:
            raise UserError(f"{word}: --plan chooses the layout: leave it out, or predict it without --plan")
        if question.batches and word.startswith("train.batch_per_gpu="):
            raise UserError(f"{word} and several train.global_batch both set the batch: give one of them")


def numbers(text: str, key: str = "gpus") -> list[int]:
    """GPU counts: 8, [4,8,16] or [4,8,...,1024], which continues with the same factor, else with the same step. key:
    its name in an error"""

    def number(entry: str) -> int:
        if not entry.isascii() or not entry.isdigit() or not 1 <= int(entry) <= LARGEST_WORLD:
            raise UserError(f"{key}={text} must be numbers from 1 to {LARGEST_WORLD}: {EXAMPLE}")
        return int(entry)

    entries = [entry.strip() for entry in re.sub(r"^\[|\]$", "", text.strip()).split(",")]
    counts: list[int] = []
    for index, entry in enumerate(entries):
        if entry != "...":
            counts.append(number(entry))
            continue
        last = number(entries[index + 1]) if index + 1 < len(entries) else 0
        if len(counts) < 2 or not counts[-2] < counts[-1] < last:
            raise UserError(f"{key}={text}: two ascending numbers before ... and a larger one after it: {EXAMPLE}")
        first, second = counts[-2:]
        factor, rest = divmod(second, first)
        while (value := counts[-1] + second - first if rest else counts[-1] * factor) < last:
            counts.append(value)
    if len(counts) > MOST:
        raise UserError(f"{key}= gives {len(counts)} numbers: ask for {MOST} at most at a time")
    return list(dict.fromkeys(counts))
