"""Pipelines: stages of consecutive blocks as in frameworks/pipeline, also with tensor parallelism and with shards.

The schedule (timing/schedule.py) is simulated three times: computing alone, with the collectives of layers, and with
the messages between stages. The differences are the exposed seconds of each kind of message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from ddlbench.errors import Unsupported
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.pipeline.schedules import micro_batch_count
from ddlbench.oracle.machine import collectives
from ddlbench.oracle.memory.stages import Cut, memory, rank_parameters
from ddlbench.oracle.setting import Limit, Message, Outcome, Setting
from ddlbench.oracle.strategies.model_parallel import Traffic, layer_messages, limit, traffics
from ddlbench.oracle.timing import schedule
from ddlbench.oracle.timing.schedule import Stages, Timed
from ddlbench.recomputation import repeats


def cut_of(framework: Pipeline | PipeDream, setting: Setting) -> Cut:
    """The stages as `Plan` in frameworks/pipeline/stages.py divides them. If a run would measure the seconds of the
    blocks, they are divided by the predicted seconds."""
    job, blocks, layout = setting.job, setting.counts.blocks, framework.layout(setting.job.world_size)
    if isinstance(framework, PipeDream):
        if framework.correction != "none":
            raise Unsupported("the oracle has no model of framework.correction: set it to none")
        name, stages, count = "pipedream", layout.pp, framework.micro_batches(job, layout)
        sharded, buffered = False, framework.double_buffered
    else:
        name, stages = framework.schedule, layout.pp * framework.virtual_stages
        count = micro_batch_count(name, job, layout.pp, layout.dp)
        sharded, buffered = framework.sharded and layout.dp > 1, False
    samples, seconds = job.replica_batch(layout.dp) / count, None
    if framework.by_seconds:
        seconds = [block.forward + block.backward for block in setting.passes(samples)]
    sizes = framework.sizes(stages, [block.flops for block in blocks], [block.output for block in blocks], seconds)
    degrees = layout.dp, layout.tp, layout.pp
    return Cut(setting, name, *degrees, tuple(sizes), count, samples, sharded, buffered)


def timeline(framework: Pipeline, setting: Setting) -> tuple[list[Timed], Sequence[float]]:
    """The simulated passes of a step with all messages, and the seconds of a message from each stage to the next."""
    cut = cut_of(framework, setting)
    stages = _stages(cut, traffics(setting, cut.samples, cut.tp, cut.plans), sends=True)
    return _passes(cut, stages), stages.send


def predict(cut: Cut) -> Outcome:
    setting, layers = cut.setting, traffics(cut.setting, cut.samples, cut.tp, cut.plans)
    compute_s, busy_s = _time(cut, _stages(cut, [Traffic()] * len(layers), sends=False))
    with_layers_s = _time(cut, _stages(cut, layers, sends=False))[0] if cut.tp > 1 else compute_s
    with_sends_s, _ = _time(cut, _stages(cut, layers, sends=True))
    parameters, shards = rank_parameters(cut), cut.dp if cut.sharded else 1
    update_s = setting.computation.update(max(parameters) / shards) * setting.contention
    layers_s, sends_s = max(0.0, with_layers_s - compute_s), max(0.0, with_sends_s - with_layers_s)
    return Outcome(
        compute_s=busy_s + update_s,
        messages=tuple(_messages(cut, layers, max(parameters), layers_s, sends_s)),
        peak=lambda: memory(cut),
        limits=(
            Limit("pp", len(layers), f"the model has {len(layers)} blocks"),
            *([limit(setting)] if cut.tp > 1 else []),
            Limit("dp", setting.job.global_batch, "one sample of the global batch a replica"),
        ),
        bubble_s=max(0.0, compute_s - busy_s),
        layout={"dp": cut.dp, "tp": cut.tp, "pp": cut.pp, **({"shards": shards} if cut.sharded else {})},
        micro_batches=cut.count,
        micro_samples=cut.samples,
    )


def _stages(cut: Cut, layers: Sequence[Traffic], sends: bool) -> Stages:
    """Seconds of each stage's passes for one micro batch, and of sending it to the next stage. layers: the collectives
    of each block"""
    setting, machine = cut.setting, cut.setting.machine
    slowest, alone = machine.slowest(setting.job.world_size), setting.computation.alone(cut.samples, cut.tp)
    passes, blocks = [*alone], setting.counts.blocks
    times = [number for plan in cut.plans for number in repeats(plan)]  # that each block runs again
    for rank in range(cut.pp):  # each has a host
        spans = [span for stage, span in enumerate(cut.spans) if cut.rank_of(stage) == rank]
        places = [place for span in spans for place in range(*span)]
        of_rank, again = [alone[place] for place in places], [times[place] for place in places]
        queued = setting.computation.queued(of_rank, [blocks[place] for place in places], again)
        for place, one in zip(places, queued, strict=True):
            passes[place] = one.times(slowest)
    # Collectives were measured while the ranks of their group share the cores. The schedule multiplies all seconds by
    # the contention of these ranks, so the collectives are divided by it here.
    contention = 1.0 if machine.cores is None else machine.shared_cores(cut.tp)
    ahead, back = list[float](), list[float]()  # seconds of each block
    for block, sent in zip(passes, layers, strict=True):
        ahead.append(block.forward + max(0.0, sent.forward / contention - block.host_forward))
        back.append(block.backward + max(0.0, sent.backward / contention - block.host_backward))
    forward, backward = ([sum(seconds[first:end]) for first, end in cut.spans] for seconds in (ahead, back))
    sending = _sending(cut) if sends else [0.0] * (len(cut.sizes) - 1)
    if setting.job.device.type == "cpu":  # gloo sends when the receiver asks, and the receiver waits
        measured = machine.sweep("send", setting.job.world_size) is not None  # with all ranks of a node
        contention = machine.shared_cores(setting.per_node) if measured else 1.0
        for stage, seconds in enumerate(sending):
            forward[stage + 1] += seconds / contention
            backward[stage] += seconds / contention
        sending = [0.0] * len(sending)
    return Stages(tuple(forward), tuple(backward), (*sending, 0.0))


def _sending(cut: Cut) -> list[float]:
    """Seconds of a message from each stage to the next stage, on the same rank, in the same node or in another node."""
    setting, stride, node, seconds = cut.setting, cut.stage_ranks, cut.setting.per_node, list[float]()
    machine, world = setting.machine, setting.job.world_size
    for stage, (_, end) in enumerate(cut.spans[:-1]):
        here, there = cut.rank_of(stage) * stride, cut.rank_of(stage + 1) * stride
        if here == there:
            seconds.append(0.0)
            continue
        leaving = Counter((here + i) // node for i in range(stride) if (here + i) // node != (there + i) // node)
        size = setting.counts.blocks[end - 1].output * cut.samples
        gather_s, parts = (setting.path(cut.tp).seconds("all_reduce", size) / 2, cut.tp) if cut.scattered else (0.0, 1)
        seconds.append(gather_s + collectives.send(size / parts, machine, world, max(leaving.values(), default=0)))
    return seconds


def _time(cut: Cut, stages: Stages) -> tuple[float, float]:
    """Seconds of all passes of a step, and the seconds in which the busiest rank computes. PipeDream never waits for an
    empty pipeline: its slowest stage, its slowest message or the cores that all stages share set its rate."""
    machine, node = cut.setting.machine, cut.setting.per_node
    if cut.schedule == "pipedream":
        busy_s = cut.count * max(cut.of_ranks(stages.busy))
        if machine.cores is not None:
            together = cut.count * sum(stages.busy) / cut.pp * machine.shared_cores(node)
            busy_s = max(busy_s * machine.shared_cores(min(cut.stage_ranks, node)), together)
        return max(busy_s, cut.count * 2 * max(stages.send)), busy_s
    if machine.cores is None:
        took = schedule.seconds(cut.schedule, stages, cut.pp, cut.count)
        return took, cut.count * max(cut.of_ranks(stages.busy))
    passes = _passes(cut, stages)
    busy = [0.0] * cut.pp
    for item in passes:
        busy[item.rank] += item.end - item.begin
    return passes[-1].end, max(busy)


def _passes(cut: Cut, stages: Stages) -> list[Timed]:
    """The simulated passes of one replica. If the number of cores of a node is known, the ranks that compute at the
    same time share them."""
    setting, machine = cut.setting, cut.setting.machine

    def slower(busy: int) -> float:
        ranks = busy * cut.stage_ranks * setting.per_node / setting.job.world_size  # that compute on a node
        return machine.shared_cores(ceil(ranks)) if machine.cores is not None else 1.0

    return schedule.simulate(cut.schedule, stages, cut.pp, cut.count, slower)


def _messages(cut: Cut, layers: Sequence[Traffic], most: float, layers_s: float, sends_s: float) -> Iterator[Message]:
    """The messages of a step.

    layers: the collectives of each block; most: parameters of the rank that has most of them
    layers_s, sends_s: seconds by which collectives of layers and messages between stages delay the step
    """
    setting, counts = cut.setting, cut.setting.counts
    if cut.tp > 1:
        summed, batch = layer_messages(setting, cut.dp, cut.tp, cut.count, layers)
        yield replace(summed, seconds=max(summed.seconds / cut.pp, layers_s), exposed=layers_s)
        ends = 2 if cut.two_ends else 1  # ranks with the batch; they broadcast at the same time
        yield replace(batch, count=ends * batch.count, bytes_=ends * batch.bytes_)
    if cut.pp > 1:  # outputs to next stages and gradients to previous ones, of the rank that sends most
        sizes = [list[float]() for _ in range(cut.pp)]
        for stage, (_, end) in enumerate(cut.spans[:-1]):
            pair = {cut.rank_of(stage), cut.rank_of(stage + 1)}
            for rank in pair if len(pair) == 2 else ():
                sizes[rank].append(counts.blocks[end - 1].output * cut.samples)
        sent = max(sizes, key=sum)
        seconds = max(sends_s, 2 * cut.count * max(_sending(cut)))
        number, bytes_ = cut.count * len(sent), cut.count * sum(sent)
        yield Message("activations between stages", "pp", number, bytes_, seconds, sends_s, max(sent, default=0.0))
    if cut.dp > 1:  # after the schedule, over the replicas of a stage
        size = setting.gradient_bytes * most
        seconds = setting.path(cut.dp, cut.tp).seconds("all_reduce", size) + setting.packing_s(size)
        what, number = ("reduction and gathering of shards", 2) if cut.sharded else ("all-reduce of gradients", 1)
        yield Message(what, "dp", number, number * size, seconds, seconds)
    if cut.two_ends and counts.tied:  # over the first and the last stage
        size = setting.gradient_bytes * counts.tied / cut.tp / (cut.dp if cut.sharded else 1)
        seconds = setting.path(2, cut.stage_ranks * (cut.pp - 1)).seconds("all_reduce", size)
        yield Message("all-reduce of the tied embedding", "ends", 1, size, seconds, seconds)
