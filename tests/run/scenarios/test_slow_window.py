"""A rank that sleeps is seen in a profiled window: its step without data wait and exposed communication is longer."""

from __future__ import annotations

import time
from typing import Any

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.job import Framework
from ddlbench.measure.summary import own_columns, own_steps_of_window
from ddlbench.models.resnet import ResNet
from tests.run.scenarios.windows import windows
from tests.support.ranks import run_ranks
from tests.support.reference import Case

WORLD, SLOW, STEPS, SLEEP_S = 3, 1, 2, 1.0
HOSTS = ["node0", "node1", "node2"]
MODEL = ResNet("resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=32, num_classes=5)
CASE = Case("slow", MODEL, global_batch=6, steps=STEPS + 2)
FRAMEWORKS: dict[str, Framework] = {"ddp": DDP(), "fsdp": FSDP()}


def late(trainer: Any, rank: int) -> Any:
    if rank == SLOW:
        trainer.model.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))
    return trainer


def test_the_rank_that_sleeps_is_named_by_its_host() -> None:
    for name, section in run_ranks(WORLD, windows, CASE, FRAMEWORKS, STEPS, late)[0].items():
        assert all(rank["window_s"] >= STEPS * SLEEP_S for rank in section["ranks"]), "every rank is equally late"
        ranks = [rank | {"host": HOSTS[rank["rank"]]} for rank in section["ranks"]]
        columns = own_columns(own_steps_of_window(section | {"ranks": ranks}), "window")
        assert (columns["straggler_rank"], columns["straggler_host"]) == (SLOW, HOSTS[SLOW]), name
        assert columns["own_step_s"] >= SLEEP_S, name
