"""The rows of ddlbench-predict: one for each framework at each number of GPUs, or with `--plan` for each of its plans:
which framework, layout, micro batch and recomputation to train with (docs/oracle.md, "Plans").
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.frameworks.shared.layout import divisors
from ddlbench.measure.formulas.flops import check_precision
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import OneStep, from_calibration, from_one_step, from_roofline
from ddlbench.oracle.predictor import SAMPLES, Inputs, Prediction, predict
from ddlbench.oracle.timing.computation import Computation
from ddlbench.predict import ranking
from ddlbench.predict.question import DEGREES, SHARES, Question
from ddlbench.progress import Progress
from ddlbench.texts import GIB

if TYPE_CHECKING:  # pandas comes with it
    from ddlbench.oracle.runs import Results

STAGES = 2  # at most, of the layouts that are compared without --plan
# A faster step of the first may train worse; `deepspeed` is zero0 to zero3, `megatron` has the equations of `tensor`.
NO_PLANS = ("local_sgd", *ranking.LATE, "parameter_server", "deepspeed", "megatron")


def inputs_of(question: Question, config: Config, machine: Machine, results: Results | None = None) -> Inputs:
    """The inputs of all layouts of a framework at all numbers of GPUs. The seconds of computing are from the best
    source that is given. results: the runs of --from; None without it"""
    options, learned = question.options, None
    blocks = from_calibration(config, machine) if options.calibrate else None
    samples = options.samples_per_epoch or getattr(config.loader, "train_samples", None)
    loader = options.loader_samples_per_s
    if results is not None:
        samples, loader = samples or results.samples(config), loader or results.loader_rate(config)
        learned = results.learned(config, machine, blocks)
        machine = learned.machine if learned else machine
    samples = samples or SAMPLES.get(config.data.name)
    made: dict[str, Computation] = {}

    def computation(layout: Config) -> Computation:
        """What was measured has the micro batch and the recomputation of the command line, not those of a plan."""
        batch = layout.train.batch_per_gpu
        key = "" if results is None else repr((layout.framework, batch))  # each layout and batch may have a run
        if key not in made:
            if results is not None:
                train = replace(config.train, global_batch=None, batch_per_gpu=batch)
                of_layout = replace(config, framework=layout.framework, train=train)
                made[key] = results.computation(of_layout, machine, blocks)
            elif options.one_gpu_step_s is not None:
                step = OneStep(options.one_gpu_step_s, options.one_gpu_batch)
                made[key] = from_one_step(config, machine, step, blocks=blocks)
            else:
                made[key] = blocks or from_roofline(config, machine)
        return made[key]

    return Inputs(machine, computation, samples, loader, options.exact_memory, learned)


def predictions(question: Question, machine: Machine, results: Results | None = None) -> list[Prediction]:
    """If an input is missing or a framework lacks a key, the row says so; UserError if that is true of all rows.
    Unsupported for a precision that the device lacks."""
    rows, errors = list[Prediction](), list[UserError]()
    refused = partial(Prediction, model=question.model, cluster=machine.name, status="unsupported")
    left_out = NO_PLANS if question.options.plan else ()
    names = [name for name in choices("framework") if name not in left_out]
    if question.framework is not None:
        names = [question.framework]
    for name in Progress(sys.stderr.isatty()).steps(names, len(names), "predicting", "frameworks"):
        try:
            config = configuration(f"+framework={name}", *question.words)
            check_precision(config.train.precision, machine.device.name)
            inputs = inputs_of(question, config, machine, results)
        except UserError as error:
            errors.append(error)
            rows += [refused(framework=name, gpus=gpus, reason=str(error)) for gpus in question.gpus]
            continue
        for gpus in question.gpus:
            try:
                rows += _predicted(question, config, gpus, inputs)
            except UserError as error:
                errors.append(error)
                rows.append(refused(framework=name, gpus=gpus, reason=str(error)))
    if errors and all(row.status != "ok" for row in rows):
        raise errors[0]
    return rows


def _predicted(question: Question, config: Config, gpus: int, inputs: Inputs) -> list[Prediction]:
    """A row for each plan of a framework; without --plan for its best layout, with two stages at most if no degree is
    given. A plan or layout that lacks an input, such as a run that it can start from, is left out; UserError if all
    of them do."""
    framework: Any = config.framework
    per_node = inputs.machine.per_node(gpus)
    if question.options.plan:
        batches = [replace(config.train, global_batch=batch, batch_per_gpu=None) for batch in question.batches]
        of_batches = [replace(config, train=train) for train in batches or [config.train]]
        tried = [plan for one in of_batches for plan in plans(one, question.words, gpus, per_node)]
        if not tried:
            raise UserError(f"framework={framework.name} has no layout for gpus={gpus}, {per_node} a node")
    else:
        degrees = tuple(f"framework.{degree}=" for degree in DEGREES)
        given = framework.name not in SHARES or any(word.lstrip("+").startswith(degrees) for word in question.words)
        shapes = [] if given else list(layouts(framework, gpus, per_node, STAGES))
        tried = [replace(config, framework=shape) for shape in shapes or [framework]]
    rows, errors = list[Prediction](), list[UserError]()
    for one in tried:
        try:
            row = predict(one, gpus, inputs)
            rows.append(replace(row, settings=settings(one)) if question.options.plan else row)
        except UserError as error:
            errors.append(error)
    if errors and not rows:
        raise errors[0]
    if question.options.plan:
        return rows
    memory = question.options.max_memory_gib
    within = ranking.fitting(rows, max_memory=memory * GIB) if memory else []
    return (within or ranking.ranked(rows))[:1]


def plans(config: Config, words: Sequence[str], gpus: int, per_node: int) -> Iterator[Config]:
    """Every configuration of a framework that is tried: in every layout, with micro batches of 1, 2, 4, ... samples and
    of all samples of a replica, with and without recomputation, replicas of a pipeline with and without shards. words:
    a key that they give keeps its value"""
    given = {word.lstrip("+").partition("=")[0] for word in words}
    for layout in layouts(config.framework, gpus, per_node):
        replicas = gpus // prod(getattr(layout, name, None) or 1 for name in DEGREES[1:])
        frameworks = [layout]
        if hasattr(layout, "sharded") and replicas > 1 and "framework.sharded" not in given:
            frameworks = [replace(layout, sharded=sharded) for sharded in (False, True)]
        samples = config.train.samples_per_update(gpus) // replicas
        micro_batches = [size for size in divisors(samples) if size & (size - 1) == 0 or size == samples]
        if "train.micro_batch" in given or not micro_batches:  # more replicas than samples: refused with the reason
            micro_batches = [config.train.micro_batch]
        recompute = [config.train.checkpoint_activations] if "train.checkpoint_activations" in given else [False, True]
        for framework, size, again in itertools.product(frameworks, micro_batches, recompute):
            train = replace(config.train, micro_batch=size, checkpoint_activations=again)
            yield replace(config, train=train, framework=framework)


def layouts(framework: Any, gpus: int, per_node: int, most_stages: int | None = None) -> Iterator[Any]:
    """The layouts of a framework on so many GPUs. Images are shared within a node, as layers are. Where a framework
    shares layers and has stages, both are more than one, because `tensor` and the pipelines are tried alone.
    most_stages: None for as many as there are GPUs"""
    degrees = [degree for degree in DEGREES if hasattr(framework, degree)]
    if not degrees:
        yield framework
        return
    within = [n for n in range(2, per_node + 1) if per_node % n == 0]
    tensors = within if framework.name in SHARES else [1]
    stages = [n for n in range(2, (most_stages or gpus) + 1) if gpus % n == 0] if "pp" in degrees else [1]
    for tp, pp in itertools.product(tensors, stages):
        if gpus % (tp * pp) == 0:
            chosen = {"dp": gpus // (tp * pp), "tp": tp, "sp": tp, "pp": pp}
            yield replace(framework, **{degree: chosen[degree] for degree in degrees})


def settings(config: Config) -> dict[str, Any]:
    """What a plan sets beside the framework, as keys of ddlbench."""
    framework: Any = config.framework
    names = (*DEGREES, "sharded")
    layout = {f"framework.{name}": getattr(framework, name) for name in names if hasattr(framework, name)}
    keys = ("global_batch", "batch_per_gpu", "micro_batch", "checkpoint_activations")
    train = {f"train.{key}": value for key in keys if (value := getattr(config.train, key)) is not None}
    return layout | train
