"""Tensor parallelism: tp ranks share every layer of a model, dp such groups are replicas.

Transformers and classifiers as in Megatron-LM (Shoeybi et al. 2019), convolutions by filters (Kahira et al. 2021). What
is split, and how, stands beside each model; the parts are made in frameworks/tensor/layers.py (docs/adr/0008).
`SharedReplica` is any replica whose ranks share each step: the layers (`TensorReplica`), or the images (spatial).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddlbench.errors import Unsupported, added, check_values, refuse
from ddlbench.frameworks.shared.checkpointing import apply_plan
from ddlbench.frameworks.shared.groups import average, clip_parts, cpu_state, gradient
from ddlbench.frameworks.shared.layout import Layout, divisors, fill
from ddlbench.frameworks.shared.refusals import check_alike, check_reduction, layerwise
from ddlbench.frameworks.shared.replica import Replica, Update, in_ddp
from ddlbench.frameworks.tensor.collectives import (
    Mesh,
    connect_parts,
    full_logits,
    loss_of_parts,
    score_complete,
    share,
)
from ddlbench.frameworks.tensor.layers import Splits, full_state, is_transposed, local_state, split_model
from ddlbench.job import Batch, Job, Model, Score, on_meta
from ddlbench.recomputation import KEY, budgeted

CONVOLUTIONS = ("filters", "channels")
NO_COMPILE = "torch.compile breaks the graph at the collectives of every layer: set train.compile=false"
# By style: what must divide over the ranks, and the attribute of the layer that counts it.
SPLIT = {
    "heads": ("heads", "num_heads"),
    "column": ("features", "out_features"),
    "filter": ("filters", "out_channels"),
    "channel": ("channels", "in_channels"),
}


@dataclass
class ByChannels:
    """A model whose convolutions are split by input channels; each adds up complete outputs, so that what follows it is
    not split. The first convolution is not split: images have three channels (Kahira et al. 2021, p <= min C)."""

    name: str
    kind: str
    model: Model

    def __post_init__(self) -> None:
        self.build, self.input_shape, self.outputs = self.model.build, self.model.input_shape, self.model.outputs

    def tensor_plan(self) -> dict[str, str]:
        plan = {name: style for name, style in self.model.tensor_plan().items() if style not in ("norm", "channels")}
        filters = [name for name, style in plan.items() if style == "filter"]
        rest = {name: style for name, style in plan.items() if style != "filter"}
        return dict.fromkeys(filters[1:], "channel") | rest


@dataclass
class TensorParallel:
    """One mesh of dp x tp ranks, neighbours sharing a replica; conf/framework/tensor.yaml says what each knob means."""

    name: str = "tensor"
    dp: int | None = 1
    tp: int | None = None
    sequence_parallel: bool = False
    parallel_loss: bool = True
    convolutions: str = added("filters")

    def __post_init__(self) -> None:
        check_values("framework.", self, least={"dp": 1, "tp": 1}, choices={"convolutions": CONVOLUTIONS})

    def layout(self, world_size: int) -> Layout:
        return Layout(**fill(world_size, dp=self.dp, tp=self.tp))

    def model(self, model: Model) -> Model:
        """The model with the plan by which this framework shares it."""
        return ByChannels(model.name, model.kind, model) if self.convolutions == "channels" else model

    def check(self, job: Job) -> None:
        layout, job = self.layout(job.world_size), replace(job, model=self.model(job.model))
        no_images = self.convolutions == "channels" and job.model.kind != "images"
        refuse("channel", {f"{job.model.name} has no convolutions to split: choose framework=tensor": no_images})
        if (tp := layout.tp) > 1:
            check_parts(self.name, job, tp)
        length, *more = job.model.input_shape()
        reasons = {
            NO_COMPILE: job.compile,
            f"{job.model.name} has no sequence to split: set framework.sequence_parallel=false":
                self.sequence_parallel and more,
            f"{tp} ranks cannot share the {length} tokens of a sequence: choose "
            f"model.seq_len={length - length % tp or tp} or framework.sequence_parallel=false":
                self.sequence_parallel and length % tp,
        }  # fmt: skip
        refuse("tensor", reasons)
        check_reduction("tensor", job)
        check_alike(job, layout.dp)

    def setup(self, job: Job) -> TensorReplica:
        layout, job = self.layout(job.world_size), replace(job, model=self.model(job.model))
        part, place, dp_group = connect_parts(job, layout)
        part = replace(part, sequence=self.sequence_parallel and layout.tp > 1)
        # Built in full on the CPU, so that all ranks have the same weights; only this rank's part goes to the device.
        model = replace(job, device=torch.device("cpu")).build()
        splits = split_model(model, job.model.tensor_plan(), part)
        model.to(job.device)
        apply_plan(model, job, layout.dp)
        job = replace(job, loss=loss_of_parts(job, part, self.parallel_loss))
        facts = {
            "sequence_parallel": part.sequence,
            "convolutions": self.convolutions,
            "parallel_loss": self.parallel_loss and part.size > 1,
        }
        averages = self.convolutions == "channels"
        return TensorReplica(job, model, (part, place, dp_group), splits, facts, averages)


class SharedReplica(Replica):
    """A replica whose first rank reads the batch, shares it with the others of its `part`, and reports."""

    def __init__(self, mesh: Mesh, *args: Any, **options: Any) -> None:
        """args, options: of `Replica`, without those that the mesh gives"""
        self.part, place, dp_group = mesh
        super().__init__(*args, place=place, dp_group=dp_group, **options)

    def step(self, batch: Batch | None) -> Tensor | None:
        # All ranks of a replica draw the same numbers in a step, also if the rank that loads has drawn some in between.
        torch.manual_seed(torch.initial_seed() + self.place.data_size)
        loss = super().step(self.shared(batch))
        return loss if batch is not None else None

    def evaluate(self, batch: Batch | None, score: Score) -> None:
        reads = batch is not None
        super().evaluate(
            self.shared(batch),
            lambda output, micro: score_complete(
                output, micro if reads else None, score, self.complete_output, self.part
            ),
        )

    def complete_output(self, output: Tensor) -> Tensor:
        """The outputs of all ranks of the part, on each of them."""
        return output

    def shared(self, batch: Batch | None) -> Batch:
        """The batch on every rank of the replica."""
        return share(batch, self.job, self.job.replica_batch(self.place.data_size), self.part)


class TensorReplica(SharedReplica):
    """One rank's part of a live replica.

    splits: how the split parameters are cut, by name; unsplit: the other parameters, which every rank has
    averages: whether ranks average the gradients of unsplit parameters, which are equal up to rounding
    """

    def __init__(
        self,
        job: Job,
        model: nn.Sequential,
        mesh: Mesh,
        splits: Splits,
        facts: Mapping[str, Any],
        averages: bool = False,
    ) -> None:
        self.splits, (part, place, dp_group) = splits, mesh
        self.averages = averages and part.size > 1
        named = dict(model.named_parameters())
        self.unsplit = [parameter for name, parameter in named.items() if name not in splits]
        # The norm for clipping counts each number once: part 0 counts what every rank has.
        counted = [parameter for name, parameter in named.items() if name in splits or part.rank == 0]
        clip = partial(clip_parts, counted=counted, group=part.group)
        wrapped = None
        if dp_group is not None:  # each part averages its gradients over its copies in the other replicas
            wrapped = in_ddp(model, job.reduce_dtype, dp_group, gradient_as_bucket_view=True)
        update = Update(job.optimizer(named.items()), job, part.group, clip)
        facts = {
            "dp": place.data_size,
            "tp": part.size,
            **facts,
            "parameters_per_rank": sum(map(torch.numel, named.values())),
            "reduce_dtype": job.reduce_dtype if dp_group is not None else "fp32",
        }
        super().__init__(mesh, job, model, update, facts, trained=wrapped, saved_part=f"tensor{part.rank}")

    def complete_gradients(self) -> None:
        """With sequence parallelism each rank has the gradients of its tokens; split parameters see all of them. Where
        channels are split, every rank computes the first convolution and BatchNorm: on GPUs its kernels may round
        differently, and the copies would drift apart."""
        if self.part.sequence or self.averages:
            gradients = [gradient(parameter) for parameter in self.unsplit]
            assert self.part.group is not None, "several ranks share the layers"
            average(gradients, self.part.group)
            if self.part.sequence:
                torch._foreach_mul_(gradients, self.part.size)  # pyright: ignore

    def complete_output(self, output: Tensor) -> Tensor:
        return full_logits(output, self.job, self.part)

    def state(self) -> dict[str, Tensor] | None:
        self.synchronize()
        first = self.place.data_rank == 0
        return full_state(cpu_state(self.model), self.splits, self.part) if first else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(local_state(state, self.splits, self.part))


def check_parts(name: str, job: Job, tp: int, pp: int = 1) -> None:
    """Raise Unsupported for what `tp` ranks cannot share in each of `pp` stages of a pipeline: heads, features and
    channels must be shared evenly."""
    plan = job.model.tensor_plan()
    if "logits" not in plan.values():
        raise Unsupported(
            f"{name}: {job.model.name} names no layer whose classes ranks share (tensor_plan has no logits): "
            f"choose framework.tp=1 framework.dp={job.world_size // pp}"
        )
    numbers = split_numbers(on_meta(job), plan)
    uneven = next((what for what, number in numbers.items() if number % tp), None)
    if uneven is not None:
        replica = divisors(job.world_size // pp)
        fits = max(n for n in replica if n < tp and not any(count % n for count in numbers.values()))
        raise Unsupported(
            f"{name}: {tp} ranks cannot share the {numbers[uneven]} {uneven}: "
            f"choose framework.tp={fits} framework.dp={job.world_size // (fits * pp)}"
        )
    (optimizer, needs, others), classes = layerwise(job), job.model.outputs()
    reasons = {
        f"a budget counts complete blocks, of which {tp} ranks have parts: set {KEY}=every:2, for example":
            budgeted(job.checkpoint_activations),
        f"{tp} ranks cannot share the {classes} classes: give each at least one": classes < tp,
        f"{optimizer} needs {needs}, but each rank holds only part of a layer: choose recipe.optimizer.name={others}":
            needs,
    }  # fmt: skip
    refuse(name, reasons)


def split_numbers(model: nn.Sequential, plan: Mapping[str, str]) -> dict[str, int]:
    """What must divide over the ranks, and how many of it there are."""
    numbers: dict[str, int] = {}
    for name, style in plan.items():
        module = model.get_submodule(name)
        if style in SPLIT:
            parts, attribute = SPLIT[style]
            numbers[f"{parts} of {name}"] = getattr(module, "nf" if is_transposed(module) else attribute)
    return numbers
