"""DDP's own knobs; that it trains what one process trains is tests/equality/test_equal_training.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddlbench.errors import UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.single import Single
from ddlbench.models.gpt2 import GPT2
from tests.support.equal import make_job, ready
from tests.support.jobs import CASE, refused, two_ranks
from tests.support.ranks import run_ranks


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


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    in_bf16 = DDP(comm_hook="bf16")
    refused(in_bf16, two_ranks(), "bf16 need NCCL")
    in_bf16.check(two_ranks(device=torch.device("cuda", 0)))
    static = replace(two_ranks(), micro_batch=1)
    refused(DDP(static_graph=True), static, "static_graph does not support 2 micro batches")
    contradiction = "train.reduce_dtype=fp16 and framework.comm_hook=powersgd contradict"
    refused(DDP(comm_hook="powersgd"), two_ranks(reduce_dtype="fp16"), contradiction, UserError)


def test_single_refuses_several_ranks() -> None:
    refused(Single(), two_ranks(), "runs in one process, this launch has 2")
