"""Weights in shards: FSDP, HSDP and ZeRO stage 3. A block's weights are gathered before each of its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddlbench.errors import Unsupported
from ddlbench.frameworks.deepspeed.knobs import BUCKET_MB, Knobs
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.shared.meta import has_batch_norm
from ddlbench.oracle import collectives, overlap
from ddlbench.oracle.computation import Pass
from ddlbench.oracle.data import whole
from ddlbench.oracle.memory import activations, buffers, held, memory
from ddlbench.oracle.overlap import MiB, Sharded
from ddlbench.oracle.setting import BYTES, Limit, Memory, Message, Outcome, Setting


def fsdp(framework: FSDP, setting: Setting) -> Outcome:
    """fully_shard of every block; a tied embedding and head are in the root's group, gathered once a micro batch. With
    replicas (HSDP) neighbours share the shards, and the shards' gradients are all-reduced between the replicas."""
    job, shards = setting.job, setting.world // framework.replicate
    scheme = framework.mixed_precision or ("autocast" if has_batch_norm(job) else "policy")
    weight = BYTES[job.precision] if scheme == "policy" else 4
    again = framework.reshard_after_forward is not False
    outcome = sharded(setting, Scheme(shards, weight, setting.gradient_bytes, again, always=False))
    if framework.replicate == 1:
        return outcome
    size = setting.counts.numbers / shards * setting.gradient_bytes
    seconds = setting.all_reduce(size, framework.replicate, shards)
    more = Message("all-reduce of shards", 1, size, seconds, seconds)
    layout = {"dp": setting.world, "shards": shards}
    return replace(outcome, messages=(*outcome.messages, more), layout=layout)


def zero3(framework: Knobs, setting: Setting) -> Outcome:
    """DeepSpeed at stage 3 gathers before every pass and reduces after every micro batch."""
    if framework.offload_optimizer or framework.offload_parameters:
        raise Unsupported("the oracle has no model of offloading: set framework.offload_parameters=false")
    weight = 2 if framework.casts(setting.job) else 4
    scheme = Scheme(setting.world, weight, setting.gradient_bytes, again=True, always=True, own_copy=True)
    return sharded(setting, scheme)


@dataclass(frozen=True)
class Scheme:
    """weight, gradient: bytes of a number as it is gathered and reduced; again: gathered for the backward pass, too.

    always: reduced after every micro batch, not only the last; own_copy: the optimizer keeps a copy of the weights
    """

    shards: int
    weight: int
    gradient: int
    again: bool
    always: bool
    own_copy: bool = False


def sharded(setting: Setting, scheme: Scheme) -> Outcome:
    """A step of replicas whose weights are in shards."""
    job, rate = setting.job, setting.contention
    count = job.micro_batches(setting.world)
    samples = job.replica_batch(setting.world) / count
    passes = setting.computation.blocks(samples)
    plain, last = (_blocks(setting, scheme, passes, reduces) for reduces in (scheme.always, True))
    compute = count * sum(map(whole(job.checkpoint_activations), passes)) * rate
    seconds = exposed = (count - 1) * sent(plain) + sent(last)
    if setting.machine.overlap:
        ends = (count - 1) * overlap.sharded_step(plain) + overlap.sharded_step(last)
        exposed = min(seconds, max(0.0, ends - compute))
    what = "gathering of weights and reduction of gradients"
    message = Message(what, 0, volume(setting, scheme, count), seconds, exposed)
    return Outcome(
        compute_s=compute + setting.computation.update(setting.counts.numbers / scheme.shards) * rate,
        messages=(message,) if scheme.shards > 1 else (),
        memory=_memory(setting, scheme, samples),
        limits=(Limit("dp", job.global_batch, "one sample of the global batch a rank"),),
        layout={"dp": setting.world, "shards": scheme.shards},
        micro_samples=samples,
    )


def _blocks(setting: Setting, scheme: Scheme, passes: Sequence[Pass], reduces: bool) -> list[Sharded]:
    """Seconds of each block in one micro batch."""
    rate, checkpointed = setting.contention, setting.job.checkpoint_activations
    to = setting.path(scheme.shards) if scheme.shards > 1 else None
    found: list[Sharded] = []
    for index, (block, each) in enumerate(zip(setting.counts.blocks, passes, strict=True)):
        gather = collectives.all_gather(block.numbers * scheme.weight, to) if to else 0.0
        reduce = collectives.reduce_scatter(block.numbers * scheme.gradient, to) if to and reduces else 0.0
        again = gather if scheme.again and not (index == 0 and setting.counts.tied) else 0.0
        back = each.backward + (each.forward if checkpointed else 0.0)
        found.append(Sharded(each.forward * rate, back * rate, gather, again, reduce))
    return found


def _memory(setting: Setting, scheme: Scheme, samples: float) -> Memory:
    """With two gathered blocks, and what is reduced: DeepSpeed's two buckets, FSDP's largest block."""
    blocks = setting.counts.blocks
    largest = max(block.numbers for block in blocks)
    own = held(setting.counts.numbers, setting, 3, scheme.shards, scheme.own_copy)
    kept = activations(blocks, samples, setting.job.checkpoint_activations)
    reduced = 2 * BUCKET_MB * MiB if scheme.own_copy else largest * 4
    return memory(own, kept, buffers(blocks) + 2 * largest * scheme.weight + reduced)


def sent(blocks: list[Sharded]) -> float:
    """Seconds of all communication of one micro batch."""
    return sum(block.gather + block.gather_again + block.reduce for block in blocks)


def volume(setting: Setting, scheme: Scheme, count: int) -> float:
    """Bytes of whole tensors that are gathered and reduced in a step: 3 parameters' worth with one micro batch. A tied
    embedding, in the root's group, is not gathered again."""
    numbers = setting.counts.numbers
    root = setting.counts.blocks[0].numbers if setting.counts.tied else 0
    gathers = numbers + (numbers - root if scheme.again else 0)
    return count * gathers * scheme.weight + (count if scheme.always else 1) * numbers * scheme.gradient
