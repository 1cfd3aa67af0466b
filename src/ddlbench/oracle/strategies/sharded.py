"""Weights in shards: FSDP and HSDP (Zhao et al. 2023), ZeRO stage 3 (Rajbhandari et al. 2020).

A block's weights are gathered before its passes, and its gradients are reduced after its backward pass: as one message
each, although DeepSpeed joins those of small blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from ddlbench.errors import Unsupported
from ddlbench.frameworks.deepspeed.knobs import BUCKET_MB, DeepSpeedOptions
from ddlbench.frameworks.fsdp import FSDP, root_group
from ddlbench.job import on_meta
from ddlbench.measure.formulas.memory_formula import FP32_BYTES
from ddlbench.oracle.memory import replicas as memory
from ddlbench.oracle.memory.replicas import Scheme
from ddlbench.oracle.setting import BYTES, Memory, Message, Outcome, Setting
from ddlbench.oracle.strategies import data_parallel
from ddlbench.oracle.strategies.data_parallel import replicas
from ddlbench.texts import MIB

# Parameters: DeepSpeed keeps weights if fewer other weights than this are needed before their next use (its
# stage3_max_reuse_distance).
REUSE = 1e9


def fsdp(framework: FSDP, setting: Setting) -> Outcome:
    """fully_shard is called for each block except those of the root's group (a tied embedding and head, a last norm),
    which is gathered once per micro batch by default. With replicas (HSDP) neighbours share the shards, and gradients
    are all-reduced between the replicas."""
    if framework.offload_parameters:
        raise Unsupported("the oracle has no model of offloading: set framework.offload_parameters=false")
    job, shards = setting.job, setting.world // framework.replicate
    weight = BYTES[job.precision] if framework.scheme(job) == "policy" else FP32_BYTES
    blocks = setting.counts.blocks
    names = root_group(on_meta(job))
    reshard = framework.reshard_after_forward
    again = tuple(block.name not in names if reshard is None else reshard for block in blocks)
    scheme = Scheme(shards, weight, tuple(block.parameter_count for block in blocks), again, always=False)
    outcome = sharded(setting, scheme, partial(memory.fsdp, setting, scheme))
    if framework.replicate == 1:
        return outcome
    size = setting.counts.parameter_count / shards * setting.gradient_bytes
    seconds = setting.path(framework.replicate, shards).seconds("all_reduce", size)
    more = Message("all-reduce of shards", "dp", 1, size, seconds, seconds)
    return replace(outcome, messages=(*outcome.messages, more))


def zero(framework: DeepSpeedOptions, setting: Setting) -> Outcome:
    """DeepSpeed at stage 3 reduces after every micro batch. For the backward pass it gathers again only weights that it
    freed after the forward pass. At other stages each rank has all weights."""
    if framework.offload_optimizer or framework.offload_parameters:
        raise Unsupported(
            "the oracle has no model of offloading: set framework.offload_optimizer and offload_parameters to false"
        )
    if framework.zero_stage < 3:
        return data_parallel.zero(framework, setting)
    blocks, weight = setting.counts.blocks, BYTES["fp16" if framework.casts(setting.job) else "fp32"]
    gathered = tuple(sum(n for n in block.tensor_sizes if n >= framework.persistence_threshold) for block in blocks)
    parameters = [block.parameter_count for block in blocks]
    again = tuple(2 * (sum(parameters) - before) >= REUSE for before in accumulate(parameters))
    persistent = setting.counts.parameter_count - sum(gathered)
    scheme = Scheme(setting.world, weight, gathered, again, always=True, persistent=persistent)
    bucket = (framework.reduce_bucket_mb or BUCKET_MB) * MIB
    return sharded(setting, scheme, partial(memory.zero3, setting, scheme, bucket))


def sharded(setting: Setting, scheme: Scheme, peak: Callable[[], Memory]) -> Outcome:
    """The step of a strategy that keeps weights in shards."""
    count, samples = setting.micro_batch(setting.world)
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
    plain = last if scheme.always else [replace(block, reduce=0.0) for block in last]

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
    exposed = setting.exposed(seconds, late)
    gathered = sum(number * (1 + again) for number, again in zip(scheme.gathered, scheme.again, strict=True))
    reduced = (count if scheme.always else 1) * parameters
    bytes_ = count * gathered * scheme.weight + reduced * setting.gradient_bytes  # of complete tensors
    largest = float(max(*reductions, *(number * scheme.weight for number in scheme.gathered)))
    what = "gathering of weights and reduction of gradients"
    messages = [Message(what, "dp", sent, bytes_, seconds, exposed, largest)]
    if scheme.persistent:
        size = float(scheme.persistent * scheme.weight)
        once = setting.path(scheme.shards).seconds("all_gather", size)
        messages.append(Message("gathering of small weights after the update", "dp", 1, size, once, once))
    outcome = replicas(setting, tuple(messages) if scheme.shards > 1 else (), peak, scheme.shards)
    return replace(outcome, layout={"dp": setting.world, "shards": scheme.shards})


@dataclass(frozen=True)
class Sharded:
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
    """Seconds of a micro batch. Each block is gathered while the previous one computes (FSDP's prefetch), and its
    gradients are reduced while the next one computes. Gathers and reductions share one link."""
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
