"""Train a case with the package's own loop, loader and framework, in this process's group of ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddlbench.config.compose import counted_links
from ddlbench.data.feed import Feed, Request
from ddlbench.data.loaders.native import Native
from ddlbench.frameworks.pipeline import stages
from ddlbench.frameworks.shared.groups import gradient
from ddlbench.job import Batch, Framework, Job, Model, Place, Trainer
from ddlbench.loop import Recorder, Run, train
from ddlbench.measure.formulas.flops import forward_flops_per_block
from ddlbench.measure.rows import EpochRow
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.ranks.control import barrier
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from ddlbench.recipe.recipe import CrossEntropy, Rates, Recipe
from ddlbench.record.run_json import training_ledger, weights_hash
from tests.support.reference import Case, Outcome
from tests.support.tiny import samples
from tests.support.trace import Trace

COUNTED: dict[str, dict[str, int]] = {}


@dataclass
class Rows(Recorder):
    """Keeps the rows that a recorder would write."""

    rows: list[EpochRow] = field(default_factory=list[EpochRow])

    def epoch(self, run: Run, row: EpochRow) -> None:
        self.rows.append(row)


def optimizer_of(case: Case) -> OptimizerConfig:
    return OptimizerConfig(case.optimizer, lr=case.lr, momentum=0.9, weight_decay=1e-4)


def make_job(case: Case) -> Job:
    return Job(
        model=case.model, loss=CrossEntropy(0.0), optimizer=partial(make_optimizer, optimizer_of(case)),
        device=torch.device("cpu"), rank=dist.get_rank(), local_rank=dist.get_rank(), world_size=dist.get_world_size(),
        seed=case.seed, global_batch=case.global_batch, micro_batch=case.micro_batch, precision=case.precision,
        clip_norm=case.clip_norm, checkpoint_activations=case.checkpoint_activations,
        offload_activations=case.offload_activations, compile=case.compile, timeout_s=60.0, links=counted_links,
    )  # fmt: skip


def train_case(case: Case, framework: Framework, timeout_s: float | None = 30.0) -> Outcome:
    """Losses over all replicas, final weights and metrics; the same on every rank but the weights, which only rank 0
    has. timeout_s: for collectives in flight where the clock asks for an idle device; below that of the job, which
    would end them."""
    with Trace(timeout_s) as trace, patch.object(stages, "forward_flops_per_block", flops_per_block):
        outcome = _train(case, framework, trace)
        assert not trace.first_uses(), trace.first_uses()
    outcome.trace = trace.events, trace.members
    return outcome


def flops_per_block(model: Model) -> dict[str, int]:
    """As every pipeline counts them while it is set up: in the tests once for a model."""
    name = repr(model)
    if name not in COUNTED:
        COUNTED[name] = forward_flops_per_block(model)
    return COUNTED[name]


def _train(case: Case, framework: Framework, trace: Trace) -> Outcome:
    job, recorder = make_job(case), Rows()
    framework.check(job)
    trainer = framework.setup(job)
    trace.set_up()
    start = trainer.state() or {}
    feed = feed_of(case, job, trainer.place)
    run = Run(
        job, trainer.place, feed, epochs=1, warmup_steps=1, recorder=recorder, progress=Progress(False),
        boundary=Boundary(job.device, trace.step_ended),
    )  # fmt: skip
    rates = Rates(case.rate)
    train(run, trainer, rates)
    row = recorder.rows[0]
    losses = [sum(step) / len(step) for step in zip(*(rank.losses for rank in row.ranks if rank.losses), strict=True)]
    outcome = Outcome(losses, trainer.state() or {}, row.metrics, trainer.updates, start)
    recipe = cast(Recipe, SimpleNamespace(name="tests", optimizer=optimizer_of(case), label_smoothing=0.0))
    trained = training_ledger(run, trainer, rates, recipe, row.steps)
    outcome.ledger = trained | {"weights_hash_start": weights_hash(start)}
    assert row.metrics["val_samples"] == case.val_samples
    feed.close()
    barrier()
    trainer.close()
    return outcome


def batch_for(job: Job, place: Place, seed: int = 1) -> Batch | None:
    """Samples of one update of a replica, on the ranks that read them."""
    if not place.reads_data:
        return None
    count = job.replica_batch(place.data_size)
    return Batch(*samples(job.model, count, seed), torch.ones(count, dtype=torch.bool))


@contextmanager
def ready(framework: Framework, job: Job, seed: int = 1) -> Generator[tuple[Any, Batch | None]]:
    """The trainer, set up, and samples of one update. It is closed as soon as all ranks have ended what is in the
    context."""
    trainer = framework.setup(job)
    yield trainer, batch_for(job, trainer.place, seed)
    barrier()
    trainer.close()


def facts_of(case: Case, framework: Framework) -> dict[str, Any]:
    """As the record has them where no step was made."""
    with ready(framework, make_job(case)) as (trainer, _):
        return trainer.facts()


def outputs(trainer: Trainer, batch: Batch | None) -> Tensor | None:
    """The model's outputs [B, ...] for all samples in evaluation mode; None where a rank does not report."""
    parts = list[Tensor]()
    trainer.evaluate(batch, lambda output, _: parts.append(output.clone()))
    return torch.cat(parts) if parts else None


