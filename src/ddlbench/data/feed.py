"""The interface between the training loop and data: a dataset has samples, a loader opens it as a feed of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ddlbench.data.staging import StagedFiles
from ddlbench.job import Batch, Model, Place


@dataclass(frozen=True)
class Request:
    """What a feed must deliver, and for which replica.

    replica_batch: samples this replica sees in one update; validation batches have the same size
    steps: cap on the training steps of an epoch, None for all full global batches
    cores: of each rank, for the default numbers of workers and threads
    """

    model: Model
    place: Place
    device: torch.device
    seed: int
    replica_batch: int
    steps: int | None = None
    channels_last: bool = False
    cores: int = 1

    @property
    def global_batch(self) -> int:
        return self.replica_batch * self.place.data_size


class Feed(Protocol):
    """Batches of one replica, already on its device."""

    steps_per_epoch: int  # training steps `train` yields: full global batches, at most Request.steps
    dropped_samples: int  # training samples of an epoch left over by the incomplete last global batch
    val_samples: int  # validation samples over all replicas
    val_unread: int  # samples of the last validation that this rank could not read; they do not count

    def train(self, epoch: int) -> Iterator[Batch | None]:
        """`steps_per_epoch` batches of `replica_batch` samples; None on a rank that does not read data."""
        ...

    def validation(self) -> Iterator[Batch | None]:
        """Every validation sample exactly once over all replicas; equally many batches on every rank."""
        ...

    def facts(self) -> dict[str, Any]:
        """For the record: workers, decoder, crops, and the samples that could not be read, by name."""
        ...

    def close(self) -> None:
        """Stop workers."""


class Fetched(NamedTuple):
    """Samples read by a split or a loader: shapes as in Batch.

    inputs: images as uint8, as every split gives them, or float32 where a loader has normalized them already; tokens
    valid: False where a sample could not be read (validation only: training uses another sample instead)
    bad: names of the samples that could not be read
    """

    inputs: Tensor
    targets: Tensor
    valid: Tensor
    bad: tuple[str, ...] = ()


class Split(Protocol):
    """Training or validation samples with random access; picklable, so that loader workers can hold it."""

    def __len__(self) -> int: ...

    def __getitems__(self, keys: list[tuple[int, int]]) -> Fetched:
        """The samples of the (epoch, index) keys, in that order, as one batch. Augmentation depends on
        (seed, epoch, index) alone, so no layout and no worker count changes a sample."""
        ...


class Dataset(Protocol):
    """Training and validation data. Dataclass fields are the keys of `data.` in the configuration.

    kind: "images" | "text", as Model.kind
    root: folder that holds the data, None: none was given
    mapped: whether samples are read from memory-mapped files, of which the kernel counts no bytes
    stage_to: folder of each node's own storage to read copies from, None: the originals are read
    costly: whether samples are decoded or tokenized, so that worker processes are useful
    """

    name: str
    kind: str
    root: str | None
    stage_to: str | None
    mapped: bool
    costly: bool

    def check(self, model: Model, validate: bool = True) -> None:
        """Raise UserError, the same on every rank, when the user's data are missing or do not fit the model.

        validate: whether validation samples are read; without it image folders need no validation folder
        """

    def prepare(self) -> None:
        """Make sample sets and indices; one rank calls it, and it is safe if several do."""

    def files_to_stage(self) -> list[StagedFiles]:
        """The files that each node copies to its own storage before splits can be read, where `stage_to` is set."""
        ...

    def files_read(self) -> Iterable[Path]:
        """The files of both splits that samples are read from: this node's copies where `stage_to` is set."""
        ...

    def split(self, train: bool, model: Model, seed: int) -> Split:
        """The training samples (augmented by `seed`) or the validation samples, shaped for the model."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the record, after prepare: hash, train_samples, val_samples, and for text words and tokenizer."""
        ...


@runtime_checkable
class Loader(Protocol):
    """How data is read. Dataclass fields are the keys of `loader.` in the configuration.

    scored: whether a model's answers on these samples say something about it
    counts_reads: whether the kernel counts the bytes that it reads of files that are not memory-mapped
    drops_cache: whether it reads files and maps none, so that their pages can be dropped from memory
    decodes_on_host: whether it decodes images on the host alone, so that another loader can take work off the host
    pinned: whether batches come from pinned memory of the host; None: they are made on the device
    parallel_key: the key of `loader.` that sets the number of threads or processes of a rank; None: it has none
    """

    scored: ClassVar[bool] = True
    counts_reads: ClassVar[bool] = True
    drops_cache: ClassVar[bool] = False
    decodes_on_host: ClassVar[bool] = False
    parallel_key: ClassVar[str | None] = None
    name: str

    @property
    def pinned(self) -> bool | None:
        return None

    def check(self, dataset: Dataset, model: Model, device: torch.device) -> None:
        """Raise Unsupported or Unavailable for what this loader cannot read, if there is anything.

        device: of the machine that will run it
        """

    def open(self, dataset: Dataset, request: Request) -> Feed: ...
