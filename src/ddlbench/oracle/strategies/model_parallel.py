"""Ranks share a replica: its layers, or the rows of its images.

Tensor parallelism: ranks share every layer. GPT-2 as in Megatron-LM (Shoeybi et al. 2019; sequence parallelism:
Korthikanti et al. 2022), convolutions by filters or channels (Kahira et al. 2021).

Spatial parallelism: ranks share the rows of every image (Dryden et al. 2019; Kahira et al. 2021). The window of a layer
reaches into rows of a neighbour (its halo). Neighbours send each other these rows of the input x in the forward pass
and their gradients in the backward pass: 2 alpha + 2 B halo(x) beta per layer. Kahira et al. have B (halo(x) +
halo(dy)) beta, as if the gradient of the output were sent. BatchNorm's statistics are those of all parts. The layers
after the last window need complete images: an all-gather precedes them, and every rank computes them completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from ddlbench.counts.counting import count_job
from ddlbench.counts.counts import Block, Share
from ddlbench.errors import Unsupported
from ddlbench.frameworks.megatron.adapter import Megatron
from ddlbench.frameworks.shared.groups import batch_norms
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.tensor.adapter import TensorParallel, split_numbers
from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.job import example_batch, on_meta
from ddlbench.measure.formulas.memory_formula import FP32_BYTES
from ddlbench.oracle.machine import collectives
from ddlbench.oracle.memory.replicas import counts_of_rank, replica
from ddlbench.oracle.setting import Limit, Message, Outcome, Setting
from ddlbench.oracle.strategies.data_parallel import averaged
from ddlbench.recomputation import Plan, repeats

SUMMED_AHEAD, SUMMED_BACK, GATHERED = ("row", "vocab"), ("column", "qkv", "filter", "logits"), ("norm", "channels")
# How many numbers each all-reduce of the loss has for a position: the largest logit, then sums.
LOSS, LOSS_OF_MEGATRON = (1, 3), (1, 1, 1)


class Traffic(NamedTuple):
    """Collectives of one block for one micro batch: seconds of each direction, bytes of all, of the largest, number."""

    forward: float = 0.0
    backward: float = 0.0
    bytes_: float = 0.0
    largest: float = 0.0
    number: float = 0


def tensor(framework: TensorParallel, setting: Setting) -> Outcome:
    layout, model = framework.layout(setting.job.world_size), framework.model(setting.job.model)
    if model is not setting.job.model:  # the same work, which is shared by another plan
        setting = replace(setting, job=replace(setting.job, model=model))
        computation = replace(setting.computation, counts=count_job(setting.job, setting.machine.device.type))
        setting = replace(setting, computation=computation)
    loss, channels = LOSS if framework.parallel_loss else (), framework.convolutions == "channels"
    return parts(setting, layout.dp, layout.tp, framework.sequence_parallel, loss, averages=channels)


def megatron(framework: Megatron, setting: Setting) -> Outcome:
    """The library's layers compute and send the same as the layers of `tensor`, but save less for the backward pass."""
    layout = framework.layout(setting.job.world_size)
    return parts(setting, layout.dp, layout.tp, sequence=False, loss=LOSS_OF_MEGATRON)


def parts(setting: Setting, dp: int, tp: int, sequence: bool, loss: Sequence[int], averages: bool = False) -> Outcome:
    """tp ranks share a replica. The ranks with the same part in each of dp replicas (tp ranks apart) average gradients.

    loss: how many numbers each all-reduce of the loss has for a position; empty: every rank gathers the logits
    averages: whether ranks average the gradients of parameters that are not split
    """
    job, blocks = setting.job, setting.counts.blocks
    count, samples = setting.micro_batch(dp)
    passes, share = setting.passes(samples, tp), Share(tp, sequence, gathered=not loss)
    messages: list[Message] = []
    if tp > 1:
        layers = traffics(setting, samples, tp, [setting.plan(samples)], sequence, loss)
        summed, batch = layer_messages(setting, dp, tp, count, layers)
        waits = (  # of the device for the host that starts the kernels of a block
            min(sent.forward, block.host_forward) + min(sent.backward, block.host_backward)
            for sent, block in zip(layers, passes, strict=True)
        )
        messages += [replace(summed, exposed=summed.exposed - count * sum(waits)), batch]
    if tp > 1 and (sequence or averages):  # TensorReplica.complete_gradients
        size = FP32_BYTES * float(sum(block.parameter_count - block.split_parameters for block in blocks))
        seconds = setting.path(tp).seconds("all_reduce", size) + setting.packing_s(size)
        messages.append(Message("all-reduce of gradients that are not split", "tp", 1, size, seconds, seconds))
    if dp > 1:
        messages.append(averaged(setting, setting.gradient_bytes, passes=passes, dp=dp, tp=tp, views=True))
    return Outcome(
        compute_s=setting.compute_s(passes, count, sum(block.parameters_of_part(tp) for block in blocks)),
        messages=tuple(messages),
        peak=lambda: replica(setting, counts_of_rank(setting, share), dp, bucketed=dp > 1),
        limits=(limit(setting), Limit("dp", job.global_batch, "one sample of the global batch a replica")),
        layout={"dp": dp, "tp": tp},
        micro_samples=samples,
    )


