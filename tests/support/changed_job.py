"""Copies of a framework that are set up in another way. Ranks make them themselves, because they cannot be pickled."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ddlbench.job import Framework, Job

Kind = TypeVar("Kind", bound=Framework)


def with_setup(framework: Kind, setup: Callable[[Job], Any]) -> Kind:
    result = copy(framework)
    result.setup = setup
    return result


def changed(framework: Kind, **changes: Any) -> Kind:
    """Checked and set up with a job of which `changes` are replaced."""
    result = with_setup(framework, lambda job: framework.setup(replace(job, **changes)))
    result.check = lambda job: framework.check(replace(job, **changes))
    return result


def loaded(framework: Kind) -> Kind:
    """Set up with weights of another seed; the case's own are loaded afterwards, and training must start from them."""

    def setup(job: Job) -> Any:
        trainer = framework.setup(replace(job, seed=99))
        torch.manual_seed(job.seed)
        trainer.load(job.model.build().state_dict())
        return trainer

    return with_setup(framework, setup)
