"""--from RESULTS: predictions from measured runs on one device, or on a few devices."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ddlbench.config.keys import added_later, shown
from ddlbench.config.schema import Config
from ddlbench.errors import Unsupported, UserError
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import Learned, OneStep, from_one_step, learn
from ddlbench.oracle.predictor import job_of, strategy
from ddlbench.oracle.setting import Setting
from ddlbench.oracle.timing.computation import Computation
from ddlbench.record.schema import DEVELOPER
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.rows import OWN, Row, without_data_wait
from ddlbench.results.tables.merge import AttemptRow, measured_options
from ddlbench.results.tables.tables import merge

# Keys of a run's `train` section that change how fast one process computes.
ALIKE = (
    "precision", "tf32", "cudnn_benchmark", "deterministic", "checkpoint_activations", "offload_activations", "compile",
    "channels_last", "threads_per_rank",
)  # fmt: skip
ROUNDS = 100  # of solving for one device's seconds


@dataclass(frozen=True)
class Base:
    """The measured step of a run. samples: of the global batch; micro: of a micro batch; torch: its version; cluster:
    its label"""

    framework: str
    settings: Row  # that change what several devices send
    ranks: int
    samples: int
    micro: int
    seconds: float = field(compare=False)  # so that repeats are equal
    path: Path = field(compare=False)
    torch: str
    cluster: str
    hosts: tuple[str, ...]  # of a run on CPUs

    @property
    def step(self) -> OneStep:
        return OneStep(self.seconds, self.samples, self.micro, self.ranks)


@dataclass
class Results:
    """The runs of a folder. torch: the version of the predictions; None: that of the runs"""

    folder: Path
    runs: Sequence[AttemptRow]
    torch: str | None = None

    @classmethod
    def read(cls, folder: Path, torch: str | None = None) -> Results:
        return cls(folder, [run for run in merge(read_all([folder])).runs if run.row["origin"] == OWN], torch)

    def computation(self, config: Config, machine: Machine, blocks: Computation | None = None) -> Computation:
        """The computation, from the run that `_chosen` takes. UserError without a run.

        blocks: measured blocks; a step is divided in their proportions. None: in the proportions of the roofline
        """
        framework: Any = config.framework
        bases = self._bases(config, machine)
        base = _chosen(bases, config)
        if base is None:
            there = (run for run in self.runs if run.row["model"] == config.model.name and _on(machine, run.row))
            nearest = min(filter(None, (_differences(run, config) for run in there)), key=len, default=())
            hint = f" (the nearest has {'; '.join(nearest)})" if nearest else ""
            raise UserError(
                f"{self.folder} has no complete run of {config.model.name} on one {machine.device.name} that computes "
                f"the same{hint}: measure one with +framework=single, or give --one-gpu-step-s SECONDS"
            )
        where = "one device" if base.ranks == 1 else f"{base.ranks} devices"
        basis = f"{base.framework} on {where} ({base.path.parent.name})"
        remarks: list[str] = []
        if len(labels := sorted({run.cluster for run in bases})) > 1:
            remarks.append(f"a run of cluster {base.cluster} among those of {', '.join(labels)}")
        computation = from_devices(config, machine, base.step, basis, blocks)
        if base.ranks == 1 and base.framework not in (framework.name, "single"):  # `single` adds no work
            remarks.append(f"{framework.name} from a run of {base.framework}, with what {base.framework} itself takes")
        if self.torch is not None and base.torch != self.torch:
            remarks.append(f"runs with torch {base.torch or 'of an unknown version'}, not {self.torch}")
        if base.hosts and base.hosts != (platform.node(),):  # GPUs have names, but all CPUs are one kind of device
            remarks.append(f"runs on the CPU of {', '.join(base.hosts)}, not of {platform.node()}")
        return replace(computation, remarks=tuple(remarks))

    def learned(self, config: Config, machine: Machine, blocks: Computation | None = None) -> Learned | None:
        """The machine as the runs of this framework with more devices than the base show it; None without such runs."""
        bases = self._bases(config, machine)
        base = _chosen(bases, config)
        if base is None:
            return None
        wanted = _settings(_options(config))
        same = [run for run in bases if run.settings == wanted and run.torch == base.torch]
        more = [run for run in same if run.ranks > base.ranks and run.cluster == base.cluster]
        # Another batch of a device would be learned as another link. Strong scaling has no two equal ones.
        weak = [run for run in more if run.samples * base.ranks == base.samples * run.ranks]
        strong = [run for run in more if run.samples == base.samples]
        runs = sorted(weak or strong, key=lambda run: run.ranks)
        if not runs:
            return None
        steps = [run.step for run in runs]
        # Their predictions start from the base with the nearest micro batch: in strong scaling perhaps from several.
        batches = (max(1, run.samples // run.ranks) for run in runs)
        trains = (replace(config.train, global_batch=None, batch_per_gpu=batch) for batch in batches)
        nearest = [_chosen(bases, replace(config, train=train)) or base for train in trains]

        def predicted(machine: Machine) -> list[float]:
            starts = [from_devices(config, machine, start.step, "the base", blocks) for start in nearest]
            settings = (setting_of(config, machine, *pair) for pair in zip(steps, starts, strict=True))
            return [strategy(config.framework, setting).step_s for setting in settings]

        try:
            return learn(machine, predicted, [step.seconds for step in steps], steps[-1].gpus)
        except Unsupported:  # the oracle has no equations for it, as its row will say
            return None

    def _bases(self, config: Config, machine: Machine) -> list[Base]:
        """The runs that a prediction can start from, those with the label of this cluster alone if there are any.
        Repeats become one run with the median of their seconds, in the place of the last repeat."""
        runs = [base for run in self.runs if (base := _base(run, config, machine)) is not None]
        runs = [run for run in runs if run.cluster == machine.name] or runs
        last = [run for index, run in enumerate(runs) if run not in runs[index + 1 :]]
        return [replace(run, seconds=median(repeat.seconds for repeat in runs if repeat == run)) for run in last]

    def loader_rate(self, config: Config) -> float | None:
        """Samples a second that one rank loads: the median of complete mode=loader runs of the same data with the same
        loader, its settings and the same size of a sample."""
        wanted = _loading(_options(config))
        loaders = (run for run in self.runs if run.ok and run.row["mode"] == "loader")
        rows = [run.row for run in loaders if _loading(_options(config, run)) == wanted]
        rates = [rate / row["gpus"] for row in rows if (rate := row["throughput_samples_per_s"]) and row["gpus"]]
        return median(rates) if rates else None

    def samples(self, config: Config) -> int | None:
        """Training samples of this data; for text, with sequences of this length."""
        wanted = config.data.name, config.resolved["model"].get("seq_len")
        for run in reversed(self.runs):
            count = run.row["dataset_train_samples"]
            if count and (run.row["data"], run.options.get("model.seq_len")) == wanted:
                return count
        return None


def _options(config: Config, run: AttemptRow | None = None) -> Row:
    """The configuration of a run, or the asked one. The tables leave out keys that were added later, where they keep
    the earlier behavior, and an older record lacks them."""
    return added_later(config) | (run.options if run else measured_options(config.resolved, added_later(config)))


def _loading(options: Row) -> Row:
    """The parts of a configuration that change the work of a loader."""
    keys = ("data.name", "model.image_size", "model.seq_len")
    return {key: value for key, value in options.items() if key in keys or key.startswith("loader.")}


def _base(run: AttemptRow, config: Config, machine: Machine) -> Base | None:
    """The base in a run. None for an incomplete run, for another model, device or precision, and for ranks that
    share a device, or that are spread over the nodes in another way than in the oracle."""
    row, keys = run.row, _settings(_options(config, run))
    rate, batch, ranks = row["throughput_samples_per_s"], row["global_batch"], row["gpus"]
    if not (run.ok and row["mode"] in ("train", None) and rate and batch and ranks) or row["backend"] == DEVELOPER:
        return None
    if not _on(machine, row) or row["nodes"] not in (None, machine.nodes(ranks)) or _differences(run, config):
        return None
    seconds = without_data_wait(batch / rate, row)
    micro = max(1, batch // (row["data_size"] or 1) // (row["micro_batches"] or 1))
    hosts = tuple(sorted((row["hosts"] or "").split())) if machine.device.type == "cpu" else ()
    framework, version, cluster = (row[name] or "" for name in ("framework", "torch", "cluster"))
    return Base(framework, keys, ranks, batch, micro, seconds, run.folder, version, cluster, hosts)


def _settings(options: Row) -> Row:
    """The keys of a configuration that change what several devices send: the keys of the framework, and the type of
    sums."""
    sent = {key: value for key, value in options.items() if key.startswith(("framework.", "train.reduce_dtype"))}
    return {"train.reduce_dtype": "fp32"} | sent


def _chosen(bases: Sequence[Base], config: Config) -> Base | None:
    """The run that a prediction starts from: of this framework on one device, else of `single` or any other framework
    on one device, else of this framework on as few devices as possible. If there are several such runs, those with the
    nearest micro batch count, then those with the asked settings of the framework, then the last run."""
    framework: Any = config.framework
    micro = config.train.samples_per_micro_batch()
    wanted = _settings(_options(config))
    bases = sorted(bases, key=lambda base: (-abs(math.log(base.micro / micro)), base.settings == wanted))
    one_device = [base for base in bases if base.ranks == 1]
    same_settings = [base for base in bases if base.settings == wanted]
    smallest = min((base.ranks for base in same_settings), default=0)
    groups = (  # the first group with a run counts
        [base for base in one_device if base.framework == framework.name],
        [base for base in one_device if base.framework == "single"],
        one_device,
        [base for base in same_settings if base.ranks == smallest],
    )
    return next((group[-1] for group in groups if group), None)


def setting_of(config: Config, machine: Machine, step: OneStep, computation: Computation) -> Setting:
    """A step of as many ranks as `step`, with its samples and its micro batch."""
    train = replace(config.train, global_batch=step.samples, batch_per_gpu=None, micro_batch=step.micro)
    return Setting(job_of(replace(config, train=train), step.gpus, machine), machine, computation)


def from_devices(
    config: Config, machine: Machine, step: OneStep, basis: str, blocks: Computation | None = None
) -> Computation:
    """The computation of one device with which the prediction for the devices of a measured step equals that step.
    UserError if their communication alone takes longer, or if the step hardly depends on their computing."""
    assert step.samples is not None
    if step.gpus == 1:
        return from_one_step(config, machine, step, basis, blocks)
    samples = max(1, step.samples // step.gpus)  # of one device
    micro = min(samples, step.micro or samples)
    one = OneStep(step.seconds, samples - samples % micro, micro)  # a pipeline's micro batch may not divide them
    setting = setting_of(config, machine, step, from_one_step(config, machine, one, basis, blocks))
    for _ in range(ROUNDS):
        outcome = strategy(config.framework, setting)
        left = step.seconds - outcome.exposed_s
        if left <= 0:
            raise UserError(
                f"{basis}: {step.gpus} devices took {step.seconds:.4g} s a step, and communication alone is predicted "
                f"to take {outcome.exposed_s:.4g} s: measure one device"
            )
        factor = left / (outcome.step_s - outcome.exposed_s)
        one = replace(one, seconds=one.seconds * factor)
        setting = replace(setting, computation=from_one_step(config, machine, one, basis, blocks))
        if abs(factor - 1) < 1e-9:
            return setting.computation
    raise UserError(
        f"{basis}: messages of {step.gpus} devices take so long that their step of {step.seconds:.4g} s hardly depends "
        "on computing: measure one device"
    )


def _differences(run: AttemptRow, config: Config) -> list[str]:
    """Keys with different values that change the computing time of a sample, with both values."""
    names = {"recipe.optimizer.name", *(f"train.{key}" for key in ALIKE)}
    asked, recorded = (
        {key: value for key, value in given.items() if key in names or key.startswith("model.")}
        for given in (_options(config), _options(config, run))
    )
    recorded = {key: value for key, value in asked.items() if key.startswith("train.")} | recorded  # an older record
    values = {key: (recorded.get(key), asked.get(key)) for key in asked | recorded}
    return [f"{key}={shown(was)}, not {shown(now)}" for key, (was, now) in values.items() if was != now]


def _on(machine: Machine, row: Row) -> bool:
    """Whether a run was on this device."""
    kind = machine.device.type
    return row["device"] == kind and (kind == "cpu" or row["device_model"] == machine.device.name)
