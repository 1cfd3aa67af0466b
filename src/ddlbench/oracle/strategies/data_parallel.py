"""Data parallelism: replicas average gradients (DDP, Horovod, local SGD, parameter servers), and the ranks can share
the optimizer state, the gradients and the weights in shards (ZeRO, Rajbhandari et al. 2020; FSDP and HSDP, Zhao et al.
2023).

If weights are in shards, those of a block are gathered before its passes, and its gradients are reduced after its
backward pass: as one message each, although DeepSpeed joins the messages of small blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from ddlbench.errors import Unsupported
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.knobs import BUCKET_MB, DeepSpeedOptions
from ddlbench.frameworks.fsdp import FSDP, root_group
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.shared.groups import batch_norms
from ddlbench.job import on_meta
from ddlbench.measure.formulas.memory_formula import FP32_BYTES
from ddlbench.offloading import exposed, offloaded
from ddlbench.oracle.memory import replicas as memory
from ddlbench.oracle.memory.replicas import Scheme
from ddlbench.oracle.setting import BYTES, Limit, Memory, Message, Outcome, Setting
from ddlbench.oracle.strategies.traced import traced
from ddlbench.oracle.timing.computation import Pass
from ddlbench.texts import MIB

# Numbers, of DeepSpeed: gradients that are copied and all-reduced at once at stage 0 (MEMORY_OPT_ALLREDUCE_SIZE); stage
# 3 keeps weights if fewer other weights than this are needed before their next use (stage3_max_reuse_distance).
AT_ONCE, REUSE = 5e8, 1e9
FIRST_BUCKET, BUCKET = MIB, 25 * MIB  # torch.nn.parallel.DistributedDataParallel
HOST_COPIES = "copies of activations to the host and back"


def ddp(framework: DDP, setting: Setting) -> Outcome:
    """Buckets are all-reduced one after the other during the backward pass of the last micro batch (Li et al. 2020)."""
    hook = framework.hook(setting.job)
    if hook not in ("none", "fp16", "bf16"):  # what it sends and keeps is counted from the hook itself
        return traced(framework, setting)
    cap = framework.bucket_cap_mb
    first, other = (FIRST_BUCKET, BUCKET) if cap is None else (cap * MIB, cap * MIB)
    views = framework.gradient_as_bucket_view
    sent = averaged(setting, BYTES.get(hook, FP32_BYTES), first, other, views=views)
    copied = list[float]()
    if hook != "none":  # a tensor that is larger than a bucket is one by itself; the last bucket has the first block
        large = ([n for n in block.tensor_sizes if FP32_BYTES * n > other] for block in setting.counts.blocks)
        first_block, *others = (BYTES[hook] * float(max(sizes, default=0)) for sizes in large)
        last = min(FP32_BYTES * float(setting.counts.parameter_count), other) * BYTES[hook] / FP32_BYTES
        copied = [max(first_block, last), *others]
    ranks = setting.job.world_size
    peak = partial(memory.replica, setting, setting.counts, ranks, bucketed=True, views=views, sent=copied)
    return replicas(setting, (sent,), peak)


def horovod(framework: Horovod, setting: Setting) -> Outcome:
    """Gradients are fused up to a threshold and all-reduced in the background (Sergeev and Del Balso 2018)."""
    if framework.adasum:
        raise Unsupported("the oracle has no model of framework.adasum: set it to false")
    number_bytes = BYTES["fp16" if framework.compression_of(setting.job) == "fp16" else "fp32"]
    cap = framework.fusion_threshold_mb * MIB * FP32_BYTES / number_bytes  # it counts what is sent
    return replicas(setting, (averaged(setting, number_bytes, cap, cap),))


def local_sgd(framework: LocalSGD, setting: Setting) -> Outcome:
    """The ranks average weights and BatchNorm's statistics once in `local_steps` updates. No computing hides it."""
    statistics = 2 * sum(norm.num_features for norm in batch_norms(on_meta(setting.job)))
    size = FP32_BYTES * (setting.counts.parameter_count + statistics)
    once = setting.path(setting.job.world_size).seconds("all_reduce", size) + setting.packing_s(size)
    seconds, share = once / framework.local_steps, 1 / framework.local_steps
    return replicas(setting, (Message("all-reduce of weights", "dp", share, size * share, seconds, seconds),))


