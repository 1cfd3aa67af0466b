"""DDP's hooks for compressed gradients. That they continue bit for bit is tests/equality/test_resume.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.compression import Compressor, ErrorFeedback, Int8, Message, PowerSGD, Sign, TopK
from ddlbench.frameworks.ddp import DDP
from ddlbench.ranks.fake import cuda as fake_cuda
from tests.support.equal import batch_for, make_job, ready, train_cases
from tests.support.jobs import CASE, refused, two_ranks, wrong_knob
from tests.support.ranks import run_ranks
from tests.support.rehearsals import WORLD, config, rehearsed

HOOKS = {
    "topk": DDP(comm_hook="topk", topk_ratio=0.1, bucket_cap_mb=0.01),
    "sign": DDP(comm_hook="sign", bucket_cap_mb=0.01),
    "int8": DDP(comm_hook="int8", bucket_cap_mb=0.01),
    "powersgd": DDP(comm_hook="powersgd", powersgd_rank=2, powersgd_start_step=2, bucket_cap_mb=0.01),
    "noop": DDP(comm_hook="noop"),
}
ALL = {"ddp": DDP(), "all": DDP(comm_hook="topk", topk_ratio=1.0)}
TENSORS = [torch.tensor([0.0, -3.0, 1.0, 2.0]), torch.zeros(3), torch.tensor([0.5])]
SIZES = [4, 3, 1]
COUNTED = ("none", "fp16", "topk", "sign", "int8", "powersgd", "noop")


@dataclass
class Bucket:
    """What a hook did with a bucket: flat tensors of all its gradients, one after the other."""

    gradient: Tensor
    error_before: Tensor
    message: Message
    error_after: Tensor
    sizes: list[int]
    received: Tensor


@dataclass
class Trained:
    """What one rank trained."""

    weights: dict[str, dict[str, Tensor]]  # by hook
    buckets: dict[str, list[Bucket]]
    facts: dict[str, dict[str, Any]]
    ddp: dict[str, Tensor]
    every_number: dict[str, Tensor]


def train_all() -> Trained:
    weights, buckets, facts = dict[str, dict[str, Tensor]](), dict[str, list[Bucket]](), dict[str, dict[str, Any]]()
    for name, framework in {"none": DDP(), **HOOKS}.items():
        job, seen = make_job(replace(CASE, micro_batch=3)), list[Bucket]()
        framework.check(job)
        noted = patch.object(ErrorFeedback, "__call__", noting(seen))
        factored = patch.object(PowerSGD, "__call__", noting_factors(seen))
        with ready(framework, job) as (trainer, _), noted, factored:
            for step in range(4):
                trainer.step(batch_for(job, trainer.place, seed=10 * step + dist.get_rank()))
            facts[name] = trainer.facts()
            weights[name] = {key: one.detach().clone() for key, one in trainer.model.named_parameters()}
        buckets[name] = seen
    outcomes = train_cases([(CASE, framework) for framework in ALL.values()])
    ddp, every_number = (outcome.weights for outcome in outcomes)
    return Trained(weights, buckets, facts, ddp, every_number)


def noting(seen: list[Bucket]) -> Any:
    original = ErrorFeedback.__call__

    def call(self: ErrorFeedback, bucket: dist.GradBucket) -> Future[Tensor]:
        errors = [self.errors[self.names[parameter]] for parameter in bucket.parameters()]
        gradient, before = bucket.buffer().clone(), torch.cat(errors)
        messages, compress = list[Message](), self.compressor.compress

        class Noted:
            def compress(self, gradients: Sequence[Tensor]) -> Message:
                messages.append(compress(gradients))
                return messages[0]

            add = self.compressor.add

        with patch.object(self, "compressor", Noted()):
            future = original(self, bucket)
            received = future.wait()
        sizes = [error.numel() for error in errors]
        seen.append(Bucket(gradient, before, messages[0], torch.cat(errors), sizes, received.clone()))
        return future

    return call


def noting_factors(seen: list[Bucket]) -> Any:
    """PowerSGD sends factors, which torch multiplies: what every rank receives is also what it sent."""
    original = PowerSGD.__call__

    def call(self: PowerSGD, bucket: dist.GradBucket) -> Future[Tensor]:
        index, errors, gradient = bucket.index(), self.state.error_dict, bucket.buffer().clone()
        kept = [
            self.errors[name] for parameter in bucket.parameters() if (name := self.names[parameter]) in self.errors
        ]
        before = torch.cat(kept) if kept else errors[index].clone()
        future = original(self, bucket)
        received = future.wait()
        if index in self.buckets:
            sizes = [parameter.numel() for parameter in bucket.parameters()]
            seen.append(Bucket(gradient, before, (received, received), errors[index].clone(), sizes, received.clone()))
        return future

    return call


@cache
def trained() -> list[Trained]:
    return run_ranks(2, train_all)


def sent(compressor: Compressor, bucket: Bucket) -> Tensor:
    total = torch.zeros_like(bucket.gradient)
    compressor.add(bucket.message, total, bucket.sizes)
    return total


def test_all_numbers_of_topk_train_as_ddp_bit_for_bit() -> None:
    """With two ranks. With more, the sum of an all-reduce has another order: as far as rounding goes."""
    result = trained()[0]
    assert result.ddp.keys() == result.every_number.keys()
    assert all(torch.equal(result.ddp[name], tensor) for name, tensor in result.every_number.items())


@pytest.mark.parametrize("hook", [name for name in HOOKS if name != "noop"])
def test_all_ranks_have_the_same_weights(hook: str) -> None:
    first, second = (rank.weights[hook] for rank in trained())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_without_gradients_of_others_ranks_have_other_weights() -> None:
    first, second = (rank.weights["noop"] for rank in trained())
    assert not all(torch.equal(first[name], second[name]) for name in first)


COMPRESSORS: dict[str, Compressor] = {"topk": TopK(0.1), "sign": Sign(), "int8": Int8()}


@pytest.mark.parametrize("hook", COMPRESSORS)
def test_what_is_sent_and_what_stays_is_the_gradient_and_what_stayed(hook: str) -> None:
    for rank in trained():
        assert len(rank.buckets[hook]) > 4  # several in a step
        lost = 0.0
        for bucket in rank.buckets[hook]:
            due = bucket.gradient + bucket.error_before
            assert torch.allclose(sent(COMPRESSORS[hook], bucket) + bucket.error_after, due, rtol=1e-6, atol=1e-7)
            lost += float(bucket.error_after.abs().sum())
        assert lost > 0  # it did compress
        assert any(bucket.error_before.abs().sum() > 0 for bucket in rank.buckets[hook])


def test_what_powersgd_sends_and_keeps_is_the_gradient_and_what_it_kept() -> None:
    """Vogels et al. 2019, algorithm 2, with both ranks' own errors. Two of four steps come before its start."""
    first, second = (rank.buckets["powersgd"] for rank in trained())
    assert len(first) > 4
    for bucket, other in zip(first, second, strict=True):
        assert torch.equal(bucket.received, other.received)
        for one in (bucket, other):
            due = one.gradient + one.error_before
            assert torch.allclose(one.received + one.error_after, due, rtol=1e-5, atol=1e-7)
    assert any(bucket.error_before.abs().sum() > 0 for bucket in first)
    mean = [(bucket.gradient + other.gradient) / 2 for bucket, other in zip(first, second, strict=True)]
    lost = [float((one - bucket.received).abs().max()) for one, bucket in zip(mean, first, strict=True)]
    assert max(lost) > 1e-4  # it did compress


