"""The cells of a study: each one run of ddlbench, what it would measure, whether it is supported, and the seconds that
the oracle predicts for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlbench.config.compose import configuration, make_job, refusal, supports
from ddlbench.config.schema import Config
from ddlbench.errors import Unavailable, Unsupported, UserError
from ddlbench.oracle.machine.machine import Machine
from ddlbench.sweep.study import Study
from ddlbench.texts import digest

if TYPE_CHECKING:
    import torch

Check = Callable[[Config], None]
LETTERS = 16  # of the hashes that name cells
INVALID = "invalid"  # a combination that ddlbench refuses before it starts: no record, no row


@dataclass(frozen=True)
class Cell:
    """One run.

    values: its place on the study's axes
    words: ddlbench's command line, without results_dir
    key: identity of what is measured; state.py computes that of a record in the same way
    place: number of its point among all points of the study
    family: identity of the configuration, whatever the GPU count, repeat and seed
    refused: "unsupported" or "invalid" and the reason, if this is known before the start; else None
    """

    values: Mapping[str, Any]
    words: tuple[str, ...]
    gpus: int
    seed: int
    repeat: int
    limit_s: float
    key: str
    family: str
    place: int
    refused: tuple[str, str] | None = None

    @property
    def invalid(self) -> bool:
        """Whether ddlbench refuses its configuration, so that it cannot run at all."""
        return self.refused is not None and self.refused[0] == INVALID

    @property
    def name(self) -> str:
        """The cell in a few words: "ddp resnet50 gpus=2"."""
        return " ".join(
            str(value) if key in ("framework", "model", "loader") else f"{key}={value}"
            for key, value in self.values.items()
        )

    def command(self, results: Path) -> list[str]:
        """The words of its run, which records into the study's folder."""
        return [*self.words, f'results_dir="{results}"', "progress=false"]


def plan(study: Study, device: torch.device, *checks: Check) -> list[Cell]:
    """Every cell once, in the order in which cells start. Repeats are blocks: within each block the order is random
    over all other axes, so that a drift of the machine affects all configurations equally. A cell that is certainly
    unsupported has one repeat and one seed, because the outcome would be equal.

    device: of the machine that will run them
    checks: raise UserError or Unsupported for a configuration that would not start there
    """
    cells: dict[str, Cell] = {}
    for place, point in enumerate(study.points()):
        for cell in _runs(study, place, point, device, checks):
            if (same := cells.setdefault(cell.key, cell)) is not cell:
                raise UserError(f"{study.name}: {same.name} measures the same as {cell.name}: give one of these values")
    shuffled = sorted(cells.values(), key=lambda cell: cell.key)  # independent of the order of the axes
    random.Random(study.order).shuffle(shuffled)
    ordered = sorted(shuffled, key=lambda cell: (cell.repeat, study.seeds.index(cell.seed)))
    if all(cell.invalid for cell in ordered):
        assert ordered[0].refused
        raise UserError(f"{study.name}: no cell can run: {ordered[0].refused[1]}")
    return ordered


def key_of(identity: Mapping[str, Any], world_size: int) -> str:
    """The identity of a cell: what is measured, and the number of ranks. The name of the machine is left out, because a
    results folder belongs to one machine."""
    measured = {name: value for name, value in identity.items() if name != "cluster"}
    return digest([measured, world_size], LETTERS)


def predicted_s(machine: Machine, cell: Cell) -> float | None:
    """The predicted seconds of a cell's training steps on a machine: too few for large batches, because operations are
    taken at the device's peak, and nothing beside the steps is predicted. None if the oracle has no answer, or for an
    epoch of unknown length."""
    from ddlbench.oracle.measured.inputs import from_roofline
    from ddlbench.oracle.predictor import SAMPLES, Inputs, predict

    if cell.refused or (config := configuration(*cell.words)).mode != "train":
        return None  # the loader alone takes another time
    # The synthetic loader may set the number of samples; else it is that of the data.
    samples = getattr(config.loader, "train_samples", None) or SAMPLES.get(config.data.name)
    try:
        epoch_s = predict(config, cell.gpus, Inputs(machine, partial(from_roofline, machine=machine), samples)).epoch_s
    except UserError:
        return None
    return None if epoch_s is None else epoch_s * config.train.epochs


def data_check(here: bool) -> Check:
    """A check of the data, made once for each data set and model, with and without validation.

    here: whether the cells run on this machine; if not, a folder that is missing here may exist on the machine that
    runs them
    """
    reasons: dict[str, str | None] = {}

    def check(config: Config) -> None:
        validate, root = config.train.validate, config.data.root
        key = f"{config.data} {config.model} {validate}"
        if key not in reasons:
            elsewhere = not here and root is not None and not Path(root).exists()
            reasons[key] = None if elsewhere else refusal(partial(config.data.check, config.model, validate))
        if (reason := reasons[key]) is not None:
            raise UserError(reason)

    return check


def _runs(
    study: Study, place: int, point: Mapping[str, Any], device: torch.device, checks: Iterable[Check]
) -> Iterator[Cell]:
    """The seeds and repeats of one point, which are composed and checked once. A missing library is no reason to refuse
    them, because the machine that runs the cells may have it."""
    from ddlbench.ranks.launch import Launch
    from ddlbench.run.checkpoints import check_checkpoints
    from ddlbench.run.scenarios import Loading

    words, gpus = study.words(point), int(point["gpus"])
    identity: dict[str, Any] = {"words": words, "train": {}}
    refused: tuple[str, str] | None = None
    try:
        config = configuration(*words)
        if config.mode == "rehearsal":
            raise UserError("mode=rehearsal records nothing: it is no cell of a study, run python -m ddlbench")
        identity = config.identity()
        if config.checkpoint.every is not None and config.checkpoint.resume is None:
            words = (*words, "checkpoint.resume=true")  # a cell is started again only if it did not end well
        for check in checks:
            check(config)
        job = make_job(config, Launch("torchrun", world_size=gpus), device)
        if config.mode == "loader":
            Loading(config, job).check()
        else:
            supports(config.framework, job)
            check_checkpoints(config, job)
        config.loader.check(config.data, config.model, device)
    except Unavailable:
        pass
    except Unsupported as reason:
        refused = (reason.status, str(reason))
    except UserError as error:
        refused = (INVALID, str(error))
    family = digest(identity, LETTERS)
    for seed in study.seeds[: 1 if refused else None]:
        for repeat in range(1 if refused else study.repeats):
            measured = {**identity, "train": {**identity["train"], "seed": seed, "repeat": repeat}}
            numbered = (*words, f"train.seed={seed}", f"train.repeat={repeat}")
            key, limit_s = key_of(measured, gpus), study.limits_s.get(gpus, study.limit_s)
            yield Cell(dict(point), numbered, gpus, seed, repeat, limit_s, key, family, place, refused)
