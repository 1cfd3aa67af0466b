"""Published iterations of GPT under tensor x data x pipeline parallelism, as Megatron-LM trains it on A100.

A CSV file with the columns of COLUMNS. The weights are in 16 bits, activations are recomputed, the schedule is 1F1B
with equal numbers of layers in each stage (interleaved, if the column `chunks` has more than 1 for a rank), and
gradients are reduced after the last backward pass. No row is the base of another one: the seconds of computing come
from constants of an A100's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.counts.counting import count
from ddlbench.counts.counts import Counts, Line, Share, Work
from ddlbench.errors import UserError
from ddlbench.frameworks.pipeline.schedules import accepts
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import from_roofline
from ddlbench.oracle.memory.stages import Cut
from ddlbench.oracle.predictor import Inputs, job_of, predict
from ddlbench.oracle.setting import BYTES, Setting
from ddlbench.oracle.strategies import pipeline
from ddlbench.oracle.timing.computation import Computation, Speeds
from ddlbench.predict.grading.machines import machine_of
from ddlbench.results.reading.published import CsvRow

COLUMNS = (
    "gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq_len", "tp", "dp", "pp", "iteration_ms",
)  # fmt: skip
PER_NODE = 8  # GPUs of a node
NETWORK = "4x HDR 200 Gb/s a node"  # vTrain's cluster: four adapters for eight A100


class Kernels(NamedTuple):
    """Constants of one A100 under Megatron-LM. All but flops_share are the least squares of the logarithms over every
    sixth of the 720 rows on 2 and 4 GPUs of vTrain's validation data (Bang et al. 2024). They describe these rows; rows
    on more GPUs were not used.

    flops_share: of the peak, which the largest matrix products of an A100 SXM reach in 16 bits: 267.9 of 312 TFLOP/s
        (Bekman, "Machine Learning Engineering", table of maximum achievable matmul FLOPS)
    kernel_s, host_s: seconds of a kernel beside its work, and seconds in which the host starts one
    scores: how often a forward pass reads and writes the scores of attention, [heads, T, T] in 16 bits, because
        attention was not fused
    head_factor: the head takes so many times as long as its FLOPs say with one rank (tp=1); the cause is not known
    """

    flops_share: float = 0.859
    kernel_s: float = 2.82e-5
    host_s: float = 7.65e-5
    scores: float = 4.8
    head_factor: float = 2.3


A100 = Kernels()
cached_configuration = cache(configuration)  # many rows of a file have the same words, and composing takes long


@dataclass(frozen=True)
class Layout:
    """A row. Two measurements of the same layout are equal. chunks: stages of a rank"""

    line: int = field(compare=False)
    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    dp: int
    pp: int
    measured_s: float = field(compare=False)
    chunks: int = 1

    @property
    def name(self) -> str:
        interleaved = f" x {self.chunks} chunks" * (self.chunks > 1)
        return f"dp{self.dp} tp{self.tp} pp{self.pp}{interleaved}, micro batch {self.micro_batch}"

    @property
    def micro_batches(self) -> int:
        """The micro batches of a replica in an iteration."""
        return self.global_batch // self.dp // self.micro_batch


def layouts(rows: Sequence[CsvRow], left_out: list[str]) -> Iterator[Layout]:
    """The layouts of a file. `left_out` gets the reason of each row that is left out."""
    *sizes, milliseconds = COLUMNS
    seen: dict[Layout, int] = {}
    for row in rows:
        try:
            seconds, chunks = row.number(milliseconds) / 1e3, row.count("chunks") if row["chunks"] else 1
            one = Layout(row.line, *map(row.count, sizes), measured_s=seconds, chunks=chunks)
            if one.gpus != one.tp * one.dp * one.pp:
                raise UserError(f"{one.name} does not fill {one.gpus} GPUs")
            if one.layers % (one.pp * chunks) or one.global_batch % (one.dp * one.micro_batch):
                raise UserError(f"{one.name} does not divide {one.layers} layers and {one.global_batch} samples")
            if one.hidden % one.heads or one.heads % one.tp:
                raise UserError(f"{one.heads} heads do not divide a width of {one.hidden}, or not over tp={one.tp}")
            if chunks > 1 and not (one.pp > 1 and accepts("interleaved", one.micro_batches, one.pp)):
                raise UserError(f"{one.micro_batches} micro batches over pp={one.pp} cannot be interleaved")
            first = seen.setdefault(one, row.line)
            if first != row.line:
                raise UserError(f"the same layout as line {first}")
            yield one
        except UserError as error:
            left_out.append(f"line {row.line}: {error}")


def predicted_s(layout: Layout, kernels: Kernels = A100) -> float:
    """Seconds of an iteration."""
    config, machine = _configured(layout, 2, "train.reduce_dtype=fp16")
    machine = replace(machine, overlap=False, packing=0.0)  # Megatron-LM sums gradients in what it sends
    job = job_of(config, layout.gpus, machine)
    counts = _counts(config.model, layout.layers, layout.tp > 1, kernels)
    device = replace(machine.device, kernel_s=kernels.kernel_s, host_s=kernels.host_s)
    speeds = Speeds.of(device, config.train.precision, tf32=False)
    assert speeds is not None
    speeds = replace(speeds, flops_per_s=kernels.flops_share * speeds.flops_per_s)
    computation = Computation(counts, speeds, config.recipe.optimizer.costs, "A100 kernels")
    stages = layout.pp * layout.chunks
    sizes = [layout.layers // stages] * stages
    sizes[0] += 1  # the embedding
    sizes[-1] += 2  # the last norm and the head
    degrees = layout.dp, layout.tp, layout.pp
    schedule = "1f1b" if layout.chunks == 1 else "interleaved"
    setting = Setting(job, machine, computation)
    cut = Cut(setting, schedule, *degrees, tuple(sizes), layout.micro_batches, layout.micro_batch, scattered=True)
    return pipeline.predict(cut).step_s


def planned_s(layout: Layout) -> float | None:
    """Seconds of an iteration as `--plan` predicts it: from the peaks of an A100, with the constants of all clusters of
    GPUs. None if it refuses the layout; interleaved stages are no plan."""
    if layout.chunks > 1:
        return None
    config, machine = _configured(layout, layout.layers, "train.checkpoint_activations=true")
    return predict(config, layout.gpus, Inputs(machine, partial(from_roofline, machine=machine))).step_s


def _configured(layout: Layout, layers: int, word: str) -> tuple[Config, Machine]:
    """The configuration of a layout with so many layers, and its cluster."""
    keys = {"n_layer": layers, "n_embd": layout.hidden, "n_head": layout.heads, "seq_len": layout.seq_len}
    sizes = [f"model.{key}={value}" for key, value in keys.items()]
    config = cached_configuration("+framework=hybrid", "+model=gpt2_medium", *sizes, "train.precision=fp16", word)
    framework: Any = replace(cast(Any, config.framework), dp=layout.dp, tp=layout.tp, pp=layout.pp)
    train = replace(config.train, global_batch=layout.global_batch, batch_per_gpu=None, micro_batch=layout.micro_batch)
    machine = machine_of("A100", NETWORK, PER_NODE, nodes=-(-layout.gpus // PER_NODE))
    return replace(config, framework=framework, train=train), machine


def _counts(model: Any, layers: int, split: bool, kernels: Kernels) -> Counts:
    """The counts of a GPT in 16 bits. model: of two layers, whose layer stands for all; split: whether ranks share
    layers"""
    counts = count(model, "fp16", "cuda", share=Share(cast=True))
    embedding, layer, _, norm, head = counts.blocks
    score_bytes = BYTES["fp16"] * float(model.n_head) * model.seq_len**2  # of one sample
    passes = list[Work]()  # with attention in several kernels
    for work, times in ((layer.forward, kernels.scores), (layer.backward, 1.2 * kernels.scores)):
        attention = np.array(["attention" in name for name in work.names])
        moved = Line(work.moved.fixed, work.moved.per_sample + times * score_bytes * attention)
        passes.append(replace(work, moved=moved))
    forward, backward = passes
    # Only layers are computed again for the backward pass, not the head. Their collectives run again, too.
    moved = (np.concatenate(parts) for parts in zip(astuple(forward.moved), astuple(backward.moved), strict=True))
    backward = Work(
        np.concatenate([forward.flops, backward.flops]),
        Line(*moved),
        np.concatenate([forward.shared, backward.shared]),
        forward.names + backward.names,
    )
    again = (
        replace(exchange, style="column", input_bytes=exchange.output_bytes)
        for exchange in layer.exchanges
        if exchange.style == "row"
    )
    layer = replace(layer, forward=forward, backward=backward, exchanges=(*layer.exchanges, *again))
    if not split:
        forward, backward = (
            replace(work, flops=kernels.head_factor * work.flops) for work in (head.forward, head.backward)
        )
        head = replace(head, forward=forward, backward=backward)
    return replace(counts, blocks=(embedding, *[layer] * layers, norm, head))
