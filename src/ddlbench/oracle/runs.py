"""--from RESULTS: predictions from measured runs on one device, or on a few devices."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ddlbench.config.keys import shown
from ddlbench.config.schema import Config
from ddlbench.errors import Unsupported, UserError
from ddlbench.foreign import section
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import Learned, OneStep, from_one_step, learn
from ddlbench.oracle.predictor import job_of, strategy
from ddlbench.oracle.setting import Setting
from ddlbench.oracle.timing.computation import Computation
from ddlbench.results.reading.attempts import Attempt, read_all
from ddlbench.results.rows import wait_column, without_data_wait
from ddlbench.results.tables.run_rows import attempt_row

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
    settings: Mapping[str, Any]  # that change what several devices send
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
    """The records of a folder. torch: the version of the predictions; None: that of the runs"""

    folder: Path
    attempts: list[Attempt]
    torch: str | None = None

    @classmethod
    def read(cls, folder: Path, torch: str | None = None) -> Results:
        """All attempts except those that ended ok without a rate that the tables use."""
        attempts = {attempt.identity: attempt for attempt in read_all([folder]).attempts}  # copies count once
        usable = [
            attempt
            for attempt in attempts.values()
            if attempt.record.get("status") != "ok" or attempt_row(attempt).row["throughput_samples_per_s"]
        ]
        return cls(folder, usable, torch)

    def computation(self, config: Config, machine: Machine, blocks: Computation | None = None) -> Computation:
        """The computation, from the run that `_chosen` takes. UserError without a run.

        blocks: measured blocks; a step is divided in their proportions. None: in the proportions of the roofline
        """
        framework: Any = config.framework
        bases = self._bases(config, machine)
        base = _chosen(bases, config)
        if base is None:
            records = (attempt.record for attempt in self.attempts if _same_device(attempt.record, machine))
            settings = (section(record, "config") for record in records)
            same = (run for run in settings if section(run, "model").get("name") == config.model.name)
            nearest = min(filter(None, (_differences(run, config) for run in same)), key=len, default=())
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
        wanted = _settings(config.resolved, config)
        same = [run for run in bases if run.settings == wanted and run.torch == base.torch]
        more = [run for run in same if run.ranks > base.ranks and run.cluster == base.cluster]
        # Another batch of a device would be learned as another link. Strong scaling has no two equal ones.
        weak = [run for run in more if run.samples * base.ranks == base.samples * run.ranks]
        strong = [run for run in more if run.samples == base.samples]
        steps = sorted((run.step for run in weak or strong), key=lambda step: step.gpus)
        if not steps:
            return None

        def predicted(machine: Machine) -> list[float]:
            computation = from_devices(config, machine, base.step, "the base", blocks)
            settings = (setting_of(config, machine, step, computation) for step in steps)
            return [strategy(config.framework, setting).step_s for setting in settings]

        try:
            return learn(machine, predicted, [step.seconds for step in steps], steps[-1].gpus)
        except Unsupported:  # the oracle has no equations for it, as its row will say
            return None

    def _bases(self, config: Config, machine: Machine) -> list[Base]:
        """The runs that a prediction can start from, those with the label of this cluster alone if there are any.
        Repeats become one run with the median of their seconds, in the place of the last repeat."""
        runs = [base for attempt in self.attempts if (base := _base(attempt, config, machine)) is not None]
        runs = [run for run in runs if run.cluster == machine.name] or runs
        last = [run for index, run in enumerate(runs) if run not in runs[index + 1 :]]
        return [replace(run, seconds=median(repeat.seconds for repeat in runs if repeat == run)) for run in last]

    def loader_rate(self, config: Config) -> float | None:
        """Samples a second that one rank loads: the median of complete mode=loader runs of the same data with the same
        loader, its settings and the same size of a sample."""
        wanted, rates = _loading(config.resolved), list[float]()
        for record in (attempt.record for attempt in self.attempts):
            settings = section(record, "config")
            rate = _number(section(record, "summary").get("throughput_samples_per_s"))
            ranks = _number(section(record, "launch").get("world_size"))
            complete = record.get("status") == "ok" and settings.get("mode") == "loader"
            if complete and _loading(settings) == wanted and rate and ranks:
                rates.append(rate / ranks)
        return median(rates) if rates else None

    def samples(self, config: Config) -> int | None:
        """Training samples of this data; for text, with sequences of this length."""
        wanted = config.resolved["model"].get("seq_len")
        for record in (attempt.record for attempt in reversed(self.attempts)):
            dataset, model = section(record, "dataset"), section(section(record, "config"), "model")
            count = _number(dataset.get("train_samples"))
            if count and dataset.get("name") == config.data.name and model.get("seq_len") == wanted:
                return int(count)
        return None


def _loading(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """The parts of a configuration that change the work of a loader."""
    model = section(settings, "model")
    loader = {key: value for key, value in section(settings, "loader").items() if key != "_target_"}
    return section(settings, "data").get("name"), loader, model.get("image_size"), model.get("seq_len")


def _base(attempt: Attempt, config: Config, machine: Machine) -> Base | None:
    """The base in a record. None for an incomplete run, for another model, device or precision, and for ranks that
    share a device, or that are spread over the nodes in another way than in the oracle."""
    record = attempt.record
    launch, summary, settings = section(record, "launch"), section(record, "summary"), section(record, "config")
    ledger = section(record, "ledger")
    rate, batch = _number(summary.get("throughput_samples_per_s")), _number(ledger.get("global_batch"))
    ranks, count = _number(launch.get("world_size")), _number(ledger.get("micro_batches")) or 1
    if record.get("status") != "ok" or settings.get("mode", "train") != "train" or not rate or not batch or not ranks:
        return None
    if _differences(settings, config) or not _same_device(record, machine) or launch.get("developer"):
        return None
    if _number(launch.get("nodes")) not in (None, machine.nodes(int(ranks))):
        return None
    seconds = without_data_wait(batch / rate, _number(summary.get(wait_column(summary))))
    replicas = _number(ledger.get("data_size")) or 1
    micro = max(1, int(batch / replicas / count))
    keys = _settings(settings, config)
    version = str(section(record, "environment").get("torch", ""))
    label = str(section(settings, "cluster").get("name", ""))
    names = launch.get("hosts") if machine.device.type == "cpu" else None
    hosts = tuple(sorted(map(str, names))) if isinstance(names, list) else ()
    name = str(keys.get("name", ""))
    return Base(name, keys, int(ranks), int(batch), micro, seconds, attempt.path, version, label, hosts)


def _settings(settings: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The keys of a configuration that change what several devices send: the keys of the framework, and the type of
    sums. An older record may lack a key that `config` has."""
    keys = {key.removeprefix("framework."): value for key, value in config.added_later.items() if "framework." in key}
    keys |= {
        **section(settings, "framework"),
        "train.reduce_dtype": section(settings, "train").get("reduce_dtype", "fp32"),
    }
    return {key: value for key, value in keys.items() if key != "_target_"}


