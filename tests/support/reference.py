"""Data parallel training as one plain process would simulate it: what every framework must equal.

Nothing of the package's loop or frameworks is used. Each replica's micro batches run in turn, their gradients are
averaged, one update is made; BatchNorm keeps one set of running statistics a replica, averaged before validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddlbench.job import Model, type_of_dtype
from ddlbench.recomputation import Choice
from tests.support.tiny import TinyData


@dataclass
class Case:
    """One training of a few updates. micro_batch None: the whole slice of a replica. policy: bf16 not by autocast, but
    by weights and inputs that are cast to it, as FSDP's MixedPrecisionPolicy does."""

    name: str
    model: Model
    precision: str = "fp32"
    micro_batch: int | None = None
    clip_norm: float | None = None
    checkpoint_activations: Choice = False
    offload_activations: Choice = False
    compile: bool = False
    policy: bool = False
    global_batch: int = 12
    steps: int = 5
    lr: float = 0.02
    seed: int = 3
    val_samples: int = 17
    framework: dict[str, Any] = field(default_factory=dict[str, Any])
    rates: list[float] = field(default_factory=list[float])
    optimizer: str = "sgd"

    def rate(self, update: int) -> float:
        """Learning rate of an update: its own, where rates are given."""
        return self.rates[update] if self.rates else self.lr

    @property
    def data(self) -> TinyData:
        # The last global batch is incomplete and must be dropped.
        return TinyData(self.global_batch * self.steps + 5, self.val_samples, self.model.kind)


@dataclass
class Outcome:
    """What two trainings must share."""

    losses: list[float]  # per update, mean over the global batch
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    updates: int
    start: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # the weights before the first update
    ledger: dict[str, Any] = field(default_factory=dict[str, Any])  # as the record has it
    trace: Any = None  # tests/support/trace.py


def reference(case: Case, data_size: int) -> Outcome:
    model, optimizer = begin(case)
    start, statistics = snapshot(model), [buffers(model) for _ in range(data_size)]
    losses: list[float] = []
    for chosen in order(case).split(case.global_batch)[: case.steps]:
        losses.append(accumulate(case, model, statistics, chosen, lambda inputs: forward(case, model, inputs)))
        if case.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return outcome(case, model, statistics, losses, start)


def apart(case: Case, replicas: int, meet: Callable[[list[nn.Module], int], None]) -> Outcome:
    """Replicas with an optimizer each, in one process. meet: called after each update, with how many there were"""
    model, _ = begin(case)
    start, models = snapshot(model), [deepcopy(model) for _ in range(replicas)]
    optimizers = [make_optimizer(case, each.parameters()) for each in models]
    train, size, losses = case.data.split(True, case.model, case.seed), case.global_batch // replicas, list[float]()
    for step, chosen in enumerate(order(case).split(case.global_batch)[: case.steps], 1):
        losses.append(0.0)
        for model, optimizer, share in zip(models, optimizers, chosen.split(size), strict=True):
            for rows in share.split(case.micro_batch or size):
                loss = cross_entropy(forward(case, model, train.inputs[rows]), train.targets[rows]) * len(rows) / size
                loss.backward()
                losses[-1] += loss.item() / replicas
            if case.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        meet(models, step)
    return Outcome(losses, snapshot(models[0]), validate(case, models[0]), case.steps, start)