def parameter_server(framework: ParameterServer, setting: Setting) -> Outcome:
    """Messages to and from every other rank, traced. None of them is hidden, and all ranks are equally fast."""
    if setting.job.device.type != "cpu":
        raise Unsupported(
            "parameter_server sends by gloo, and the oracle has no speed of that between the hosts of GPUs"
        )
    return traced(framework, setting)


def zero(framework: DeepSpeedOptions, setting: Setting) -> Outcome:
    """ZeRO in DeepSpeed. At stages 1 and 2 it also all-reduces its buckets, of which each rank copies its share
    (`allreduce_and_scatter`), and all-gathers the weights after the update. Stages 2 and 3 reduce after every micro
    batch. For the backward pass stage 3 gathers again only weights that it freed after the forward pass."""
    if framework.offload_optimizer or framework.offload_parameters:
        raise Unsupported(
            "the oracle has no model of offloading: set framework.offload_optimizer and offload_parameters to false"
        )
    stage, ranks, counts = framework.zero_stage, setting.job.world_size, setting.counts
    casts, overlaps = framework.casts(setting.job), framework.overlaps(setting.job)
    weight = BYTES["fp16" if casts else "fp32"]
    bucket = (framework.reduce_bucket_mb or BUCKET_MB) * MIB if stage else float("inf")
    if stage == 3:
        large = [[n for n in block.tensor_sizes if n > framework.persistence_threshold] for block in counts.blocks]
        gathered, earlier = tuple(map(sum, large)), accumulate(block.parameter_count for block in counts.blocks)
        again = tuple(2 * (counts.parameter_count - before) >= REUSE for before in earlier)
        persistent = counts.parameter_count - sum(gathered)
        scheme = Scheme(ranks, weight, gathered, again, always=True, persistent=persistent)
        return sharded(setting, scheme, partial(memory.zero3, setting, scheme, bucket))
    times = setting.micro_batch(ranks)[0] if stage == 2 else 1
    reduction = averaged(setting, setting.gradient_bytes, bucket, bucket, overlaps, times)
    if stage == 0:
        copied = FP32_BYTES * min(counts.parameter_count, AT_ONCE)
        return replicas(setting, (reduction,), partial(memory.replica, setting, counts, ranks, reduced=copied))
    size = float(counts.parameter_count * weight)
    seconds = setting.path(ranks).seconds("all_gather", size)
    gathering = Message("all-gather of weights", "dp", 1, size, seconds, seconds)
    peak = partial(memory.zero, setting, stage, bucket / FP32_BYTES, overlaps, casts)
    return replicas(setting, (reduction, gathering), peak, ranks)


def fsdp(framework: FSDP, setting: Setting) -> Outcome:
    """fully_shard is called for each block except the blocks of the root's group (a tied embedding and head, a last
    norm). This group is gathered once per micro batch by default. With replicas (HSDP) neighbours share the shards, and
    gradients are all-reduced between the replicas."""
    if framework.offload_parameters:
        raise Unsupported("the oracle has no model of offloading: set framework.offload_parameters=false")
    job, shards = setting.job, setting.job.world_size // framework.replicate
    weight = BYTES[job.precision] if framework.scheme(job) == "policy" else FP32_BYTES
    blocks, names, reshard = setting.counts.blocks, root_group(on_meta(job)), framework.reshard_after_forward
    again = tuple(block.name not in names if reshard is None else reshard for block in blocks)
    scheme = Scheme(shards, weight, tuple(block.parameter_count for block in blocks), again, always=False)
    outcome = sharded(setting, scheme, partial(memory.fsdp, setting, scheme))
    if framework.replicate == 1:
        return outcome
    size = setting.counts.parameter_count / shards * setting.gradient_bytes
    seconds = setting.path(framework.replicate, shards).seconds("all_reduce", size)
    more = Message("all-reduce of shards", "dp", 1, size, seconds, seconds)
    return replace(outcome, messages=(*outcome.messages, more))


