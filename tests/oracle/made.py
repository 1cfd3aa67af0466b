"""Small settings with round numbers, for sums that can be done by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddlbench.config.keys import added_later
from ddlbench.config.schema import Config
from ddlbench.counts.counting import count
from ddlbench.counts.counts import Block, Counts, Floats, Line, Work
from ddlbench.foreign import section
from ddlbench.job import Job, Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from ddlbench.oracle.machine.machine import Device, Link, Machine, load
from ddlbench.oracle.measured.inputs import OneStep, from_one_step, from_roofline
from ddlbench.oracle.predictor import Inputs, Prediction, predict
from ddlbench.oracle.setting import Setting
from ddlbench.oracle.timing.computation import Computation, Speeds
from ddlbench.oracle.timing.schedule import Stages
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer, optimizers
from ddlbench.recipe.recipe import CrossEntropy
from ddlbench.results.reading.attempts import Attempt
from ddlbench.results.tables.merge import AttemptRow, measured_options
from ddlbench.results.tables.run_rows import run_row

# Two nodes of four: 1 us and 10 GB/s within, 10 us and 1 GB/s between.
LINKS = (Link("near", 1e-6, 10e9), Link("far", 10e-6, 1e9))
ABCI = load("abci")
MACHINE = Machine("made", Device("Tesla V100-SXM2-16GB", "cuda", 16e9, 900e9), 4, LINKS)
GPT = GPT2("gpt2_small", n_layer=2, n_embd=32, n_head=4, vocab_size=64, seq_len=8, dropout=0.0)
RESNET = ResNet("resnet50", [1, 1, 1, 1], width_per_group=16, image_size=64, num_classes=10)
VGG16 = VGG("vgg16", channels=[8, 8, 16, 16, 16], hidden=32, dropout=0.0, image_size=64, num_classes=10)


def job(world: int = 1, batch: int = 8, model: Model = GPT, **more: object) -> Job:
    return Job(
        model=model,
        loss=CrossEntropy(0.0),
        optimizer=partial(make_optimizer, OptimizerConfig("sgd", lr=0.1, momentum=0.9)),
        rank=0,
        local_rank=0,
        world_size=world,
        seed=0,
        global_batch=batch,
        **{"micro_batch": None, "device": torch.device("cuda"), **more},  # pyright: ignore
    )


def setting(world: int = 1, batch: int = 8, machine: Machine = MACHINE, model: Model = GPT, **more: object) -> Setting:
    """A setting with a real model, counted."""
    given = job(world, batch, model, **more)
    counts = count(model, given.precision, "cuda")
    return Setting(given, machine, Computation(counts, Speeds(15.7e12, 900e9), optimizers["sgd"].costs, "roofline"))


def record(asked: Config, ranks: int, step_s: float, **changes: Any) -> AttemptRow:
    """A complete run on V100s, as far as the oracle reads it; `changes` replace sections."""
    batch = 8 * ranks
    content = {
        "status": "ok",
        "config": asked.resolved,
        "launch": {"world_size": ranks, "device_type": "cuda"},
        "environment": {"gpu_model": "Tesla V100-SXM2-16GB"},
        "ledger": {"global_batch": batch, "data_size": ranks, "micro_batches": 1},
        "summary": {"throughput_samples_per_s": batch / step_s, "data_wait_share": 0.0},
    }
    attempt = Attempt(Path(f"results/run-{ranks}/attempt-1"), {**content, **changes})
    given = section(attempt.record, "config")
    return AttemptRow(run_row(attempt, []), measured_options(given, added_later(asked)), folder=attempt.path)


def by_roofline(asked: Config, gpus: int, cluster: str = "h100", **more: Any) -> Prediction:
    """A prediction for a cluster of the program, with each operation at the device's peak. more: inputs"""
    machine = load(cluster)
    return predict(asked, gpus, Inputs(machine, lambda given: from_roofline(given, machine), **more))


def by_one_step(asked: Config, gpus: int, machine: Machine, step: OneStep, **more: Any) -> Prediction:
    """A prediction from the measured step of one device. more: inputs"""
    return predict(asked, gpus, Inputs(machine, lambda given: from_one_step(given, machine, step), **more))


def work(seconds: float) -> Work:
    """One operation of so many FLOPs a sample."""
    return Work(np.array([seconds]), live(0.0), np.zeros(1, dtype=bool))


def block(name: str, forward: float, backward: float, numbers: int = 0, output: float = 0.0) -> Block:
    """Seconds a sample on a device of one FLOP a second."""
    return Block(name, work(forward), work(backward), (numbers,), 0, output, Line(0.0, 1.0), 0, (), ())


def live(*bytes_: float) -> Line[Floats]:
    """Bytes after each operation, whatever the batch size."""
    return Line(np.array(bytes_), np.zeros(len(bytes_)))


def sized(saved: float, forward: float, backward: float, accumulating: float, output: float = 0.0) -> Block:
    made = replace(block("made", 1, 2), saved=Line(saved, 0.0), output=output, live_forward=live(1, forward))
    return replace(made, live_backward=live(backward, 2), live_accumulating=live(accumulating))


# In MB: the example of docs/oracle.md. 10 and 20 are saved; 8 and 4 of gradients arrive.
KEPT, AGAIN = (0, 1), ((0,), (1,))  # plans of two blocks
A, B = sized(10, 11, 12, 4, output=3), sized(20, 22, 30, 26, output=1)


def made(world: int, blocks: list[Block], batch: int, machine: Machine = MACHINE, **more: Any) -> Setting:
    """A setting with blocks of given seconds; the update takes nothing."""
    counts = Counts(tuple(blocks), 0)
    computation = Computation(counts, Speeds(1.0, float("inf")), optimizers["sgd"].costs, "given")
    return Setting(job(world, batch, **more), machine, computation)


def equal(stages: int, send: float = 0.0) -> Stages:
    """Stages of 1 s forward and 2 s backward. send: seconds of a message to the next one"""
    return Stages((1.0,) * stages, (2.0,) * stages, (send,) * (stages - 1) + (0.0,))
