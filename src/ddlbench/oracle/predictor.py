"""Predicts one configuration on one number of GPUs. A refusal is also a prediction, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ddlbench.config.compose import make_job, supports
from ddlbench.config.schema import Config
from ddlbench.errors import RunError, UserError, WrongRankCount
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.knobs import DeepSpeedOptions
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.megatron.adapter import Megatron
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.single import Single
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Job
from ddlbench.oracle import bands
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import ROOFLINE, Learned
from ddlbench.oracle.setting import Outcome, Setting
from ddlbench.oracle.strategies import data_parallel, model_parallel, pipeline
from ddlbench.oracle.strategies.traced import rehearsed_memory, traced
from ddlbench.oracle.timing.computation import Computation
from ddlbench.ranks.launch import Launch
from ddlbench.texts import GIB, bytes_text, counted

EQUATIONS: dict[type, Callable[[Any, Setting], Outcome]] = {
    Single: lambda _, setting: data_parallel.replicas(setting),
    DDP: data_parallel.ddp,
    Horovod: data_parallel.horovod,
    LocalSGD: data_parallel.local_sgd,
    ParameterServer: data_parallel.parameter_server,
    DeepSpeedOptions: data_parallel.zero,
    FSDP: data_parallel.fsdp,
    TensorParallel: model_parallel.tensor,
    Megatron: model_parallel.megatron,
    Spatial: model_parallel.spatial,
    Pipeline: lambda framework, setting: pipeline.predict(pipeline.cut_of(framework, setting)),
    PipeDream: lambda framework, setting: pipeline.predict(pipeline.cut_of(framework, setting)),
}
SAMPLES = {"imagenet": 1_281_167, "imagenet_tfrecord": 1_281_167}  # Russakovsky et al. 2015, ILSVRC 2012


@dataclass(frozen=True)
class Prediction:
    """One row. docs/oracle.md explains every key; None: unknown, or refused.

    status: ok | unsupported
    config, setting: the predicted configuration in its layout; they are not keys of the JSON
    """

    framework: str
    model: str
    cluster: str
    gpus: int
    status: str
    reason: str
    step_s: float | None = None
    compute_s: float | None = None
    comm_exposed_s: float | None = None
    comm_hidden_s: float | None = None
    bubble_s: float | None = None
    data_s: float | None = None
    unexplained_s: float | None = None
    low_80_s: float | None = None
    high_80_s: float | None = None
    low_95_s: float | None = None
    high_95_s: float | None = None
    epoch_s: float | None = None
    samples_per_s: float | None = None
    memory_bytes: float | None = None
    memory: Mapping[str, float] | None = None
    memory_error: float | None = None
    fits: bool | None = None
    layout: Mapping[str, int] = field(default_factory=dict[str, int])
    limits: tuple[Mapping[str, Any], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    basis: str | None = None
    marks: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: Config | None = field(default=None, repr=False, compare=False)
    setting: Setting | None = field(default=None, repr=False, compare=False)

    def printed(self) -> dict[str, Any]:
        """The keys of the JSON."""
        values = asdict(replace(self, config=None, setting=None))
        return {key: value for key, value in values.items() if key not in ("config", "setting")}

    @property
    def sent(self) -> list[Mapping[str, Any]]:
        """The messages between ranks: all but copies to the host and back."""
        return [message for message in self.messages if message["along"] != "host"]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a prediction beside the configuration.

    computation: the seconds of computing of a configuration on one device; UserError if their source has none
    samples: of an epoch; loader: samples a second that one rank loads
    exact_memory: rehearse each job for its memory
    learned: the terms of `machine` that were learned from runs with several GPU counts
    """

    machine: Machine
    computation: Callable[[Config], Computation]
    samples: int | None = None
    loader: float | None = None
    exact_memory: bool = False
    learned: Learned | None = None


