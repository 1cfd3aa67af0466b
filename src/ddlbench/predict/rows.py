"""The rows of ddlbench-predict: one for each framework at each number of GPUs, or for each of its plans."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ddlbench.config.choices import choices
from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.measure.formulas.flops import check_precision
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import OneStep, from_calibration, from_one_step, from_roofline
from ddlbench.oracle.measured.runs import Results
from ddlbench.oracle.predictor import SAMPLES, Inputs, Prediction, predict
from ddlbench.oracle.timing.computation import Computation
from ddlbench.predict import planner, ranking
from ddlbench.predict.question import Question
from ddlbench.progress import Progress

STAGES = 2  # at most, of the layouts that are compared without --plan


@dataclass(frozen=True)
class Sources:
    """What the predictions of one command start from. results: the runs of --from; None without it"""

    question: Question
    machine: Machine
    results: Results | None = None

    def inputs(self, config: Config) -> Inputs:
        """The inputs of all layouts of a framework at all numbers of GPUs. The seconds of computing are from the best
        source that is given."""
        options, machine, results, learned = self.question.options, self.machine, self.results, None
        blocks = from_calibration(config, machine) if options.calibrate else None
        samples, loader = options.samples_per_epoch, options.loader_samples_per_s
        if results is not None:
            samples, loader = samples or results.samples(config), loader or results.loader_rate(config)
            learned = results.learned(config, machine, blocks)
            machine = learned.machine if learned else machine
        samples = samples or SAMPLES.get(config.data.name)
        made: dict[str, Computation] = {}  # by layout, as each may have a run of its own; "": equal for all

        def computation(layout: Config) -> Computation:
            """What was measured has the micro batch and the recomputation of the command line, not those of a plan."""
            key, measured = "", config
            if results is not None:
                key, measured = repr(layout.framework), replace(config, framework=layout.framework)
            if key in made:
                return made[key]
            if results is not None:
                source = results.computation(measured, machine, blocks)
            elif options.one_gpu_step_s is not None:
                step = OneStep(options.one_gpu_step_s, options.one_gpu_batch)
                source = from_one_step(measured, machine, step, blocks=blocks)
            else:
                source = blocks or from_roofline(measured, machine)
            made[key] = source
            return source

        return Inputs(machine, computation, samples, loader, options.exact_memory, learned)


def predictions(sources: Sources) -> list[Prediction]:
    """If an input is missing or a framework lacks a key, the row says so; UserError if that is true of all rows.
    Unsupported for a precision that the device lacks."""
    question, machine = sources.question, sources.machine
    rows, errors = list[Prediction](), list[UserError]()

    def refused(name: str, gpus: int, error: UserError) -> Prediction:
        errors.append(error)
        return Prediction(name, question.model, machine.name, gpus, "unsupported", str(error))

    frameworks = planner.frameworks() if question.options.plan else choices("framework")
    names = frameworks if question.framework is None else [question.framework]
    for name in Progress(sys.stderr.isatty()).steps(names, len(names), "predicting", "frameworks"):
        try:
            config = question.configuration(name)
            check_precision(config.train.precision, machine.device.name)
            inputs = sources.inputs(config)
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
                else:
                    layouts = _layouts(question, config, gpus, machine.per_node(gpus))
                    rows.append(ranking.ranked([row for _, row in _possible(layouts, gpus, inputs)])[0])
            except UserError as error:
                rows.append(refused(name, gpus, error))
    if errors and all(row.status != "ok" for row in rows):
        raise errors[0]
    return rows


def _planned(question: Question, config: Config, gpus: int, inputs: Inputs) -> Iterator[Prediction]:
    """A prediction for each plan of a framework."""
    batches = [replace(config.train, global_batch=batch, batch_per_gpu=None) for batch in question.batches]
    for train in batches or [config.train]:
        plans = planner.plans(replace(config, train=train), question.words, gpus, inputs.machine.per_node(gpus))
        for plan, row in _possible(plans, gpus, inputs):
            yield replace(row, settings=planner.settings(plan))


def _layouts(question: Question, config: Config, gpus: int, per_node: int) -> list[Config]:
    """The layouts that are compared: those of a plan with two stages at most, if no degree is given."""
    degrees = tuple(f"framework.{degree}=" for degree in planner.DEGREES)
    framework: Any = config.framework
    if framework.name not in planner.SHARES or any(word.lstrip("+").startswith(degrees) for word in question.words):
        return [config]
    layouts = planner.layouts(framework, gpus, per_node, STAGES)
    return [replace(config, framework=layout) for layout in layouts] or [config]


def _possible(configs: Iterable[Config], gpus: int, inputs: Inputs) -> list[tuple[Config, Prediction]]:
    """Configurations and their predictions. One without an input, such as a run that it can start from, is left out;
    UserError if all are."""
    rows, errors = list[tuple[Config, Prediction]](), list[UserError]()
    for config in configs:
        try:
            rows.append((config, predict(config, gpus, inputs)))
        except UserError as error:
            errors.append(error)
    if errors and not rows:
        raise errors[0]
    return rows
