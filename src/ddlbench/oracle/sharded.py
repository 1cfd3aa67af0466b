"""Weights in shards: FSDP, HSDP and ZeRO stage 3. A block's weights are gathered before each of its passes."""

from __future__ import annotations

from collections.abc import Callable

from ddlbench.errors import Unsupported
from ddlbench.frameworks.deepspeed.knobs import Knobs
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.shared.meta import has_batch_norm
from ddlbench.oracle import collectives, overlap
from ddlbench.oracle.data import whole
from ddlbench.oracle.memory import activations, buffers, held, memory
from ddlbench.oracle.overlap import MiB, Sharded
from ddlbench.oracle.setting import BYTES, Limit, Message, Outcome, Setting


def fsdp(framework: FSDP, setting: Setting) -> Outcome:
    """fully_shard of every block; a tied embedding and head are in the root's group, gathered once a micro batch. With
    replicas (HSDP) neighbours share the shards, and the shards' gradients are all-reduced between the replicas."""
    job, shards = setting.job, setting.world // framework.replicate
    scheme = framework.mixed_precision or ("autocast" if has_batch_norm(job) else "policy")
    weight = BYTES[job.precision] if scheme == "policy" else 4
    again = framework.reshard_after_forward is not False
    outcome = sharded(setting, shards, weight, setting.gradient_bytes, again, every_micro_batch=False)
    if framework.replicate == 1:
        return outcome
    size = setting.counts.numbers / shards * setting.gradient_bytes
    seconds = setting.all_reduce(size, framework.replicate, shards)
    more = Message("all-reduce of shards", 1, size, seconds, seconds)
    return _with(outcome, setting, shards, framework.replicate, more)


def zero3(framework: Knobs, setting: Setting) -> Outcome:
    """DeepSpeed at stage 3 gathers before every pass and reduces after every micro batch."""
    if framework.offload_optimizer or framework.offload_parameters:
        raise Unsupported("the oracle has no model of offloading: set framework.offload_parameters=false")
    weight = 2 if framework.casts(setting.job) else 4
    return sharded(setting, setting.world, weight, setting.gradient_bytes, True, every_micro_batch=True, own_copy=True)


def _with(outcome: Outcome, setting: Setting, shards: int, replicas: int, more: Message) -> Outcome:
    messages = (*outcome.messages, more) if replicas > 1 else outcome.messages
    return Outcome(
        outcome.compute_s, messages, outcome.memory, outcome.limits, 0.0,
        {"dp": setting.world, "shards": shards}, outcome.notes, outcome.micro_samples,
    )  # fmt: skip


def sharded(
    setting: Setting,
    shards: int,
    weight: int,
    gradient: int,
    again: bool,
    every_micro_batch: bool,
    own_copy: bool = False,
) -> Outcome:
    """weight, gradient: bytes of a number as it is gathered and reduced. again: gathered for the backward pass, too."""
    job, world = setting.job, setting.world
    count = job.micro_batches(world)
    samples = job.replica_batch(world) / count
    blocks, passes = setting.counts.blocks, setting.computation.blocks(samples)
    rate = setting.contention
    root = blocks[0].numbers if setting.counts.tied else 0  # in the root's group: not gathered again

    def step(reduces: bool) -> list[Sharded]:
        found: list[Sharded] = []
        for index, (block, each) in enumerate(zip(blocks, passes, strict=True)):
            own = gathered(block.numbers * weight)
            back = (each.backward + (each.forward if job.checkpoint_activations else 0)) * rate
            regather = 0.0 if not again or (root and index == 0) else own
            found.append(
                Sharded(each.forward * rate, back, own, regather, reduced(block.numbers * gradient) if reduces else 0.0)
            )
        return found

    def gathered(size: float) -> float:
        return collectives.all_gather(size, setting.path(shards)) if shards > 1 else 0.0

    def reduced(size: float) -> float:
        return collectives.reduce_scatter(size, setting.path(shards)) if shards > 1 else 0.0

    plain, last = step(every_micro_batch), step(True)
    update = setting.computation.update(setting.counts.numbers / shards) * rate
    compute = count * sum(map(whole(job.checkpoint_activations), passes)) * rate
    seconds = (count - 1) * sent(plain) + sent(last)
    if setting.machine.overlap:
        ends = (count - 1) * overlap.sharded_step(plain) + overlap.sharded_step(last)
        exposed = min(seconds, max(0.0, ends - compute))
    else:
        exposed = seconds
    bytes_ = volume(setting, count, weight, gradient, again, root, every_micro_batch)
    message = Message("gathering of weights and reduction of gradients", 0, bytes_, seconds, exposed)
    largest = max(block.numbers for block in blocks)
    own = held(setting.counts.numbers, setting, 3, shards, own_copy)
    kept = activations(blocks, samples, job.checkpoint_activations)
    room = buffers(blocks) + 2 * largest * weight + (50 * MiB if own_copy else largest * 4)
    return Outcome(
        compute_s=compute + update,
        messages=(message,) if shards > 1 else (),
        memory=memory(own, kept, room),
        limits=(Limit("dp", job.global_batch, "one sample of the global batch a rank"),),
        layout={"dp": world, "shards": shards},
        micro_samples=samples,
    )


def sent(blocks: list[Sharded]) -> float:
    """Seconds of all communication of one micro batch."""
    total: Callable[[Sharded], float] = lambda block: block.gather + block.gather_again + block.reduce  # noqa: E731
    return sum(map(total, blocks))


def volume(
    setting: Setting, count: int, weight: int, gradient: int, again: bool, root: int, every_micro_batch: bool
) -> float:
    """Bytes of whole tensors that are gathered and reduced in a step: 3 parameters' worth with one micro batch."""
    numbers = setting.counts.numbers
    gathers = numbers + (numbers - root if again else 0)
    return count * gathers * weight + (count if every_micro_batch else 1) * numbers * gradient
