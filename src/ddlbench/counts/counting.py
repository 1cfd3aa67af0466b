"""Counts the work and the memory of the blocks of a model: the real model runs under fake tensors.

The model and the loss run forward and backward at two batch sizes, without data. A straight line through the two counts
of each operation gives the part that grows with the batch (activations) and the part that does not grow (weights).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddlbench.counts.counts import UNSHARED, Block, Counts, Floats, Line, Share, Work
from ddlbench.counts.operations import Observer, Operation, saved_bytes
from ddlbench.frameworks.shared.checkpointing import keep_costly_outputs, selective_names
from ddlbench.frameworks.spatial.layers import rows_of, share_rows, windows
from ddlbench.frameworks.tensor.collectives import Part, gather_from, parallel_cross_entropy
from ddlbench.frameworks.tensor.layers import split_model
from ddlbench.job import Job, Model, example_batch, type_of_dtype
from ddlbench.measure.formulas.memory_formula import SPLIT
from ddlbench.ranks.fake.fake import fake_world
from ddlbench.ranks.fake.kernels import dropout
from ddlbench.ranks.fake.storages import identity
from ddlbench.recipe.recipe import CrossEntropy
from ddlbench.recomputation import SELECTIVE

SAMPLES = (2, 4)  # BatchNorm refuses one value a channel
_counted = dict[object, Counts]()


def count(model: Model, precision: str, device_type: str, smoothing: float = 0.0, share: Share = UNSHARED) -> Counts:
    """The counts of a rank's share of a model. They are made once for each model, precision, kind of device and share.
    smoothing: of the labels in the loss"""
    key = type(model), repr(model), precision, device_type, smoothing, share
    if key not in _counted:
        ranks = share.tp * share.sp
        with FakeTensorMode() if ranks == 1 else fake_world(0, ranks, torch.device("cpu")), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fake tensors warn about values that they do not have
            fake = FakeModel(model, precision, device_type, smoothing, share)
            (small, tied), (large, _) = map(fake.run, SAMPLES)
        _counted[key] = Counts(tuple(map(_joined, small, large)), tied)
    return _counted[key]


def count_job(job: Job, device_type: str, share: Share = UNSHARED) -> Counts:
    """`count` with the model, precision, loss and recomputation of a job."""
    smoothing = job.loss.label_smoothing if isinstance(job.loss, CrossEntropy) else 0.0
    share = replace(share, selective=job.checkpoint_activations == SELECTIVE)
    return count(job.model, job.precision, device_type, smoothing, share)


def _joined(small: Any, large: Any) -> Any:
    """A block from its counts at both batch sizes: a straight line through each pair of counts."""
    if isinstance(small, Line):
        slope: Any = (large.fixed - small.fixed) / (SAMPLES[1] - SAMPLES[0])
        return Line(small.fixed - slope * SAMPLES[0], slope)
    if isinstance(small, Work):
        assert small.names == large.names, "the batch size changes what runs"
    if isinstance(small, Block | Work):
        names = [item.name for item in fields(small)]
        return replace(small, **{name: _joined(getattr(small, name), getattr(large, name)) for name in names})
    return small


class FakeModel:
    """A model under fake tensors.

    value: input of the next block
    uncounted: tensors that are not activations: weights, buffers, the batch
    saved: storages that autograd has saved for an earlier block, and weights
    selective: blocks whose cheap operators run again
    """

    value: Tensor
    targets: Tensor
    uncounted: list[Tensor]
    saved: set[int]

    def __init__(self, model: Model, precision: str, device_type: str, smoothing: float, share: Share) -> None:
        default, dtype = torch.get_default_dtype(), type_of_dtype[precision]
        self.dtype = dtype if share.cast else default
        self.autocast = torch.autocast("cpu", dtype, enabled=precision != "fp32" and not share.cast)
        self.example, self.plan = partial(example_batch, model), model.tensor_plan()
        loss = CrossEntropy(smoothing)
        self.loss: Callable[[Tensor, Tensor], Tensor] = loss
        torch.set_default_dtype(self.dtype)
        try:
            self.model = model.build().train()
        finally:
            torch.set_default_dtype(default)
        if share.tp > 1:
            part = Part(dist.group.WORLD, 0, share.tp, share.sequence, adds_bf16=device_type == "cuda")
            split_model(self.model, self.plan, part)
            if share.gathered:
                self.loss = lambda logits, targets: loss(gather_from(logits, -1, model.outputs(), part), targets)
            else:
                self.loss = partial(parallel_cross_entropy, classes=model.outputs(), smoothing=smoothing, part=part)
        self.image_part = Part(dist.group.WORLD, 0, share.sp) if share.sp > 1 else None
        if self.image_part is not None:
            share_rows(self.model, windows(model), self.image_part)
        if device_type == "cuda":
            # On GPUs dropout is one kernel with a mask of bytes, and attention is one kernel with its dropout. On the
            # CPU torch computes both step by step.
            for name, module in self.model.named_modules():
                if isinstance(module, nn.Dropout) and name.endswith("attn_dropout"):
                    module.p = 0.0
                elif isinstance(module, nn.Dropout):
                    module.forward = partial(dropout, p=module.p, train=True)
        self.selective = selective_names(self.model) if share.selective else []
        if share.selective:
            keep_costly_outputs(self.model)

    def run(self, samples: int) -> tuple[list[Block], int]:
        """The counts of all blocks at one batch size, and the number of tied parameters. Each block runs forward and
        backward by itself. If several blocks and their inputs are equal, only the first block runs."""
        batch = self.example(samples)
        self.value = batch.inputs.to(self.dtype) if batch.inputs.is_floating_point() else batch.inputs
        if self.image_part is not None:
            self.value = rows_of(self.value, self.image_part)
        self.targets = batch.targets
        self.uncounted = [*self.model.parameters(), *self.model.buffers(), self.value, self.targets]
        self.saved = {identity(tensor) for tensor in (*self.model.parameters(), self.value)}
        blocks, tied = list[Block](), 0
        counted = set[int]()  # parameters of earlier blocks
        runs = dict[object, tuple[Block, Tensor]]()  # with the output
        *_, last = self.model.children()
        for name, module in self.model.named_children():
            is_last, value = module is last, self.value
            parameters = tuple((key, tensor.shape, id(tensor) in counted) for key, tensor in module.named_parameters())
            layout = value.shape, value.dtype, value.stride(), value.requires_grad, identity(value) in self.saved
            kind = is_last, repr(module), parameters, layout  # equal for blocks that compute the same
            if kind in runs:
                block, first = runs[kind]
                output = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype)
                if identity(first) in self.saved:
                    self.saved.add(identity(output))
                    weakref.finalize(output.untyped_storage(), self.saved.discard, identity(output))
            else:
                block, output = self._block(samples, name, module, is_last, counted)
                runs[kind] = block, output.detach()
            tied += sum(tensor.numel() for tensor in module.parameters() if id(tensor) in counted)
            counted |= {id(tensor) for tensor in module.parameters()}
            rows = tuple(replace(item, name=item.name.replace(block.name, name, 1)) for item in block.rows)
            blocks.append(replace(block, name=name, rows=rows))
            self.value = output.detach().requires_grad_()
        return blocks, tied

    def _block(
        self, samples: int, name: str, module: nn.Module, is_last: bool, counted: set[int]
    ) -> tuple[Block, Tensor]:
        """The counts of one block at this batch size, and its output."""
        value = self.value
        uncounted = [*self.uncounted, value] if identity(value) in self.saved else self.uncounted
        selective = name in self.selective
        with Observer(samples, uncounted, value) as observer:
            saving = saved_bytes(self.saved, observer if selective else None)
            with self.autocast, observer.modules(name, module, self.plan), saving as saved:
                output = module(value)
                result = self.loss(output, self.targets) if is_last else output
            ahead, unsaved = len(observer.operations), 0 if identity(output) in self.saved else output.nbytes
            # Nothing here refers to the output's gradient: it is freed after its use, as in a complete model.
            gradient = [torch.ones_like(result)]
            result.register_hook(lambda _: gradient.pop())
            anything = torch.ones((), dtype=result.dtype).expand_as(result)
            back = len(observer.operations)
            result.backward(anything)
        operations = observer.operations
        accumulating = observer.accumulating((tensor.grad for tensor in module.parameters()), ahead)
        module.zero_grad()
        parameters = {f"{name}.{key}": tensor for key, tensor in module.named_parameters() if id(tensor) not in counted}
        split = {f"{child}.{key}" for child, style in self.plan.items() for key in SPLIT.get(style, ())}
        block = Block(
            name=name,
            forward=_work_at(samples, operations[:ahead]),
            backward=_work_at(samples, operations[back:]),
            tensor_sizes=tuple(tensor.numel() for tensor in parameters.values()),
            split_parameters=sum(tensor.numel() for key, tensor in parameters.items() if key in split),
            output=output.nbytes / samples,
            saved=Line(saved[0], 0.0),
            buffers=sum(buffer.nbytes for buffer in module.buffers()),
            exchanges=tuple(observer.exchanges),
            rows=tuple(observer.rows),
            unsaved_output=unsaved / samples,
            weighted_outputs=observer.weighted_outputs / samples,
            live_forward=_constant([operation.live for operation in operations[:ahead]]),
            # An output that autograd does not save is freed before the backward pass; here `output` still refers to it.
            live_backward=_constant([operation.live - unsaved for operation in operations[ahead:]]),
            live_accumulating=_constant([bytes_ - unsaved for bytes_ in accumulating]),
            selective=selective,
        )
        return block, output


def _work_at(samples: int, operations: Sequence[Operation]) -> Work:
    work = [operation for operation in operations if operation.moved]
    return Work(
        flops=np.array([operation.flops / samples for operation in work], dtype=float),
        moved=_constant([operation.moved for operation in work]),
        shared=np.array([operation.shared for operation in work], dtype=bool),
        names=tuple(operation.name for operation in work),
    )


def _constant(values: Sequence[float]) -> Line[Floats]:
    return Line(np.array(values, dtype=float), np.zeros(len(values)))
