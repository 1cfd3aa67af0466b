"""The seconds of a cell on a machine, predicted by the oracle, for cells that no finished run resembles."""

from __future__ import annotations

from functools import partial

import torch

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.measure.formulas.flops import check_precision
from ddlbench.oracle.machine import machine as machines
from ddlbench.oracle.measured.inputs import from_roofline
from ddlbench.oracle.predictor import SAMPLES, Inputs, predict
from ddlbench.sweep.plan import Cell


class Forecast:
    """The predicted seconds of a cell's training steps, as a function of the cell: too few for large batches, because
    operations are taken at the device's peak, and nothing beside the steps is predicted. None if the oracle has no
    answer, or for an epoch of unknown length."""

    def __init__(self, machine: str) -> None:
        """machine: a description's name or file, as cluster= of the predict command. UserError where there is none"""
        self.machine = machines.load(machine)
        self.device = torch.device(self.machine.device.type)

    def check(self, config: Config) -> None:
        """Unsupported for a precision that the machine's device lacks."""
        check_precision(config.train.precision, self.machine.device.name)

    def __call__(self, cell: Cell) -> float | None:
        if cell.refused:
            return None
        config = configuration(*cell.words)
        if config.mode != "train":  # the loader alone takes another time, which the oracle does not predict
            return None
        # Of the synthetic loader, where it says how many, or of the data.
        samples = getattr(config.loader, "train_samples", None) or SAMPLES.get(config.data.name)
        inputs = Inputs(self.machine, partial(from_roofline, machine=self.machine), samples=samples)
        try:
            epoch_s = predict(config, cell.gpus, inputs).epoch_s
        except UserError:
            return None
        return None if epoch_s is None else epoch_s * config.train.epochs
