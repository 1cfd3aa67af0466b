"""python -m ddlbench.predict: step time and memory of each framework on a cluster, without a run there."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter

import torch

from ddlbench.command import ended
from ddlbench.oracle.machine import machine as machines
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured import network
from ddlbench.oracle.measured.inputs import ROOFLINE, SLOWER, machine_of, proportions, require_gpu
from ddlbench.oracle.predictor import Prediction
from ddlbench.oracle.timing.computation import ANY, Computation
from ddlbench.predict import ranking, traces
from ddlbench.predict.question import Question, ask
from ddlbench.predict.rows import predictions
from ddlbench.rehearsal.rehearse import write_trace
from ddlbench.results.rows import group_by
from ddlbench.texts import GIB, aligned, counted


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. An error of the user is printed in one line."""
    if arguments is None:
        gc.disable()  # the process ends soon, and collections take a tenth of its time
    return ended("ddlbench.predict", lambda: answer(ask(sys.argv[1:] if arguments is None else arguments)))


def answer(question: Question) -> int:
    options = question.options
    if options.grade:
        from ddlbench.predict.grading import grade

        machine = replace(machine_of(question.machine, question.overlap), algorithm=options.algorithm)
        grade.show(grade.grade(options.grade, machine), options.json)
        return 0
    if options.calibrate_network:
        machine = machines.load(question.machine)
        require_gpu("--calibrate-network", machine)
        counts = [gpus for gpus in question.gpus if 1 < gpus <= (machine.devices_per_node or gpus)]
        print(f"collectives are in {network.calibrate(machine.device.type, counts)}", file=sys.stderr)
        if not question.model:  # nothing is to be predicted
            return 0
    machine = replace(machine_of(question.machine, question.overlap), algorithm=options.algorithm)
    results = None
    if options.results:
        from ddlbench.oracle.runs import Results  # pandas comes with it

        results = Results.read(options.results, str(torch.__version__))
    rows = ranking.ranked(predictions(question, machine, results))
    predicted = [row for row in rows if row.status == "ok"]
    memory = options.max_memory_gib * GIB if options.max_memory_gib else None
    if options.figure:
        from ddlbench.predict import figure  # matplotlib comes with it

        figure.draw(rows, options.figure, options.plan, memory, machine.device.type)
    if options.timeline:
        write_trace(options.timeline, chain.from_iterable(map(traces.timeline, predicted)))
    if options.chakra:
        for line in traces.write_chakra(options.chakra, predicted):
            print(line, file=sys.stderr)
    if options.json:
        print(json.dumps([row.printed() for row in rows], indent=1))
    elif options.plan:
        show_plans(rows, machine, memory)
    else:
        show(rows, question, machine, memory)
    return 0 if (ranking.fitting(rows, max_memory=memory) if options.plan else predicted) else 3


def show_plans(rows: Sequence[Prediction], machine: Machine, memory: float | None) -> None:
    """Print the best plans for each number of GPUs and batch, or why there is none; then the frameworks that have none,
    whose rows have no settings. memory: the limit in bytes; None: that of the device"""
    plans = [row for row in rows if row.settings]
    for tried in group_by(plans, lambda row: (row.gpus, row.settings.get("train.global_batch"))).values():
        samples, frameworks = tried[0].settings.get("train.global_batch"), len({row.framework for row in tried})
        batch = f", {samples} samples an update" if samples else ""
        which = f"{counted(frameworks, 'framework')} at {counted(tried[0].gpus, 'GPU')}"
        counts = f"{len(tried):,} plans of {which}{batch}"
        best = ranking.fitting(tried, max_memory=memory)
        possible = [row for row in tried if row.status == "ok"]
        if not possible:  # the most frequent reason
            (reason, count), *_ = Counter(row.reason for row in tried).most_common(1)
            print(f"{counts}: none is possible: {reason} ({count:,} of {len(tried):,})\n")
            continue
        if not best:
            least = min(possible, key=lambda row: row.memory_bytes or 0.0)
            needs = f"{ranking.command(least)}, with {(least.memory_bytes or 0.0) / GIB:.3g} GiB"
            print(f"{counts}: none is possible: the plan that needs the least memory is {needs}\n")
            continue
        shown = best[: ranking.SHOWN]
        _, *others = (row for row, *_ in group_by(best, lambda row: row.framework).values())
        print(heading(possible, machine))
        print(f"{counts}: {len(best):,} fit; the best {len(shown)}:\n\n{ranking.table(shown)}")
        if others:
            print(f"\nthe best of each other framework:\n\n{ranking.table(others)}")
        print("", *ranking.marks([*shown, *others]), *ranking.conclusion(best, ""), sep="\n")
        print(f"to run it: {ranking.command(best[0])}\n")
    for line in ranking.notes([row for row in rows if not row.settings]):
        print(line)