def replicas(
    setting: Setting,
    messages: tuple[Message, ...] = (),
    peak: Callable[[], Memory] | None = None,
    shards: int = 1,
) -> Outcome:
    """A step with all weights on each rank: D/p sum(FW + BW) + WU (Kahira et al. 2021, table 1).

    peak: None: without buckets; shards: ranks that share the update
    """
    count, samples = setting.micro_batch(setting.job.world_size)
    parameters = setting.counts.parameter_count
    return Outcome(
        compute_s=setting.compute_s(setting.passes(samples), count, parameters / shards),
        messages=(*(messages if setting.job.world_size > 1 else ()), *host_copies(setting)),
        peak=peak or partial(memory.replica, setting, setting.counts, setting.job.world_size),
        limits=(Limit("dp", setting.job.global_batch, "one sample of the global batch a rank"),),
        layout={"dp": setting.job.world_size},
        micro_samples=samples,
    )


def host_copies(setting: Setting) -> tuple[Message, ...]:
    """The copies of offloaded activations, to the host and back. The copies of a block run beside the passes of the
    next block, and the computing waits for the rest of them. A measured step contains this wait. Unsupported if the
    bandwidth is not known."""
    (count, samples), rate = setting.micro_batch(setting.job.world_size), setting.machine.device.host_bytes_per_s
    blocks = offloaded(setting.plan(samples))
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
    views: bool = False,
) -> Message:
    """The all-reduce of gradients in buckets. Messages after the backward pass are exposed.

    number_bytes: of a number that is sent
    first, cap: bytes in fp32 with which the first bucket and the others are full, whatever type is sent
    overlaps: whether the framework sends during the backward pass; times: in a step
    passes: of each block for a micro batch, on one device alone; None: every rank is a replica
    dp: replicas that average, of `tp` neighbours each; None: all ranks. Every tensor of a block counts in proportion
        to the part of the block that a rank has
    views: whether the gradients are views of the buckets, so that nothing is copied back
    """
    passes, contention = passes or setting.passes(setting.micro_batch(setting.job.world_size)[1]), setting.contention
    back = [block.backward * contention for block in passes]
    blocks, scale = setting.counts.blocks, number_bytes / FP32_BYTES
    parts = [FP32_BYTES * block.parameters_of_part(tp) / (block.parameter_count or 1) for block in blocks]
    sizes = [[size * part for size in block.tensor_sizes] for block, part in zip(blocks, parts, strict=True)]
    full = buckets(sizes, back, first, cap)
    sent = [bucket.size * scale for bucket in full]
    seconds = partial(setting.path(dp or setting.job.world_size, tp).seconds, "all_reduce")
    total = late = sum(map(seconds, sent))
    if overlaps:
        late = min(total, max(0.0, queue(full, lambda size: seconds(size * scale)) - sum(back)))
    packing = setting.packing_s(sum(sent)) / (2 if views else 1)
    delay = setting.exposed(total, late) + packing
    amounts = (times * amount for amount in (len(sent), sum(sent), total + packing, delay))
    return Message("all-reduce of gradients", "dp", *amounts, largest=max(sent, default=0.0))