@pytest.mark.parametrize("hook", COMPRESSORS)
def test_every_rank_receives_the_mean_of_what_is_sent(hook: str) -> None:
    for first, second in zip(*(rank.buckets[hook] for rank in trained()), strict=True):
        mean = (sent(COMPRESSORS[hook], first) + sent(COMPRESSORS[hook], second)) / 2
        assert torch.equal(first.received, mean)
        assert torch.equal(second.received, mean)


def decoded(compressor: Compressor, tensors: Sequence[Tensor]) -> list[float]:
    total = torch.zeros(sum(map(len, tensors)))
    compressor.add(compressor.compress(tensors), total, [len(tensor) for tensor in tensors])
    return total.tolist()


def test_topk_sends_the_largest_numbers_of_each_tensor() -> None:
    assert decoded(TopK(0.5), TENSORS) == [0.0, -3.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.5]
    assert decoded(TopK(0.01), TENSORS) == [0.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5]  # at least one
    values, places = TopK(0.5).compress(TENSORS)
    assert (values.nbytes, places.nbytes) == (4 * 5, 4 * 5)


def test_sign_sends_a_bit_for_each_number_and_the_mean_magnitude() -> None:
    assert decoded(Sign(), TENSORS) == [1.5, -1.5, 1.5, 1.5, 0.0, 0.0, 0.0, 0.5]
    scales, octets = Sign().compress([*TENSORS, torch.tensor([-1.0])])  # 9 bits
    assert (scales.nbytes, octets.nbytes) == (4 * 4, 2)


def test_int8_sends_a_byte_for_each_number() -> None:
    result = decoded(Int8(), TENSORS)
    assert result == pytest.approx([0.0, -3.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.5], abs=3 / 254)
    assert result[1] == pytest.approx(-3.0, rel=1e-6)
    scales, codes = Int8().compress(TENSORS)
    assert (scales.nbytes, codes.nbytes) == (4 * 3, 8)