def _chosen(bases: Sequence[Base], config: Config) -> Base | None:
    """The run that a prediction starts from: of this framework on one device, else of `single` or any other framework
    on one device, else of this framework on as few devices as possible. If there are several such runs, those with the
    nearest micro batch count, then those with the asked settings of the framework, then the last run."""
    framework: Any = config.framework
    micro = config.train.samples_per_micro_batch()
    wanted = _settings(config.resolved, config)
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


def _number(value: Any) -> float | None:
    """A finite number above 0."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None


def _differences(settings: Mapping[str, Any], config: Config) -> list[str]:
    """Keys with different values that change the computing time of a sample, with both values."""
    train = section(settings, "train")
    asked = {f"model.{key}": value for key, value in vars(config.model).items()}
    asked |= {f"train.{key}": getattr(config.train, key) for key in ALIKE}
    asked["recipe.optimizer"] = config.recipe.optimizer.name
    recorded = {f"model.{key}": value for key, value in section(settings, "model").items()}
    before = asked | config.added_later  # an older record may lack a key
    recorded |= {f"train.{key}": train.get(key, before[f"train.{key}"]) for key in ALIKE}
    recorded["recipe.optimizer"] = section(section(settings, "recipe"), "optimizer").get("name")
    names = [
        name for name in asked | recorded if not name.endswith("._target_") and asked.get(name) != recorded.get(name)
    ]
    return [f"{name}={shown(recorded.get(name))}, not {shown(asked.get(name))}" for name in names]


def _same_device(record: Mapping[str, Any], machine: Machine) -> bool:
    launch, environment = section(record, "launch"), section(record, "environment")
    if launch.get("device_type") != machine.device.type:
        return False
    return machine.device.type == "cpu" or environment.get("gpu_model") == machine.device.name
