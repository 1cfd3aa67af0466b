"""Data parallelism: replicas average gradients. DDP, Horovod, local SGD, parameter servers, ZeRO's stages 0 to 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ddlbench.errors import Unsupported
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.knobs import BUCKET_MB, DeepSpeedOptions
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.shared.groups import batch_norms
from ddlbench.job import on_meta
from ddlbench.measure.formulas.memory_formula import FP32_BYTES
from ddlbench.offloading import exposed, offloaded
from ddlbench.oracle.memory import replicas as memory
from ddlbench.oracle.setting import BYTES, Limit, Memory, Message, Outcome, Setting
from ddlbench.oracle.strategies.traced import traced
from ddlbench.oracle.timing.computation import Pass
from ddlbench.texts import MIB

# At stage 0 DeepSpeed copies and all-reduces so many gradients (numbers) at once: its MEMORY_OPT_ALLREDUCE_SIZE.
AT_ONCE = 5e8
FIRST_BUCKET, BUCKET = MIB, 25 * MIB  # torch.nn.parallel.DistributedDataParallel
HOST_COPIES = "copies of activations to the host and back"


def ddp(framework: DDP, setting: Setting) -> Outcome:
    """Buckets are all-reduced one after the other during the backward pass of the last micro batch (Li et al. 2020)."""
    hook = framework.hook(setting.job)
    if hook not in ("none", "fp16", "bf16"):  # what it sends and keeps is counted from the hook itself
        return traced(framework, setting)
    cap = framework.bucket_cap_mb
    first, other = (FIRST_BUCKET, BUCKET) if cap is None else (cap * MIB, cap * MIB)
    sent = averaged(setting, BYTES.get(hook, FP32_BYTES), first, other)
    views = framework.gradient_as_bucket_view
    peak = partial(memory.replica, setting, setting.counts, setting.world, bucketed=True, views=views)
    return replicas(setting, (sent,), peak)


def horovod(framework: Horovod, setting: Setting) -> Outcome:
    """Gradients are fused up to a threshold and all-reduced in the background (Sergeev and Del Balso 2018)."""
    if framework.adasum:
        raise Unsupported("the oracle has no model of framework.adasum: set it to false")
    number_bytes = BYTES["fp16" if framework.compression_of(setting.job) == "fp16" else "fp32"]
    cap = framework.fusion_threshold_mb * MIB * FP32_BYTES / number_bytes  # it counts what is sent
    return replicas(setting, (averaged(setting, number_bytes, cap, cap),))


def local_sgd(framework: LocalSGD, setting: Setting) -> Outcome:
    """The ranks average weights and BatchNorm's statistics once in `local_steps` updates. No computing hides this."""
    statistics = 2 * sum(norm.num_features for norm in batch_norms(on_meta(setting.job)))
    size = FP32_BYTES * (setting.counts.parameter_count + statistics)
    seconds = setting.path(setting.world).seconds("all_reduce", size) / framework.local_steps
    share = 1 / framework.local_steps
    return replicas(setting, (Message("all-reduce of weights", "dp", share, size * share, seconds, seconds),))


def parameter_server(framework: ParameterServer, setting: Setting) -> Outcome:
    """Messages to and from every other rank, traced; none is hidden, and no rank is slower than another."""
    if setting.job.device.type != "cpu":
        raise Unsupported(
            "parameter_server sends by gloo, and the oracle has no speed of that between the hosts of GPUs"
        )
    return traced(framework, setting)


def zero(framework: DeepSpeedOptions, setting: Setting) -> Outcome:
    """ZeRO (Rajbhandari et al. 2020) at stage 0, 1 or 2. DeepSpeed all-reduces its buckets at stages 1 and 2, too, and
    each rank copies its share (`allreduce_and_scatter`). The updated weights are all-gathered after the update."""
    stage, ranks, parameters = framework.zero_stage, setting.world, setting.counts.parameter_count
    casts, overlaps = framework.casts(setting.job), framework.overlaps(setting.job)
    bucket = (framework.reduce_bucket_mb or BUCKET_MB) * MIB if stage else float("inf")
    times = setting.micro_batch(ranks)[0] if stage == 2 else 1  # stage 2 reduces after every micro batch
    messages = [averaged(setting, setting.gradient_bytes, bucket, bucket, overlaps, times)]
    if not stage:
        copied = FP32_BYTES * min(parameters, AT_ONCE)
        peak = partial(memory.replica, setting, setting.counts, ranks, reduced=copied)
        return replicas(setting, tuple(messages), peak)
    size = float(parameters * BYTES["fp16" if casts else "fp32"])
    seconds = setting.path(ranks).seconds("all_gather", size)
    messages.append(Message("all-gather of weights", "dp", 1, size, seconds, seconds))
    peak = partial(memory.zero, setting, stage, bucket / FP32_BYTES, overlaps, casts)
    return replicas(setting, tuple(messages), peak, ranks)