def sharded(setting: Setting, scheme: Scheme, peak: Callable[[], Memory]) -> Outcome:
    """The step of a strategy that keeps weights in shards."""
    count, samples = setting.micro_batch(setting.job.world_size)
    parameters, plan = setting.counts.parameter_count, setting.plan(samples)
    if scheme.shards > 1 and any(not isinstance(item, int) and len(item) > 1 for item in plan):
        raise Unsupported(
            "the oracle has no model of weights that are gathered again for segments of several blocks: set "
            "train.checkpoint_activations to blocks or to a list of blocks"
        )
    rate, to = setting.contention, setting.path(scheme.shards)
    reductions = [float(block.parameter_count * setting.gradient_bytes) for block in setting.counts.blocks]
    last = list[Sharded]()  # of a micro batch after which gradients are reduced
    for seconds, size, number, again in zip(
        setting.passes(samples), reductions, scheme.gathered, scheme.again, strict=True
    ):
        gather, reduce = to.seconds("all_gather", number * scheme.weight), to.seconds("reduce_scatter", size)
        passes = seconds.forward * rate, seconds.backward * rate
        last.append(Sharded(*passes, gather, gather if again else 0.0, reduce))
    plain = last if scheme.always else [block._replace(reduce=0.0) for block in last]

    def total(part: Callable[[Sharded], float]) -> float:
        """The sum over the blocks in all micro batches."""
        return (count - 1) * sum(map(part, plain)) + sum(map(part, last))

    compute = total(lambda block: block.forward + block.backward)
    seconds, sent = total(lambda block: sum(block.sent)), total(lambda block: sum(map(bool, block.sent)))
    if setting.job.device.type == "cpu":
        # The host itself computes, and waits for each collective: FSDP calls them with async_op=False, which returns at
        # once only on a device's stream, and DeepSpeed waits explicitly.
        late = seconds
    else:
        end = (count - 1) * sharded_step(plain) + sharded_step(last)
        late = min(seconds, max(0.0, end - compute))
    gathered = sum(number * (1 + again) for number, again in zip(scheme.gathered, scheme.again, strict=True))
    reduced = (count if scheme.always else 1) * parameters
    bytes_ = count * gathered * scheme.weight + reduced * setting.gradient_bytes  # of complete tensors
    largest = float(max(*reductions, *(number * scheme.weight for number in scheme.gathered)))
    what = "gathering of weights and reduction of gradients"
    packing = setting.packing_s(bytes_) / 2  # copies of gathered weights out of a message, of gradients into one
    delay = setting.exposed(seconds, late) + packing
    messages = [Message(what, "dp", sent, bytes_, seconds + packing, delay, largest)]
    if scheme.persistent:
        size = float(scheme.persistent * scheme.weight)
        once = to.seconds("all_gather", size)
        messages.append(Message("gathering of small weights after the update", "dp", 1, size, once, once))
    outcome = replicas(setting, tuple(messages) if scheme.shards > 1 else (), peak, scheme.shards)
    return replace(outcome, layout={"dp": setting.job.world_size, "shards": scheme.shards})


@dataclass(frozen=True)
class Gradient:
    """The bytes of a gradient or a message, and when it is ready, in seconds after the start of the backward pass."""

    size: float
    ready: float


def buckets(
    sizes: Sequence[Sequence[float]], backward: Sequence[float], first: float = FIRST_BUCKET, cap: float = BUCKET
) -> list[Gradient]:
    """DDP's buckets: gradients in the order of the backward pass fill a bucket until it has `cap` bytes or more. The
    gradients of a block are ready at the end of its backward pass.

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


class Sharded(NamedTuple):
    """Seconds of one block whose weights are in shards: it is gathered before each pass and reduced after the backward
    pass (0: it is not)."""

    forward: float
    backward: float
    gather: float
    gather_again: float
    reduce: float

    @property
    def sent(self) -> tuple[float, float, float]:
        return self.gather, self.gather_again, self.reduce


def sharded_step(blocks: Sequence[Sharded]) -> float:
    """Seconds of a micro batch. Each block is gathered while the previous block computes (FSDP's prefetch), and its
    gradients are reduced while the next block computes. Gathers and reductions share one link."""
    link, begun, done = 0.0, 0.0, 0.0
    for block in blocks:
        link = max(link, begun) + block.gather
        begun = max(done, link) if block.gather else done
        done = begun + block.forward
    pending, begun, link = 0.0, done, max(link, done)
    for block in reversed(blocks):
        if block.gather_again:
            link = max(link, begun) + block.gather_again
        if pending:  # the reduction of the block before begins after this gather
            link = max(link, done) + pending
        begun = max(done, link - pending) if block.gather_again else done
        done = begun + block.backward
        pending = block.reduce
    return max(done, max(link, done) + pending if pending else link)
