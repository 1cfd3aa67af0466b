"""Which samples a replica sees, computed by hand; batches on their way to the device: the order of streams, what keeps
memory alive, and the pixels that arrive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from ddlbench.data.feed import Fetched
from ddlbench.data.loaders import replica_feed
from ddlbench.data.loaders.replica_feed import (
    ToDevice,
    epoch_order,
    normalize,
    normalized,
    training_steps,
    validation_batches,
)
from ddlbench.errors import UserError
from ddlbench.job import Batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# Mean and spread of ImageNet's training images, as torchvision's published models expect them.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TO_FLOAT = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(*IMAGENET)])


def test_epoch_order_is_a_pinned_permutation():
    # numpy promises that RandomState's stream never changes: a run of today can be repeated in ten years.
    assert epoch_order(8, seed=0, epoch=0).tolist() == [2, 6, 0, 4, 1, 3, 5, 7]
    assert sorted(epoch_order(1000, seed=3, epoch=7)) == list(range(1000))


def test_epochs_and_seeds_give_different_orders():
    orders = [epoch_order(50, seed, epoch).tolist() for seed in (0, 1, 2**32, 2**32 + 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 8


def test_training_steps():
    assert training_steps(53, 12) == 4
    assert training_steps(53, 12, cap=3) == 3
    assert training_steps(53, 12, cap=9) == 4
    with pytest.raises(UserError, match=r"53 training samples.*global batch of 54.*train.global_batch"):
        training_steps(53, 54)


def test_validation_shards_by_hand():
    def lists(rank, size):
        return [batch.tolist() for batch in validation_batches(7, 2, rank, size)]

    assert lists(0, 1) == [[0, 1], [2, 3], [4, 5], [6]]
    assert lists(0, 2) == [[0, 2], [4, 6]]
    assert lists(1, 2) == [[1, 3], [5]]
    assert lists(0, 3) == [[0, 3], [6]]
    assert lists(1, 3) == [[1, 4], []]
    assert lists(2, 3) == [[2, 5], []]
    assert [len(lists(rank, 4)) for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [1, 11, 12, 13])
def test_every_validation_sample_exactly_once_in_equal_steps(samples, data_size):
    shards = [validation_batches(samples, 3, rank, data_size) for rank in range(data_size)]
    assert len({len(shard) for shard in shards}) == 1
    assert sorted(int(i) for shard in shards for batch in shard for i in batch) == list(range(samples))


def images(number: int, samples: int = 3, valid: int = 3) -> Batch:
    """Every level of every channel, another order for each number."""
    random = torch.Generator().manual_seed(number)
    pixels = torch.stack([torch.randperm(256, generator=random) for _ in range(samples * 3)])
    return Batch(
        pixels.to(torch.uint8).view(samples, 3, 16, 16), torch.full((samples,), number), torch.arange(samples) < valid
    )


def tokens() -> Batch:
    return Batch(torch.arange(6).view(2, 3), torch.arange(6).view(2, 3), torch.ones(2, dtype=torch.bool))


@dataclass
class Recorded:
    """The calls of streams, in order, as (stream, call). Tensors stay on the CPU."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    current: str = "compute"

    def note(self, what: str, stream: str | None = None) -> None:
        self.calls.append((stream or self.current, what))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def fetched(self, batches: list[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            self.note(f"fetch {number}")
            yield batch


@dataclass
class Stream:
    recorded: Recorded
    name: str

    def wait_event(self, event: Event) -> None:
        self.recorded.note(f"wait for {event.what}", self.name)


@dataclass
class Event:
    recorded: Recorded
    what: str = "nothing"

    def record(self, stream: Stream) -> None:
        self.what = f"event after call {len(self.recorded.calls)} of {stream.name}"
        self.recorded.note("record event", stream.name)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()

    real_to = torch.Tensor.to

    def to(tensor: torch.Tensor, *to: Any, **how: Any) -> torch.Tensor:
        if to != (CUDA,):
            return real_to(tensor, *to, **how)
        assert how["non_blocking"]
        made.note("copy")
        return tensor.clone()

    def noting_normalize(pixels: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        made.note("normalize")
        return normalize(pixels, out)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made, "side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(made))
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(made, made.current))
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: made.note("record_stream", stream.name))
    monkeypatch.setattr(replica_feed, "normalize", noting_normalize)
    return made


def sent(number: int) -> list[tuple[str, str]]:
    return [("side", f"fetch {number}"), *[("side", "copy")] * 3, ("side", "record event")]


def received(call: int) -> list[tuple[str, str]]:
    """call: of the side stream's last copy for this batch."""
    waited = ("compute", f"wait for event after call {call} of side")
    return [waited, *[("compute", "record_stream")] * 3, ("compute", "normalize")]


def test_a_copy_runs_on_the_side_stream_one_batch_ahead(recorded: Recorded) -> None:
    batches = [images(number) for number in range(3)]
    moved = ToDevice(CUDA, channels_last=False)(recorded.fetched(batches))
    assert recorded.calls == [], "nothing is fetched before it is asked for"
    first = next(moved)
    assert recorded.calls == [*sent(0), *received(4), *sent(1)]
    recorded.note("step 0")
    second = next(moved)
    assert recorded.calls[16:] == [*received(14), *sent(2)]
    third = next(moved)
    assert recorded.calls[26:] == received(25)
    assert next(moved, None) is None
    assert recorded.current == "compute"
    for batch, got in zip(batches, (first, second, third), strict=True):
        assert torch.equal(got.inputs, TO_FLOAT(batch.inputs))
        assert torch.equal(got.targets, batch.targets)


def test_what_was_sent_is_free_when_the_next_copy_begins(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels_sent = list[weakref.ref[torch.Tensor]]()

    def noting_normalize(pixels: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        pixels_sent.append(weakref.ref(pixels))
        return normalize(pixels, out)

    def fetched() -> Iterator[Batch]:
        for number in range(3):
            assert [pixels() for pixels in pixels_sent] == [None] * number
            yield images(number)

    monkeypatch.setattr(replica_feed, "normalize", noting_normalize)
    assert len(list(ToDevice(CUDA, channels_last=False)(fetched()))) == 3


def test_tokens_are_copied_ahead_and_left_as_they_are(recorded: Recorded) -> None:
    (got,) = ToDevice(CUDA, channels_last=True)(iter([tokens()]))
    assert torch.equal(got.inputs, tokens().inputs)
    assert [what for _, what in recorded.calls].count("record_stream") == 3
    assert ("compute", "normalize") not in recorded.calls


def test_on_the_cpu_batches_pass_one_by_one() -> None:
    asked: list[int] = []

    def fetched() -> Iterator[Batch]:
        for number in range(3):
            asked.append(number)
            yield images(number)

    for number, batch in enumerate(ToDevice(CPU, channels_last=False)(fetched())):
        assert asked == list(range(number + 1))
        assert torch.equal(batch.inputs, TO_FLOAT(images(number).inputs))


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_alone_and_in_a_batch_are_torchvisions_bit_for_bit(channels_last: bool) -> None:
    batch = images(1, samples=4, valid=3)
    (got,) = ToDevice(CPU, channels_last)(iter([batch]))
    expected = TO_FLOAT(batch.inputs)
    expected[3] = 0
    assert torch.equal(got.inputs, expected)
    assert torch.equal(normalized(Fetched(batch.inputs, batch.targets, batch.valid)), expected)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert got.inputs.is_contiguous(memory_format=layout)


def test_images_that_a_loader_has_normalized_stay_as_they_are() -> None:
    done = Batch(torch.randn(2, 3, 4, 4), torch.zeros(2), torch.tensor([True, False]))
    (got,) = ToDevice(CPU, channels_last=True)(iter([done]))
    assert torch.equal(got.inputs, done.inputs)
    assert got.inputs.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_values_and_memory_hold_under_slow_streams(pinned: bool) -> None:
    """Copies are late, so that a step which does not wait sees other pixels; steps are late, so that memory which is
    not kept is overwritten by later copies."""
    count = 30

    def fetched() -> Iterator[Batch]:
        for number in range(count):
            torch.cuda._sleep(20_000_000)  # on the stream that is current: the side stream
            batch = images(number, samples=64, valid=64)
            yield Batch(batch.inputs.pin_memory(), batch.targets, batch.valid) if pinned else batch

    # Weights of the pixels: their plain sums are equal in all batches.
    places = torch.arange(64 * 3 * 16 * 16, dtype=torch.float64).view(64, 3, 16, 16)
    there = places.to(CUDA)
    sums = []
    for batch in ToDevice(CUDA, channels_last=True)(fetched()):
        torch.cuda._sleep(60_000_000)
        sums.append(((batch.inputs * there).sum(), batch.targets.sum()))
    for number, (pixels, targets) in enumerate(sums):
        expected = (TO_FLOAT(images(number, samples=64).inputs) * places).sum()
        assert pixels.item() == pytest.approx(expected.item(), rel=1e-12)
        assert targets.item() == 64 * number


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_pixels_on_the_gpu_are_the_cpus_bit_for_bit(channels_last: bool) -> None:
    batch = images(1, samples=4, valid=3)
    here, there = (next(ToDevice(device, channels_last)(iter([batch]))).inputs for device in (CPU, CUDA))
    assert torch.equal(here, there.cpu())
    assert here.stride() == there.stride()