def traffics(
    setting: Setting,
    samples: float,
    tp: int,
    plans: Sequence[Plan],
    sequence: bool = False,
    loss: Sequence[int] = LOSS,
) -> list[Traffic]:
    """The collectives that frameworks/tensor/layers.py makes for each block; none if tp is 1.

    With sequence parallelism a reduce-scatter in one direction and an all-gather in the other direction replace each
    all-reduce. plans: of the stages; blocks whose forward pass runs again send again, in the backward pass
    """
    model, blocks, result = setting.job.model, setting.counts.blocks, list[Traffic]()
    if tp == 1:
        return [Traffic()] * len(blocks)
    to = setting.path(tp)
    again = [times for plan in plans for times in repeats(plan)]
    complete = [times for plan in plans for times in repeats(plan, complete=True)]
    for block, times, complete_times in zip(blocks, again, complete, strict=True):
        ahead, back, last = _collectives(block, samples, sequence, setting.job.device.type == "cpu")
        back += (times + block.selective) * ahead + complete_times * last
        ahead += last
        if block is blocks[-1]:
            positions = FP32_BYTES * samples * (prod(model.input_shape()) if model.kind == "text" else 1)
            logits = [("all_gather", block.output * samples)]
            ahead += [("all_reduce", number * positions) for number in loss] or logits
        forward, backward = (sum(to.seconds(*collective) for collective in part) for part in (ahead, back))
        sizes = [bytes_ for _, bytes_ in (*ahead, *back)]
        result.append(Traffic(forward, backward, sum(sizes), max(sizes, default=0.0), len(sizes)))
    return result


def _collectives(block: Block, samples: float, sequence: bool, on_cpu: bool) -> Sequence[list[tuple[str, float]]]:
    """Kind and bytes of each collective between the layers of a block: those of the forward pass, of the backward pass,
    and at the end of the forward pass. A second run ends before the last ones: they follow the last saved tensor."""
    ahead, back, last = (list[tuple[str, float]]() for _ in range(3))
    for exchange in block.exchanges:
        style, entering, leaving = exchange.style, exchange.input_bytes * samples, exchange.output_bytes * samples
        wide = exchange.added_on_cpu if on_cpu else 1.0
        if style == "channel":
            ahead.append(("all_reduce", wide * leaving))
            back.append(("all_gather", entering))
        elif style in GATHERED:
            (last if style == "channels" else ahead).append(("all_gather", leaving))
        elif style in SUMMED_AHEAD or (style in SUMMED_BACK and (sequence or not exchange.first)):
            size, sums, other = (leaving, ahead, back) if style in SUMMED_AHEAD else (entering, back, ahead)
            sums.append(("reduce_scatter" if sequence else "all_reduce", wide * size))
            if sequence:
                other.append(("all_gather", size))
    return ahead, back, last


def layer_messages(setting: Setting, dp: int, tp: int, count: int, traffics: Sequence[Traffic]) -> list[Message]:
    """The messages of a step between tp ranks that share layers: collectives of `count` micro batches, and the batch.
    Computing waits for all of them."""
    seconds = count * sum(layer.forward + layer.backward for layer in traffics)
    bytes_, number = sum(layer.bytes_ for layer in traffics), sum(layer.number for layer in traffics)
    largest = max(layer.largest for layer in traffics)
    layers = Message("collectives of layers", "tp", count * number, count * bytes_, seconds, seconds, largest)
    return [layers, batch_message(setting, dp, tp)]


def batch_message(setting: Setting, dp: int, tp: int, along: str = "tp") -> Message:
    """tp rank 0 broadcasts the replica's batch to the others: inputs and targets."""
    one, samples = example_batch(setting.job.model, 1), setting.job.replica_batch(dp)
    sizes = samples * one.inputs.nbytes, samples * one.targets.nbytes
    seconds = sum(setting.path(tp).seconds("broadcast", size) for size in sizes)
    return Message("broadcast of the batch", along, 2, sum(sizes), seconds, seconds, max(sizes))


