"""python -m ddlbench.predict: step time and memory of each framework on a cluster, without a run there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import torch

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration, configurations
from ddlbench.config.schema import Config
from ddlbench.errors import RunError, UserError
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.job import Job
from ddlbench.oracle.machine import machine as machines
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured import network
from ddlbench.oracle.measured.inputs import (
    ROOFLINE,
    OneStep,
    from_calibration,
    from_one_step,
    from_roofline,
    machine_of,
    proportions,
    require_gpu,
)
from ddlbench.oracle.measured.runs import Results
from ddlbench.oracle.predictor import SAMPLES, Inputs, Prediction, job_of, predict, setting_of
from ddlbench.oracle.strategies import pipeline
from ddlbench.oracle.timing.computation import Computation
from ddlbench.predict import blocks, chakra, planner, ranking, volumes
from ddlbench.predict.question import Question, ask
from ddlbench.predict.timeline import timeline
from ddlbench.progress import Progress
from ddlbench.rehearsal import perfetto
from ddlbench.rehearsal.perfetto import Slice
from ddlbench.results.rows import group_by
from ddlbench.texts import GIB

STAGES = 2  # at most, of the layouts that are compared without --plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 for errors of the user, said in one line."""
    try:
        question = ask(sys.argv[1:] if arguments is None else arguments)
        with configurations():
            return answer(question)
    except RunError as error:
        print(f"ddlbench.predict: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def answer(question: Question) -> int:
    if question.options.grade:
        from ddlbench.predict.grading import grade

        graded = grade.grade(question.options.grade)
        if question.options.json:
            print(grade.as_json(graded))
        else:
            grade.show(graded)
        return 0
    if question.options.calibrate_network:
        machine = machines.load(question.machine)
        require_gpu("--calibrate-network", machine)
        counts = [gpus for gpus in question.gpus if 1 < gpus <= (machine.devices_per_node or gpus)]
        print(f"collectives are in {network.calibrate(machine.device.type, counts)}", file=sys.stderr)
        if not question.model:  # nothing is to be predicted
            return 0
    machine = machine_of(question.machine, question.overlap)
    results = Results.read(question.options.results, str(torch.__version__)) if question.options.results else None
    rows = ranking.ranked(predictions(question, machine, results))
    if question.options.plan:
        return plan(rows, question, machine)
    fine = [row for row in rows if row.status == "ok"]
    if question.options.figure:
        from ddlbench.predict.figure import draw  # matplotlib comes with it

        draw(rows, question.options.figure)
    if question.options.timeline:
        perfetto.write(question.options.timeline, slices(question, machine, results, fine))
    if question.options.chakra:
        for line in chakra.write(question.options.chakra, fine, partial(_config, question)):
            print(line, file=sys.stderr)
    if question.options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show(rows, question, machine)
    return 0 if fine else 3


def plan(rows: Sequence[Prediction], question: Question, machine: Machine) -> int:
    """Print or draw the plans. Exit code 3 if there is none."""
    options = question.options
    if options.figure:
        from ddlbench.predict.figure import draw_map  # matplotlib comes with it

        draw_map(rows, options.figure)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0 if any(row.status == "ok" and row.fits is not False for row in rows) else 3
    memory = options.max_memory_gib * GIB if options.max_memory_gib else None
    possible = False
    for (_, batch), same in group_by(rows, lambda row: (row.gpus, row.settings.get("train.global_batch"))).items():
        asked = replace(
            question, words=[*question.words, *([f"train.global_batch={batch}"] if question.batches else [])]
        )
        head = heading([row for row in same if row.status == "ok"] or same, asked, machine)
        possible |= planner.show(same, head, memory)
    return 0 if possible else 3


def slices(
    question: Question, machine: Machine, results: Results | None, rows: Sequence[Prediction]
) -> Iterator[Slice]:
    """The timelines of rows with status ok."""
    for row in rows:
        config, passes, send = _config(question, row), (), ()
        if isinstance(config.framework, Pipeline):
            inputs = inputs_of(question, machine, config, results)
            job = job_of(config, row.gpus, machine)
            passes, send = pipeline.timeline(config.framework, setting_of(config, config.framework, job, inputs))
        yield from timeline(row, passes, send)


def predictions(question: Question, machine: Machine, results: Results | None) -> list[Prediction]:
    """A row for each framework at each number of GPUs. If an input is missing or a framework lacks a key, its row says
    so; UserError if that is true of all rows."""
    rows, errors = list[Prediction](), list[UserError]()

    def refused(name: str, gpus: int, error: UserError) -> Prediction:
        errors.append(error)
        return Prediction(name, question.model, machine.name, gpus, "unsupported", str(error))

    every = planner.frameworks() if question.options.plan else choices("framework")
    names = every if question.framework is None else [question.framework]
    for name in Progress(sys.stderr.isatty()).steps(names, len(names), "predicting", "frameworks"):
        try:
            config = configuration(f"+framework={name}", *question.words)
            inputs = inputs_of(question, machine, config, results)
        except UserError as error:
            framework_keys = any(word.lstrip("+~").startswith("framework.") for word in question.words)
            if question.framework is not None or not framework_keys:
                raise
            rows += [refused(name, gpus, error) for gpus in question.gpus]
            continue
        for gpus in question.gpus:
            try:
                if question.options.plan:
                    rows += _planned(question, config, gpus, inputs)
                    continue
                layouts = tried(question, config.framework, gpus, machine.per_node(gpus))
                rows.append(ranking.ranked([predict(config, layout, gpus, inputs) for layout in layouts])[0])
            except UserError as error:
                rows.append(refused(name, gpus, error))
    if errors and all(row.status != "ok" for row in rows):
        raise errors[0]
    return rows


def _planned(question: Question, config: Config, gpus: int, inputs: Inputs) -> Iterator[Prediction]:
    """A prediction for each plan of a framework."""
    batches = [replace(config.train, global_batch=batch, batch_per_gpu=None) for batch in question.batches]
    for train in batches or [config.train]:
        asked = replace(config, train=train)
        for made in planner.plans(asked, question.words, gpus, inputs.machine.per_node(gpus)):
            yield replace(predict(made, made.framework, gpus, inputs), settings=planner.settings(made))


def tried(question: Question, framework: Any, gpus: int, per_node: int) -> list[Any]:
    """The layouts that are compared: those of a plan with two stages at most, if no degree is given."""
    degrees = tuple(f"framework.{degree}=" for degree in planner.DEGREES)
    given = any(word.lstrip("+").startswith(degrees) for word in question.words)
    if given or framework.name not in planner.SHARES:
        return [framework]
    return list(planner.layouts(framework, gpus, per_node, STAGES)) or [framework]


def inputs_of(question: Question, machine: Machine, config: Config, results: Results | None) -> Inputs:
    """The seconds of computing are from the best source that is given."""
    options, learned = question.options, None
    measured = from_calibration(config, machine) if options.calibrate else None
    samples, loader = options.samples_per_epoch, options.loader_samples_per_s
    if results is not None:
        samples, loader = samples or results.samples(config), loader or results.loader_rate(config)
        learned = results.learned(config, machine, measured)
        machine = learned.machine if learned else machine
    samples = samples or SAMPLES.get(config.data.name)
    made: list[Computation] = []  # once for all layouts and numbers of GPUs

    def computation(config: Config, _: Job) -> Computation:
        if made:
            return made[0]
        if results is not None:
            source = results.computation(config, machine, measured)
        elif options.one_gpu_step_s is not None:
            step = OneStep(options.one_gpu_step_s, options.one_gpu_batch)
            source = from_one_step(config, machine, step, blocks=measured)
        else:
            source = measured or from_roofline(config, machine)
        made.append(source)
        return source

    return Inputs(machine, computation, options.algorithm, samples, loader, options.exact_memory, learned)


def _config(question: Question, row: Prediction) -> Config:
    """The configuration of a row in its layout."""
    config = configuration(f"+framework={row.framework}", *question.words)
    if row.framework not in planner.SHARES:
        return config
    degrees = {key: row.layout[key] for key in ("dp", "tp", "sp") if key in row.layout}
    return replace(config, framework=replace(cast(Any, config.framework), **degrees))


def heading(rows: Sequence[Prediction], question: Question, machine: Machine) -> str:
    """The model, the cluster, and the source of the seconds of computing, as text."""
    config = configuration(f"+framework={question.framework or rows[0].framework}", *question.words)
    train, device = config.train, machine.device
    batch = f"{train.samples_per_update(1)} samples per {'update' if train.global_batch else 'GPU and update'}"
    precision = "fp32 with TF32" if train.precision == "fp32" and train.tf32 else train.precision
    if precision == "fp32" and device.type == "cuda":
        precision += " (without tensor cores: train.precision=bf16 or train.tf32=true use them)"
    basis = ", ".join(dict.fromkeys(row.basis or "" for row in rows))
    bound = ": each operation at the device's peak, so large batches take longer" if basis == ROOFLINE else ""
    return (
        f"{config.model.name}, {batch}, {config.recipe.optimizer.name}, {precision}\n"
        f"on {machines.described(machine)}\nseconds of computing from: {basis}{bound}\n"
    )


def show(rows: Sequence[Prediction], question: Question, machine: Machine) -> None:
    fine = [row for row in rows if row.status == "ok"]
    if fine:
        print(heading(fine, question, machine))
        print(ranking.table(rows))
        print(f"\nGiB of the fullest rank at its fullest moment:\n{ranking.memory_table(rows)}\n")
    for line in (*ranking.marks(rows), *ranking.notes(rows)):
        print(line)
    if question.options.blocks:
        config = configuration(f"+framework={question.framework or 'single'}", *question.words)
        for line in blocks.lines(proportions(config, machine), config.train.samples_per_micro_batch()):
            print(line)
    if question.options.check_volumes:
        for line in volumes.lines(fine, lambda row: _config(question, row)):
            print(line, flush=True)
    memory = question.options.max_memory_gib
    best = ranking.fitting(rows, question.options.max_gpus, memory * GIB if memory else None)
    caps = f" with at most {question.options.max_gpus} GPUs" if question.options.max_gpus else ""
    caps += f" in {memory:g} GiB" if memory else ""
    print("\n".join(ranking.conclusion(best, caps)))


if __name__ == "__main__":
    sys.exit(main())