def heading(rows: Sequence[Prediction], machine: Machine) -> str:
    """The model, the cluster, and the source of the seconds of computing, as text."""
    config = rows[0].config
    assert config is not None
    train, device = config.train, machine.device
    batch = f"{train.samples_per_update(1)} samples per {'update' if train.global_batch else 'GPU and update'}"
    precision = "fp32 with TF32" if train.precision == "fp32" and train.tf32 else train.precision
    if precision == "fp32" and device.type == "cuda":
        needed = "train.precision=bf16 or train.tf32=true" if device.tf32_flops_per_s else "train.precision=fp16"
        precision += f" (without tensor cores, which need {needed})"
    basis = ", ".join(dict.fromkeys(row.basis or "" for row in rows))
    bound = f": each operation at the device's peak; {SLOWER}" if basis == ROOFLINE else ""
    return (
        f"{config.model.name}, {batch}, {config.recipe.optimizer.name}, {precision}\n"
        f"on {machines.described(machine)}\nseconds of computing from: {basis}{bound}\n"
    )


def show(rows: Sequence[Prediction], question: Question, machine: Machine, memory: float | None) -> None:
    """Print the predictions and the best of them. memory: as for `show_plans`"""
    predicted = [row for row in rows if row.status == "ok"]
    if predicted:
        print(heading(predicted, machine), ranking.table(rows), "", sep="\n")
        sizes = [{**(row.memory or {}), "memory": row.memory_bytes or 0.0} for row in predicted]
        lines = [
            (*ranking.which(row), *(f"{bytes_ / GIB:.3f}" for bytes_ in parts.values()))
            for row, parts in zip(predicted, sizes, strict=True)
        ]
        print("GiB of the fullest rank at its fullest moment:")
        print(*aligned((*ranking.WHICH, *sizes[0]), lines, left=ranking.WHICH[:2]), "", sep="\n")
    for line in (*ranking.marks(rows), *ranking.notes(rows)):
        print(line)
    if question.options.blocks:
        config = next(row.config for row in rows if row.config)  # of any framework: the work is that of one device
        for line in block_lines(proportions(config, machine), config.train.samples_per_micro_batch()):
            print(line)
    if question.options.check_volumes:
        for line in traces.volume_lines(predicted):
            print(line, flush=True)
    best = ranking.fitting(rows, question.options.max_gpus, memory)
    caps = f" with at most {counted(question.options.max_gpus, 'GPU')}" if question.options.max_gpus else ""
    caps += f" in {question.options.max_memory_gib:g} GiB" if memory else ""
    print("\n".join(ranking.conclusion(best, caps)))


def block_lines(computation: Computation, samples: int) -> Iterator[str]:
    """A table of FLOPs, bytes and arithmetic intensity of all blocks, equal neighbours together, and what limits each
    on a device (Gusak et al. 2022, table 6; the roofline of Williams et al. 2009). samples: of a micro batch"""
    speeds = computation.speeds
    ridge = None if speeds is ANY else speeds.flops_per_s / speeds.bytes_per_s
    passes = list[tuple[str, list[tuple[float, float]]]]()  # FLOPs, and bytes that are read and written
    for block in computation.counts.blocks:
        both = block.forward, block.backward
        figures = [(float(work.flops.sum()) * samples, float(work.moved.at(samples).sum())) for work in both]
        passes.append((block.name, figures))
    rows = list[tuple[str, ...]]()
    for figures, group in groupby(passes, itemgetter(1)):
        first, *others = [name for name, _ in group]
        name = f"{first} to {others[-1]}" if others else first
        for direction, (flops, moved) in zip(("forward", "backward"), figures, strict=True):
            intensity = flops / moved if moved else 0.0
            limit = "" if ridge is None else "computing" if intensity > ridge else "memory"
            rows.append((name, direction, f"{flops / 1e9:.4g}", f"{moved / 1e9:.4g}", f"{intensity:.3g}", limit))
    yield f"work of each block for {samples} samples, from the operations of the model:"
    headers = ("blocks", "pass", "GFLOP", "GB moved", "FLOP/byte", "limited by")
    yield from aligned(headers, rows, left=("blocks", "pass", "limited by"))
    if ridge is None:
        yield "the peaks of the device are not known, so what limits a block is not, either"
    else:
        yield f"above {ridge:.3g} FLOP/byte computing limits, below it the bandwidth of the memory"


if __name__ == "__main__":
    sys.exit(main())
