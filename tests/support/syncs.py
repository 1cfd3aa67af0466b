"""Which calls of a training step would make the host wait for a GPU, counted on ranks that compute on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddlbench.errors import Unsupported
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.job import Framework
from ddlbench.rehearsal import observed
from tests.support.equal import batch_for, make_job
from tests.support.reference import Case
from tests.support.strategies import Strategy, strategies

METHODS = observed.METHODS | {torch.tensor: "tensor"}  # they do nothing, or copy nothing, on the CPU
Found = dict[tuple[str, str], Counter[str]]


class Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call := observed.needed_by_host(func, args):  # torch dispatches them on every device
            self.counts[call] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.counts[METHODS[func]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Generator[Counter[str]]:
    """The calls made within, by name."""
    counts = Counter[str]()
    with Methods(counts), Operations(counts):
        yield counts


def every_strategy(world: int, case: Case) -> Iterator[Strategy]:
    yield from strategies(world, case)
    yield Strategy("local_sgd", LocalSGD(local_steps=1), world)
    yield Strategy("pipedream", PipeDream(), 1, micro_batch=2)
    yield Strategy("pipedream-prediction", PipeDream(correction="prediction"), 1, micro_batch=2)
    yield Strategy("pipedream_2bw", PipeDream(double_buffered=True), 1, micro_batch=2)


def counts_of(case: Case, framework: Framework) -> Counter[str] | None:
    """Counts of the third step: the first ones make what lasts, such as an optimizer's state, a traced order of layers.
    None where the framework refuses the case."""
    job = make_job(case)
    try:
        framework.check(job)
    except Unsupported:
        return None
    trainer = framework.setup(job)
    place = trainer.place
    batch = batch_for(job, place)
    for _ in range(2):
        trainer.step(batch)
    with counted() as counts:
        trainer.step(batch)
    trainer.flush()
    dist.barrier()
    trainer.close()
    return counts


def count_all(cases: Sequence[Case]) -> Found:
    counts = {
        (case.name, strategy.name): counts_of(case, strategy.framework)
        for case in cases
        for strategy in every_strategy(dist.get_world_size(), case)
    }
    return {key: each for key, each in counts.items() if each is not None}