def reload(case: Case, framework: Framework) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Load another state into a trainer that has made a step and an evaluation: the state given back, the state loaded,
    and how far outputs are from the plain model's with that state."""
    with ready(framework, make_job(case), 1 + dist.get_rank()) as (trainer, batch):
        trainer.step(batch)
        trainer.flush()
        outputs(trainer, batch)
        shared = [trainer.state()]
        dist.broadcast_object_list(shared)
        doubled = {name: tensor * 2 for name, tensor in (shared[0] or {}).items()}
        trainer.load(doubled)
        plain = case.model.build()
        plain.load_state_dict(doubled)
        output = outputs(trainer, batch)
        assert (output is not None) == trainer.place.reports
        off = (output - plain(batch.inputs)).abs().max().item() if output is not None and batch is not None else 0.0
        return trainer.state() or {}, doubled, off


def assert_reloaded(by_rank: Iterable[tuple[dict[str, Tensor], dict[str, Tensor], float]], model: Model) -> None:
    """What `reload` returned: a trainer computes with the state that it loaded, and gives it back on rank 0."""
    for rank, (given, loaded, off) in enumerate(by_rank):
        assert off < 1e-5
        assert list(given) == ([] if rank else list(model.build().state_dict()))
        assert all(torch.equal(given[name], loaded[name]) for name in given)


def overflow(framework: Framework, job: Job, only: str = "") -> tuple[int, bool, int, bool]:
    """After a step the updates so far, and whether this rank's weights have moved: after an update whose gradients are
    not finite on rank 1, and after another step. only: the one parameter with such a gradient; "": all of them"""

    def weights() -> list[Tensor]:
        parameters = trainer.model.parameters()
        return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in parameters]

    def moved() -> bool:
        return any(not torch.equal(*pair) for pair in zip(before, weights(), strict=True))

    with ready(framework, job, 1 + job.rank) as (trainer, batch):
        trainer.step(batch)
        before = weights()
        for name, parameter in trainer.model.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            if job.rank == 1 and only in ("", name):
                gradient(parameter).fill_(torch.inf)
        trainer.update.apply(trainer.model.parameters())
        skipped = trainer.updates, moved()
        trainer.step(batch)
        return *skipped, trainer.updates, moved()


def loader() -> Native:
    return Native(name="native", workers=0)


def feed_of(case: Case, job: Job, place: Place) -> Feed:
    """What a training of the case reads, without loader workers."""
    size = job.replica_batch(place.data_size)
    return loader().open(case.data, Request(case.model, place, job.device, job.seed, size))


def train_cases(cases: Sequence[tuple[Case, Framework]]) -> list[Outcome]:
    linear, results = torch.nn.functional.linear, list[Outcome]()
    for case, framework in cases:
        results.append(train_case(case, framework))
        torch.nn.functional.linear = linear  # DeepSpeed's stage 3 leaves its own there, for all that follows
    return results