def limit(setting: Setting) -> Limit:
    """The layer with the fewest heads, features, filters or channels."""
    sizes = split_numbers(on_meta(setting.job), setting.job.model.tensor_plan())
    if not sizes:
        return Limit("tp", 1, "no layer can be split")
    layer = min(sizes, key=sizes.__getitem__)
    return Limit("tp", sizes[layer], layer)


def spatial(framework: Spatial, setting: Setting) -> Outcome:
    job, blocks, layout = setting.job, setting.counts.blocks, framework.layout(setting.job.world_size)
    dp, sp = layout.dp, layout.tp
    fewest = min((layer for block in blocks for layer in block.rows), key=lambda layer: layer.window.output)
    count, samples = setting.micro_batch(dp)
    last = max(index for index, block in enumerate(blocks) if block.rows)
    # A part of every image is as much work as fewer images, but each rank starts all kernels and reads all weights.
    shared, complete = (setting.passes(size) for size in (samples / sp, samples))
    parts = [*shared[: last + 1], *complete[last + 1 :]]
    messages: list[Message] = []
    if sp > 1:
        again = set(repeats(setting.plan(samples)))
        if len(again) > 1:
            raise Unsupported(
                "the oracle has no model of shared images of which some blocks run again: set "
                "train.checkpoint_activations to none or blocks"
            )
        forward = 1 + again.pop() + blocks[0].selective  # runs of each block forward
        height = blocks[last].rows[-1].window.output
        size = blocks[last].output * samples * Part(None, 0, sp).span(height)[1] * sp / height  # of equal parts
        number = count * forward  # its gradient is already on every rank
        seconds = number * setting.path(sp).seconds("all_gather", size)
        gathering = Message("all-gather of the last images", "dp", number, number * size, seconds, seconds)
        messages += [_halos(setting, samples, count, sp, forward), gathering, batch_message(setting, dp, sp, "dp")]
        messages += _statistics(setting, count, sp, forward)
    if setting.job.world_size > 1:
        messages.append(averaged(setting, setting.gradient_bytes, passes=parts, views=True))
    return Outcome(
        compute_s=setting.compute_s(parts, count, setting.counts.parameter_count),
        messages=tuple(messages),
        peak=lambda: replica(setting, counts_of_rank(setting, Share(sp=sp)), dp, bucketed=setting.job.world_size > 1),
        limits=(
            Limit("sp", fewest.window.output, fewest.name),
            Limit("dp", job.global_batch, "one sample of the global batch a replica"),
        ),
        layout={"dp": dp, "sp": sp},
        micro_samples=samples,
    )


def _halos(setting: Setting, samples: float, count: int, sp: int, forward: int) -> Message:
    """The exchange of halos. The bytes are those of the rank that sends most. All neighbours exchange at the same time.
    If some neighbours are on different nodes, all wait for them. The gradients of a halo are as large as the halo."""
    machine, world = setting.machine, setting.job.world_size
    flows = int(setting.per_node % sp > 0)
    number, seconds, largest, bytes_ = 0, 0.0, 0.0, np.zeros(sp)
    for layer in (layer for block in setting.counts.blocks for layer in block.rows):
        taken = np.array([layer.window.taken(Part(None, rank, sp)) for rank in range(sp)], dtype=float)  # [user, owner]
        np.fill_diagonal(taken, 0.0)  # own rows are not sent
        ahead, back = (samples * layer.row * taken.sum(axis) for axis in (0, 1))
        passes = [sent for sent in [ahead] * forward + [back] * (not layer.first) if sent.any()]
        number += len(passes)
        sizes = [float(sent.max()) for sent in passes]
        seconds += sum(collectives.send(size, machine, world, flows) for size in sizes)
        largest = max([largest, *sizes])
        bytes_ += sum(passes)
    total = count * float(bytes_.max())
    return Message("halo exchange", "sp", count * number, total, count * seconds, count * seconds, largest)


def _statistics(setting: Setting, count: int, sp: int, forward: int) -> list[Message]:
    """BatchNorm over all parts: mean, variance and number of the pixels of each part are gathered forward, two sums for
    each channel are added backward."""
    to, number, largest, bytes_, seconds = setting.path(sp), 0, 0.0, 0.0, 0.0
    for norm in batch_norms(on_meta(setting.job)):
        gathered, summed = FP32_BYTES * sp * (2 * norm.num_features + 1), FP32_BYTES * 2 * norm.num_features
        number += forward + 1
        largest = max(largest, gathered, summed)
        bytes_ += forward * gathered + summed
        seconds += forward * to.seconds("all_gather", gathered)
        seconds += to.seconds("all_reduce", summed)
    if not number:
        return []
    amounts = (count * amount for amount in (number, bytes_, seconds, seconds))
    return [Message("statistics of BatchNorm", "dp", *amounts, largest=float(largest))]