def replicas(
    setting: Setting,
    messages: tuple[Message, ...] = (),
    peak: Callable[[], Memory] | None = None,
    shards: int = 1,
) -> Outcome:
    """A step with all weights on each rank: D/p sum(FW + BW) + WU (Kahira et al. 2021, table 1).

    peak: None: without buckets; shards: ranks that share the update
    """
    count, samples = setting.micro_batch(setting.world)
    parameters = setting.counts.parameter_count
    return Outcome(
        compute_s=setting.compute_s(setting.passes(samples), count, parameters / shards),
        messages=(*(messages if setting.world > 1 else ()), *host_copies(setting)),
        peak=peak or partial(memory.replica, setting, setting.counts, setting.world),
        limits=(Limit("dp", setting.job.global_batch, "one sample of the global batch a rank"),),
        layout={"dp": setting.world},
        micro_samples=samples,
    )


def host_copies(setting: Setting) -> tuple[Message, ...]:
    """The copies of offloaded activations, to the host and back. Those of a block run beside the passes of the next
    block, and the computing waits for what is left of them; a measured step contains that. Unsupported if the bandwidth
    is not known."""
    (count, samples), rate = setting.micro_batch(setting.world), setting.machine.device.host_bytes_per_s
    plan = setting.plan(samples)
    blocks = offloaded(plan)
    if not blocks:
        return ()
    if rate is None:
        raise Unsupported(
            f"cluster {setting.machine.name}: the link of a device to its host is not known: give "
            "device.host_bytes_per_s in a cluster file"
        )
    passes, links, late = setting.passes(samples), [block.link(samples) for block in setting.counts.blocks], 0.0
    for index in [] if setting.computation.samples else blocks:
        following = passes[index + 1].times(setting.contention)
        late += exposed(links[index].offloaded / rate, following.forward, following.backward)
    bytes_ = 2 * count * sum(links[index].offloaded for index in blocks)
    return (Message(HOST_COPIES, "host", 2 * count * len(blocks), bytes_, bytes_ / rate, count * late),)


def averaged(
    setting: Setting,
    number_bytes: float,
    first: float = FIRST_BUCKET,
    cap: float = BUCKET,
    overlaps: bool = True,
    times: int = 1,
    passes: Sequence[Pass] | None = None,
    dp: int | None = None,
    tp: int = 1,
) -> Message:
    """The all-reduce of gradients in buckets. What is sent after the backward pass is exposed.

    number_bytes: of a number that is sent
    first, cap: bytes in fp32 with which the first bucket and the others are full, whatever type is sent
    overlaps: whether the framework sends during the backward pass; times: in a step
    passes: of each block for a micro batch, on one device alone; None: every rank is a replica
    dp: replicas that average, of `tp` neighbours each; None: all ranks. Every tensor of a block counts with the share
        of the block that a rank has
    """
    passes, contention = passes or setting.passes(setting.micro_batch(setting.world)[1]), setting.contention
    back = [block.backward * contention for block in passes]
    blocks, scale = setting.counts.blocks, number_bytes / FP32_BYTES
    parts = [FP32_BYTES * block.parameters_of_part(tp) / (block.parameter_count or 1) for block in blocks]
    sizes = [[size * part for size in block.tensor_sizes] for block, part in zip(blocks, parts, strict=True)]
    full = buckets(sizes, back, first, cap)
    sent = [bucket.size * scale for bucket in full]
    seconds = partial(setting.path(dp or setting.world, tp).seconds, "all_reduce")
    total = late = sum(map(seconds, sent))
    if overlaps:
        late = min(total, max(0.0, queue(full, lambda size: seconds(size * scale)) - sum(back)))
    amounts = (times * amount for amount in (len(sent), sum(sent), total, setting.exposed(total, late)))
    return Message("all-reduce of gradients", "dp", *amounts, largest=max(sent, default=0.0))


@dataclass(frozen=True)
class Gradient:
    """The bytes of a gradient or a message, and when it is ready, in seconds after the start of the backward pass."""

    size: float
    ready: float


def buckets(
    sizes: Sequence[Sequence[float]], backward: Sequence[float], first: float = FIRST_BUCKET, cap: float = BUCKET
) -> list[Gradient]:
    """DDP's buckets: gradients in the order of the backward pass fill a bucket until it has `cap` bytes or more. Those
    of a block are ready at the end of its backward pass.

    sizes: bytes of the tensors of each block; backward: seconds of each block; first: cap of the first bucket
    """
    filled: list[Gradient] = []
    size, limit, now, last = 0.0, first, 0.0, 0.0
    for block, seconds in zip(reversed(sizes), reversed(backward), strict=True):
        now += seconds
        for tensor in reversed(block):
            size, last = size + tensor, now
            if size >= limit:
                filled.append(Gradient(size, now))
                size, limit = 0.0, cap
    return [*filled, Gradient(size, last)] if size else filled


def queue(messages: Iterable[Gradient], seconds: Callable[[float], float]) -> float:
    """The time when the last message has arrived. Messages are sent one after the other, none before it is ready."""
    free = 0.0
    for message in messages:
        free = max(free, message.ready) + seconds(message.size)
    return free
