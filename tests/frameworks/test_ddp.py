"""DDP's own knobs; that it trains what one process trains is tests/equality/test_equal_training.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.single import Single
from ddlbench.models.gpt2 import GPT2
from tests.equality.distances import TOLERANCES, distance
from tests.support.broken import Clipping, Dropping, Summed
from tests.support.equal import make_job, ready, train_cases
from tests.support.jobs import CASE, job, refused, two_ranks
from tests.support.ranks import run_ranks
from tests.support.reference import reference

# name -> framework, how far its weights may be from those of uncompressed gradients, as a share of the way they went
KNOBS = {
    "small buckets": (DDP(bucket_cap_mb=0.01), 1e-4),
    "no views": (DDP(gradient_as_bucket_view=False), 1e-4),
    "static graph": (DDP(static_graph=True), 1e-4),
    "fp16 hook": (DDP(comm_hook="fp16"), 0.01),
    "powersgd from step 2": (DDP(comm_hook="powersgd", powersgd_rank=2, powersgd_start_step=2), 0.9),
}


@pytest.mark.slow
def test_knobs_train_the_same_as_far_as_they_promise() -> None:
    ranks = run_ranks(2, train_cases, [(CASE, framework) for framework, _ in KNOBS.values()])
    expected = reference(CASE, 2)
    result = {name: distance(outcome.weights, expected) for name, outcome in zip(KNOBS, ranks[0], strict=True)}
    for name, (_, tolerance) in KNOBS.items():
        assert result[name] <= tolerance, result
    assert result["fp16 hook"] > 1e-6  # it did compress
    assert result["powersgd from step 2"] > 0.01


def first_buckets() -> list[tuple[int, dict[str, Any]]]:
    """Bytes of the first all-reduce, and the facts: of GPT-2 with 2 MiB of gradients in its last layers."""
    result: list[tuple[int, dict[str, Any]]] = []
    wide = replace(CASE, model=GPT2("gpt2", n_layer=2, n_embd=128, n_head=4, vocab_size=3000, seq_len=16, dropout=0.0))
    for framework in (DDP(), DDP(bucket_cap_mb=25)):
        sizes = list[int]()
        with ready(framework, make_job(wide)) as (trainer, batch):
            trainer.trained.register_comm_hook(sizes, lambda state, bucket: reduce_and_note(state, bucket))
            for _ in range(2):  # torch arranges the buckets anew after the first backward pass, by the order seen in it
                sizes.clear()
                trainer.step(batch)
            result.append((sizes[0], trainer.facts()))
    return result


def reduce_and_note(sizes: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    sizes.append(bucket.buffer().nbytes)
    assert dist.group.WORLD is not None
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def test_the_first_bucket_is_small_by_default() -> None:
    (default, rule), (explicit, other) = run_ranks(2, first_buckets)[0]
    assert default < explicit / 2  # in one bucket: all gradients
    assert (rule["bucket_cap_mb"], rule["bucket_rule"]) == (None, "torch's own: 1 MiB first, then 25 MiB")
    assert (other["bucket_cap_mb"], other["bucket_rule"]) == (25, "25 MiB, the first one too")


FAULTS = {"none": DDP(), "summed": Summed(), "dropped": Dropping(), "clipped": Clipping()}


def test_the_central_test_notices_a_planted_fault() -> None:
    case = replace(CASE, micro_batch=2)
    ranks = run_ranks(2, train_cases, [(case, framework) for framework in FAULTS.values()])
    expected = reference(case, 2)
    result = {name: distance(outcome.weights, expected) for name, outcome in zip(FAULTS, ranks[0], strict=True)}
    tolerance = TOLERANCES["gpt2", "fp32"].weights
    assert result.pop("none") <= tolerance
    assert all(off > 100 * tolerance for off in result.values()), result


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    refused(DDP(comm_hook="bf16"), two_ranks(), "bf16 need NCCL")
    refused(DDP(), two_ranks(reduce_dtype="bf16"), "bf16 need NCCL")
    with pytest.raises(Unsupported, match="static_graph does not support 2 micro batches"):
        DDP(static_graph=True).check(replace(two_ranks(), micro_batch=1))
    with pytest.raises(UserError, match=r"train\.reduce_dtype=fp16 and framework\.comm_hook=powersgd contradict"):
        DDP(comm_hook="powersgd").check(two_ranks(reduce_dtype="fp16"))
    with pytest.raises(UserError, match=r"global_batch=5 does not divide over 2 replicas \(rest 1\): .*4 or 6"):
        DDP().check(two_ranks(global_batch=5))
    with pytest.raises(UserError, match=r"micro_batch=4 does not divide the 6 samples .*choose train\.micro_batch=3"):
        DDP().check(replace(two_ranks(global_batch=12), micro_batch=4))
    refused(DDP(comm_hook="powersgd"), two_ranks(precision="fp16"), "error feedback of powersgd")
    for framework, ranks in ((DDP(), two_ranks()), (Single(), job())):
        refused(framework, replace(ranks, compile=True, checkpoint_activations=True), "cannot be combined")
    DDP().check(two_ranks(reduce_dtype="fp16"))


def test_single_refuses_several_ranks() -> None:
    refused(Single(), two_ranks(), "runs in one process, this launch has 2")


def test_bf16_gradients_are_allowed_on_a_gpu() -> None:
    DDP(comm_hook="bf16").check(two_ranks(device=torch.device("cuda", 0)))
