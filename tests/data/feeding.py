"""Train a framework on feeds of real files, in this process's group of ranks, and keep what each rank received."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ddlbench.data.feed import Feed, Loader, Request
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.loaders.dali import Dali, DaliReader
from ddlbench.data.loaders.native import Native
from ddlbench.data.loaders.synthetic import Synthetic
from ddlbench.job import Batch, Framework, Job, Place, Trainer
from ddlbench.loop import Run, train
from ddlbench.measure.rows import EpochRow
from ddlbench.models.resnet import ResNet
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.recipe.recipe import Rates
from tests.support.equal import Rows, make_job
from tests.support.reference import Case

CLASSES = 26  # and as many files a split: a label says which of them a sample is
PIXELS = 32
MODEL = ResNet("resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=PIXELS, num_classes=CLASSES)
CASE = Case("fed", MODEL, micro_batch=2, global_batch=8, lr=1e-3)
LOADERS: list[Any] = [Dali("dali"), Native("native", workers=1), Synthetic("synthetic")]


@dataclass
class Fed:
    """What one rank saw of one epoch.

    batches: (labels of the valid samples, digest of the images) a training batch; validated: labels of all those of
    validation; computed: digest of the images that reached the first layer in training, None on ranks without it;
    sources: DALI's pipelines built, or worker processes that read
    """

    place: Place
    row: EpochRow
    batches: list[tuple[list[int], str]]
    validated: list[int]
    delivered: str
    computed: str | None
    sources: int


@dataclass
class Watched:
    """A feed that keeps what passes through it."""

    feed: Feed
    kept: tuple[list[Batch | None], list[Batch | None]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    def train(self, epoch: int) -> Iterator[Batch | None]:
        return self._keep(self.feed.train(epoch), self.kept[0])

    def validation(self) -> Iterator[Batch | None]:
        return self._keep(self.feed.validation(), self.kept[1])

    def _keep(self, batches: Iterator[Batch | None], kept: list[Batch | None]) -> Iterator[Batch | None]:
        for batch in batches:
            kept.append(batch)
            yield batch


def feed_all(frameworks: Sequence[Framework], data: ImageFolders) -> list[dict[str, Fed]]:
    """By framework and name of the loader."""
    return [feed_one(framework, data) for framework in frameworks]


def feed_one(framework: Framework, data: ImageFolders) -> dict[str, Fed]:
    job = make_job(CASE)
    framework.check(job)
    trainer = framework.setup(job)
    place = trainer.place
    result = {loader.name: one_epoch(trainer, job, place, loader, data) for loader in LOADERS}
    dist.barrier()
    trainer.close()
    return result


def one_epoch(trainer: Trainer, job: Job, place: Place, loader: Loader, data: ImageFolders) -> Fed:
    loader.check(data, MODEL, job.device)
    recorder = Rows()
    with first_layer() as computed, pipelines() as built:
        request = Request(MODEL, place, job.device, job.seed, job.replica_batch(place.data_size))
        feed = Watched(loader.open(data, request), ([], []))
        run = Run(
            job, place, cast(Feed, feed), epochs=1, warmup_steps=1, recorder=recorder, progress=Progress(False),
            boundary=Boundary(job.device),
        )  # fmt: skip
        train(run, trainer, Rates(CASE.rate))
        sources = len(built) + len(multiprocessing.active_children())
        feed.close()
    assert multiprocessing.active_children() == []
    given, checked = ([batch for batch in batches if batch is not None] for batches in feed.kept)
    return Fed(
        place,
        recorder.rows[0],
        [(labels(batch), digest([batch.inputs])) for batch in given],
        [label for batch in checked for label in labels(batch)],
        digest([batch.inputs for batch in given]),
        digest(computed) if computed else None,
        sources,
    )


def labels(batch: Batch) -> list[int]:
    return batch.targets[batch.valid].tolist()


def digest(images: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in images)).hexdigest()


@contextmanager
def first_layer() -> Iterator[list[Tensor]]:
    """What convolutions of whole images are given while gradients are wanted, micro batch by micro batch."""
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Conv2d) and inputs[0].shape[1:] == MODEL.input_shape() and torch.is_grad_enabled():
            seen.append(inputs[0].detach().clone())

    hook = register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def pipelines() -> Iterator[list[object]]:
    """DALI's, as they are built."""
    built: list[object] = []
    build = DaliReader.pipeline

    def counted(*args: Any) -> Any:
        built.append(build(*args))
        return built[-1]

    with patch.object(DaliReader, "pipeline", counted):
        yield built
