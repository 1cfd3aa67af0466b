"""Trainings with old weights, and what each must equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.job import Job, Model
from ddlbench.models.gpt2 import GPT2
from tests.equality.cases import MODELS
from tests.equality.distances import TOLERANCES, Tolerance, distance
from tests.support.broken import Emptied
from tests.support.jobs import job
from tests.support.reference import Case, Outcome, Rule, stale_reference

TIED, RESNET, VGG = MODELS["gpt2"], MODELS["resnet"], MODELS["vgg"]
UNTIED = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0, tie_weights=False)
CHANGING = [0.02, 0.03, 0.005, 0.04, 0.01]


def no_rule(ages: Mapping[str, int]) -> Rule:
    return Rule()


@dataclass(frozen=True)
class Trial:
    """staleness: of each stage, in updates, worked out by hand; rules: as `stale_reference` takes them"""

    case: Case
    framework: PipeDream
    staleness: Sequence[int]
    rules: Callable[[Mapping[str, int]], Rule] = no_rule
    replicas: int = 1

    def expected(self, **changed: Any) -> Outcome:
        assert self.framework.balance is not None
        emptied = 3 if isinstance(self.framework, Emptied) else 0
        keys = {"staleness": self.staleness, "data_size": self.replicas, "emptied": emptied, "rules": self.rules}
        return stale_reference(self.case, self.framework.balance, **keys | changed)

    def fresh(self) -> Outcome:
        return self.expected(staleness=[0] * len(self.staleness), emptied=0)

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.case.model.name, self.case.precision]

    def assert_differs(self, outcome: Outcome, expected: Outcome) -> None:
        """Else the comparison would pass with this outcome, too."""
        assert distance(outcome.weights, expected) > 2 * self.tolerance.weights


def of(world_size: int, model: Model = VGG, **job_keys: Any) -> Job:
    return replace(job(), model=model, world_size=world_size, **{"global_batch": 12, "micro_batch": None, **job_keys})