def predict(config: Config, gpus: int, inputs: Inputs) -> Prediction:
    """Predict a row. UserError if an input of the prediction is missing (no link, no speed, no base)."""
    framework: Any = config.framework
    row = Prediction(framework.name, config.model.name, inputs.machine.name, gpus, "ok", "", config=config)
    job = job_of(config, gpus, inputs.machine)
    try:
        supports(framework, job)
    except RunError as error:
        return replace(row, status="unsupported", reason=str(error))
    try:
        alone = config  # on one device, whose micro batch a measurement should have
        if config.train.global_batch is not None:
            samples = max(1, config.train.global_batch // gpus)
            alone = replace(config, train=replace(config.train, global_batch=None, batch_per_gpu=samples))
        setting = Setting(job, inputs.machine, inputs.computation(alone))
        outcome = strategy(framework, setting)
    except RunError as error:
        if isinstance(error, UserError) and not isinstance(error, WrongRankCount):
            raise
        return replace(row, status="unsupported", reason=str(error))
    error = bands.worst_error(framework.name)
    if isinstance(framework, DeepSpeedOptions):
        error = bands.CAST_ERROR if framework.casts(job) else bands.worst_error(f"zero{framework.zero_stage}")
    row = replace(row, memory_error=0.0 if outcome.traced else error)
    if inputs.exact_memory:
        try:
            memory = rehearsed_memory(framework, job, outcome.layout, config.loader.pinned)
            row, outcome = replace(row, memory_error=0.0), replace(outcome, peak=lambda: memory)
        except RunError as error:
            row = replace(row, marks=(f"memory by the formula: {error}",))
    return _filled(row, outcome, setting, inputs, config.train.steps)


def job_of(config: Config, gpus: int, machine: Machine) -> Job:
    """The job of rank 0, as it would be on that machine."""
    launch = Launch("torchrun", world_size=gpus, local_world_size=machine.per_node(gpus))
    return make_job(config, launch, torch.device(machine.device.type))


def strategy(framework: Any, setting: Setting) -> Outcome:
    """The outcome by the framework's equations; without equations, by tracing. Unsupported if neither is possible."""
    equations = next((outcome for type_, outcome in EQUATIONS.items() if isinstance(framework, type_)), traced)
    return equations(framework, setting)


def _filled(row: Prediction, outcome: Outcome, setting: Setting, inputs: Inputs, most: int | None) -> Prediction:
    """The row with all numbers of the outcome.

    row: with the relative error of its memory
    most: the largest number of steps of an epoch; None: the configuration sets none
    """
    job, machine, learned = setting.job, setting.machine, inputs.learned
    wait: float | None = None
    unexplained = outcome.step_s * (learned.rest - 1) if learned and row.gpus >= learned.gpus else 0.0
    without_data = outcome.step_s + unexplained
    if inputs.loader is not None:  # each replica's batch is loaded by one rank
        replicas = outcome.layout.get("dp", 1)
        wait = max(0.0, job.replica_batch(replicas) / inputs.loader - without_data)
    step = without_data + (wait or 0.0)
    capacity = machine.device.memory_bytes
    if capacity is not None and machine.device.type == "cpu":
        capacity /= machine.per_node(row.gpus)  # ranks share the node's memory
    fitting = bands.fits(outcome.memory.total, row.memory_error or 0.0, capacity)
    epoch_steps = None if inputs.samples is None else inputs.samples // job.global_batch
    steps = min((count for count in (epoch_steps, most) if count is not None), default=None)
    row = replace(row, messages=tuple({**asdict(sent), "hidden": sent.hidden} for sent in outcome.messages))
    largest = max((sent["largest"] or sent["bytes_"] / (sent["count"] or 1) for sent in row.sent), default=0.0)
    groups = [ranks for degree, ranks in outcome.layout.items() if degree != "pp"]
    marks = machine.marks(row.gpus, *groups, largest=largest)
    band: dict[str, float] = {}
    if setting.computation.basis != ROOFLINE and row.gpus > 1:  # the errors of other predictions are not known
        nodes, kind = machine.nodes(row.gpus), machine.device.type
        band = bands.band(step, row.framework, nodes, kind, learned is not None)
    return replace(
        row,
        setting=setting,
        step_s=step,
        compute_s=outcome.compute_s,
        comm_exposed_s=outcome.exposed_s,
        comm_hidden_s=outcome.hidden_s,
        bubble_s=outcome.bubble_s,
        data_s=wait,
        unexplained_s=unexplained,
        **band,
        epoch_s=None if not steps else steps * step,
        samples_per_s=job.global_batch / step,
        memory_bytes=outcome.memory.total,
        memory=asdict(outcome.memory),
        fits=fitting,
        reason=reason(row.gpus, outcome, wait or 0.0, capacity, fitting),
        layout=outcome.layout,
        limits=tuple(map(asdict, outcome.limits)),
        basis=setting.computation.basis,
        learned=tuple(learned.lines()) if learned else (),
        marks=(*row.marks, *setting.computation.marks(outcome.micro_samples), *marks),
    )


def reason(gpus: int, outcome: Outcome, wait_s: float, capacity: float | None, fitting: bool | None) -> str:
    """One sentence: what takes the largest part of the step beside computing, or why the job does not fit. The shares
    are of the step without what only runs on several GPU counts show.

    wait_s: seconds of waiting for data; capacity: bytes of the device's memory, None: unknown
    """
    needed = f"{outcome.memory.total / GIB:.1f} GiB of {(capacity or 0.0) / GIB:.1f} GiB"
    if fitting is False:
        part, bytes_ = max(asdict(outcome.memory).items(), key=lambda item: item[1])
        return f"does not fit: it needs {needed}, of which {part} {bytes_ / GIB:.1f} GiB"
    step_s = outcome.step_s + wait_s
    computing, hidden = f"computing takes {outcome.compute_s / step_s:.0%}", ""
    if outcome.hidden_s >= 0.01 * outcome.step_s:
        share = outcome.hidden_s / (outcome.hidden_s + outcome.exposed_s)
        hidden = f"; {share:.0%} of the communication is hidden behind computing"
    lost = [
        (outcome.bubble_s, "stages wait for each other for", f" ({outcome.micro_batches} micro batches)"),
        (wait_s, "the loader is waited for during", ""),
        *((sent.exposed, f"the {sent.what} ({bytes_text(sent.bytes_)}) takes", hidden) for sent in outcome.messages),
    ]
    seconds, what, more = max(lost, key=lambda part: part[0])
    longest = f"{what} {seconds / step_s:.0%} of the step: {computing}{more}"
    time = longest if seconds >= 0.05 * step_s else f"{computing} of the step{hidden}"
    unsure = f"; it may not fit: it needs about {needed} (--exact-memory rehearses it)"
    return f"at {counted(gpus, 'GPU')} {time}{unsure if capacity and fitting is None else ''}"
