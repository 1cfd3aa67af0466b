"""Folders of MLPerf Training results: result_0.txt and its repeats, with the description of the system."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from ddlbench.errors import UserError
from ddlbench.foreign import Object, parse, read_bytes
from ddlbench.results.reading.attempts import reason_of
from ddlbench.results.reading.mllog import Log
from ddlbench.results.reading.published import Facts, gpu_family
from ddlbench.results.rows import group_by
from ddlbench.texts import shortened

LOG = re.compile(r"result_[0-9]{1,4}\.txt")
MODELS = {"resnet": "ResNet-50 v1.5"}  # benchmarks, by the name that other sources give their model
BY_EPOCH = ("resnet", "ssd", "retinanet", "maskrcnn", "unet3d", "rnnt")  # those whose epoch has all training samples
LONGEST = 200  # letters of a text of a system's description
NOT_STATED = ("", "N/A")


def read_results(place: Path, source: str | None, url: str, strategy: str) -> tuple[list[Facts], list[str]]:
    """The runs of all folders of results at or below a folder, and a line for each log that cannot be used. UserError
    where there is no log.

    source: the publication; None: named after the year and the submitter
    url:    of the folder that is given; strategy: what the logs do not state themselves
    """
    logs = sorted(path for path in place.rglob("result_*.txt") if LOG.fullmatch(path.name))
    if not logs:
        raise UserError(f"{place} has no result_0.txt: give a folder of MLPerf Training results")
    runs, left_out = list[Facts](), list[str]()
    for folder, same in group_by(logs, lambda path: path.parent).items():
        below = "/".join([url.rstrip("/"), *folder.relative_to(place).parts])
        for log in same:
            try:
                runs.append(_facts(log, system_of(folder), source, below, strategy))
            except (OSError, ValueError) as error:
                left_out.append(f"{log}: {reason_of(error)}")
    return runs, left_out


def system_of(folder: Path) -> Object:
    """The description of a folder's system: beside the logs, or where a submission has it, ORG/systems/SYSTEM.json for
    ORG/results/SYSTEM/BENCHMARK. UserError without one."""
    place = folder.absolute()
    submitted = place.parents[min(2, len(place.parents) - 1)] / "systems" / f"{place.parent.name}.json"
    for path in (folder / "system.json", submitted):
        if path.is_file():
            return parse(read_bytes(path))
    raise UserError(f"no description of its system: put it beside the log as {folder / 'system.json'}")


def _facts(path: Path, system: Object, source: str | None, url: str, strategy: str) -> Facts:
    """One run. ValueError with the reason where log or system cannot be used."""
    log = Log(read_bytes(path))
    nodes, per_node = _count(system, "number_of_nodes"), _count(system, "accelerators_per_node")
    gpu = str(system.get("accelerator_model_name"))
    if gpu_family(gpu) is None:
        raise ValueError(f"unknown GPU {gpu!r}")
    benchmark, samples = str(log.one("submission_benchmark").value), log.count("train_samples")
    if benchmark not in BY_EPOCH:
        raise ValueError(f"an epoch of benchmark {benchmark!r} is no pass over its training samples")
    lines = log.epochs(of_images=benchmark == "resnet")
    measured = lines[1:] or lines
    times = [line["epoch_time_s"] for line in measured]
    evaluations = [line["validation_time_s"] for line in measured if "validation_time_s" in line]
    accuracies = [line["val_top1"] for line in lines if "val_top1" in line]
    year = datetime.fromtimestamp(log.run.start / 1e3, UTC).year
    seeds = [event.value for event in log.events.get("seed", [])]
    optimizers = [str(event.value) for event in log.events.get("opt_name", [])]
    return Facts(
        source=source or f"MLPerf Training {year}, {log.one('submission_org').value}",
        url=url,
        model=MODELS.get(benchmark, benchmark),
        strategy=strategy,
        library=_text(system, "framework"),
        gpu=gpu,
        gpus=nodes * per_node,
        nodes=nodes,
        sample_time_s=sum(times) / (samples * len(times)),
        global_batch=log.count("global_batch_size"),
        repeat=int(path.stem.removeprefix("result_")),
        recipe=optimizers[0] if optimizers else None,
        system=_text(system, "system_name"),
        seed=seeds[0] if seeds and type(seeds[0]) is int else None,
        train_samples=samples,
        environment={
            "cpu_model": _text(system, "host_processor_model_name"),
            "topology": _text(system, "accelerator_interconnect"),
        },
        summary={
            "epochs_done": len(lines),
            "epochs_measured": len(measured),
            "epoch_time_s": median(times),
            "epoch_time_min_s": min(times),
            "epoch_time_max_s": max(times),
            "validation_time_s": median(evaluations) if evaluations else None,
            "val_top1": accuracies[-1] if accuracies else None,
        },
        epochs=lines,
        more={
            "year": year,
            "time_to_train_s": log.run.ms / 1e3,
            "network": _text(system, "host_networking"),
            "system": {key: text for key in system if (text := _text(system, key))},
        },
    )


def _count(system: Object, key: str) -> int:
    """A whole number above 0, which descriptions write as a text."""
    text = str(system.get(key))
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) < 1:
        raise ValueError(f"{key} of its system is {text!r}: unknown number of GPUs")
    return int(text)


def _text(system: Object, key: str) -> str | None:
    """A short text of the description; None where it states none."""
    value = system.get(key)
    return shortened(value, LONGEST) if isinstance(value, str) and value.strip() not in NOT_STATED else None