class Rule:
    """What a minibatch sees of weights that were the newest when it was admitted: here themselves."""

    def forward(self, name: str, old: Tensor, rates: Sequence[float]) -> Tensor:
        """rates: of the updates between the old weights and the minibatch's own update"""
        return old

    def saved(self, weights: Mapping[str, Tensor], newest: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """Around a forward pass with `weights`: decides what its backward pass sees of them."""
        return nullcontext()

    def rate(self, name: str, rate: float, update: int) -> float:
        return rate

    def updated(self, name: str, gradient: Tensor, before: Tensor, after: Tensor) -> None:
        """An update has been made."""


def stale_reference(
    case: Case,
    blocks: Sequence[int],
    staleness: Sequence[int],
    data_size: int = 1,
    emptied: int = 0,
    rules: Callable[[Mapping[str, int]], Rule] = lambda _: Rule(),
) -> Outcome:
    """Training with old weights: what PipeDream must equal.

    Update t changes the newest weights by the gradient that minibatch t has at older ones: stage s sees them as they
    were staleness[s] updates ago, though not as they were before the pipeline was last empty.

    blocks: how many each stage has; emptied: the pipeline is empty before this update, as before the first
    rules: the staleness of each weight, by name -> what is done about it
    """
    model, _ = begin(case)
    start, statistics = snapshot(model), [buffers(model) for _ in range(data_size)]
    of_blocks = [age for age, count in zip(staleness, blocks, strict=True) for _ in range(count)]
    of_block = dict(zip(model._modules, of_blocks, strict=True))
    ages = {name: of_block[name.split(".")[0]] for name, _ in model.named_parameters()}
    rule = rules(ages)
    optimizers = {name: make_optimizer(case, [parameter]) for name, parameter in model.named_parameters()}
    history = [{name: parameter.detach().clone() for name, parameter in model.named_parameters()}]
    losses: list[float] = []
    for update, chosen in enumerate(order(case).split(case.global_batch)[: case.steps]):
        first = emptied if update >= emptied else 0
        weights = dict[str, Tensor]()
        for name, age in ages.items():
            seen = max(first, update - age)
            rates = [case.rate(between) for between in range(seen, update)]
            weights[name] = rule.forward(name, history[seen][name], rates).clone().requires_grad_()

        def stale(inputs: Tensor, weights: dict[str, Tensor] = weights) -> Tensor:
            with autocast(case), rule.saved(weights, history[-1]):
                return torch.func.functional_call(model, weights, (inputs,))

        losses.append(accumulate(case, model, statistics, chosen, stale))
        for name, parameter in model.named_parameters():
            parameter.grad = weights[name].grad
            optimizers[name].param_groups[0]["lr"] = rule.rate(name, case.rate(update), update)
            optimizers[name].step()
            assert parameter.grad is not None
            rule.updated(name, parameter.grad, history[-1][name], parameter.detach())
        history.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return outcome(case, model, statistics, losses, start)


def begin(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(case.seed)
    model = case.model.build().train()
    return model, make_optimizer(case, model.parameters())


def make_optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=case.lr, weight_decay=1e-4)
    return torch.optim.SGD(parameters, lr=case.lr, momentum=0.9, weight_decay=1e-4)


def accumulate(
    case: Case, model: nn.Module, statistics: list[dict[str, Tensor]], chosen: Tensor, run: Callable[[Tensor], Tensor]
) -> float:
    """Adds the mean gradient of the samples `chosen`, each replica's micro batches in turn; their mean loss."""
    train = case.data.split(True, case.model, case.seed)
    replica, total = len(chosen) // len(statistics), 0.0
    for rank, share in enumerate(chosen.split(replica)):
        restore(model, statistics[rank])
        for rows in share.split(case.micro_batch or replica):
            loss = cross_entropy(run(train.inputs[rows]), train.targets[rows]) * len(rows) / case.global_batch
            loss.backward()
            total += loss.item()
        statistics[rank] = buffers(model)
    return total


def outcome(
    case: Case, model: nn.Module, statistics: list[dict[str, Tensor]], losses: list[float], start: dict[str, Tensor]
) -> Outcome:
    restore(model, {name: torch.stack([each[name] for each in statistics]).mean(0) for name in statistics[0]})
    return Outcome(losses, snapshot(model), validate(case, model), case.steps, start)


def order(case: Case) -> Tensor:
    from ddlbench.data.loaders.replica_feed import epoch_order

    return torch.from_numpy(epoch_order(case.data.train_samples, case.seed, 0))


def validate(case: Case, model: nn.Module) -> dict[str, float]:
    model.eval()
    split = case.data.split(False, case.model, case.seed)
    with torch.no_grad():
        output = forward(case, model, split.inputs).float()
    loss = cross_entropy(output, split.targets).item()
    if case.model.kind == "text":
        return {"val_loss": loss, "val_perplexity_token": float(torch.tensor(loss).exp())}
    return {"val_loss": loss, "val_top1": (output.argmax(-1) == split.targets).float().mean().item()}


def forward(case: Case, model: nn.Module, inputs: Tensor) -> Tensor:
    if not case.policy:
        with autocast(case):
            return model(inputs)
    weights = {name: weight.to(type_of_dtype[case.precision]) for name, weight in model.named_parameters()}
    cast = inputs.to(type_of_dtype[case.precision]) if inputs.is_floating_point() else inputs
    return torch.func.functional_call(model, weights, (cast,))


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, -2), targets.flatten())


def autocast(case: Case) -> torch.autocast:
    return torch.autocast("cpu", type_of_dtype[case.precision], enabled=case.precision != "fp32")


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def restore(model: nn.Module, saved: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])