@pytest.mark.parametrize("compressor", COMPRESSORS.values())
def test_a_gradient_that_is_not_finite_stays_visible(compressor: Compressor) -> None:
    tensor = torch.ones(20)
    tensor[7] = torch.nan
    assert any(number != number for number in decoded(compressor, [tensor]))


def sent_bytes(hook: str, sizes: Mapping[str, torch.Size]) -> float:
    """By the formulas, of a rank and update."""
    counts = [size.numel() for size in sizes.values()]
    scales = 4 * len(counts)
    if hook == "powersgd":  # all-reduces of vectors, P and Q
        numbers = 0
        for size in sizes.values():
            rows, columns = size[0], size.numel() // size[0]
            numbers += 2 * (rows + columns) if 4 * (rows + columns) < rows * columns else size.numel()
        return 2 * (WORLD - 1) / WORLD * 4 * numbers
    of_all = {
        "topk": 8 * sum(ceil(0.01 * count) for count in counts),
        "sign": sum(counts) / 8 + scales,
        "int8": sum(counts) + scales,
        "noop": 0,
        "none": 2 * 4 * sum(counts) / WORLD,
        "fp16": 2 * 2 * sum(counts) / WORLD,
    }
    return (WORLD - 1) * of_all[hook]


# GPT-2 has many small tensors, which count where each is rounded up.
QUICK = {*((hook, "vgg16") for hook in COUNTED), ("topk", "gpt2_small"), ("sign", "gpt2_small")}


@pytest.mark.parametrize(
    ("hook", "model"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in product(COUNTED, ("gpt2_small", "vgg16"))
    ],
)
def test_a_rehearsal_counts_what_a_hook_sends(model: str, hook: str) -> None:
    more = ("framework.powersgd_rank=2", "framework.powersgd_start_step=4", f"framework.comm_hook={hook}")
    more += ("model.n_layer=1",) * (model == "gpt2_small")
    row = rehearsed("ddp", model, *more)
    assert row.error is None
    parameters = config("ddp", model, *more).model.build().named_parameters()
    expected = sent_bytes(hook, {name: parameter.shape for name, parameter in parameters})
    padding = (WORLD - 1) * sum(sent.count for sent in row.collectives or ()) if hook == "sign" else 0
    assert expected - 0.5 <= (row.sent_bytes or 0) <= expected + padding + 0.5


def test_all_buckets_are_added_up_on_one_stream_for_which_the_messages_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch calls what follows a collective on another stream for each bucket, and the allocator keeps the
    memory of each stream for itself."""
    recorded, added = list[Any](), list[Any]()
    done = Future[None]()
    done.set_result(None)

    def all_gather(messages: list[Tensor], message: Tensor, async_op: bool) -> Any:
        for received in messages:
            received.copy_(message)
        return SimpleNamespace(get_future=lambda: done)

    class Noting(TopK):
        def add(self, message: Message, total: Tensor, sizes: Sequence[int]) -> None:
            added.append(fake_cuda.current_stream())
            super().add(message, total, sizes)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake_cuda, name))
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: recorded.append(stream))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    parameter = nn.Parameter(torch.zeros(4))
    bucket: Any = SimpleNamespace(buffer=lambda: TENSORS[0].clone(), parameters=lambda: [parameter])
    hook = ErrorFeedback(Noting(1.0), {"weight": parameter})
    for _ in range(2):
        with fake_cuda.stream(fake_cuda.Stream()):
            assert torch.equal(hook(bucket).wait(), TENSORS[0])
    assert hook.stream is not None
    assert recorded == [hook.stream] * 4
    assert added[1:3] == added[4:] == [hook.stream] * 2  # the first one of each bucket says what is sent


def test_what_cannot_be_trained_or_saved_is_refused() -> None:
    for hook in ("topk", "sign", "int8", "powersgd"):
        with pytest.raises(Unsupported, match=f"error feedback of {hook} never recovers from an overflow"):
            DDP(comm_hook=hook).check(two_ranks(precision="fp16"))
        DDP(comm_hook=hook).check_checkpoint(two_ranks())
    refused(DDP(comm_hook="noop"), two_ranks(precision="fp16"), "replicas would skip different updates")
    with pytest.raises(Unsupported, match="every rank has other weights"):
        DDP(comm_hook="noop").check_checkpoint(two_ranks())
    wrong_knob(DDP, "1-bit Adam compresses the momentum", comm_hook="onebit_adam")
    for ratio in (0.0, -0.1, 1.5, float("nan")):
        wrong_knob(DDP, "greater than 0 and at most 1", comm_hook="topk", topk_ratio=ratio)
    refused(DDP(comm_hook="sign"), two_ranks(reduce_dtype="fp16"), "contradict", UserError)


def test_a_run_whose_gradients_are_not_sent_says_so() -> None:
    facts = trained()[0].facts
    assert facts["noop"]["reference"] == "gradients are not sent"
    assert "reference" not in facts["none"]
