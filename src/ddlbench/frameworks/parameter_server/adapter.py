"""A parameter server with bounded staleness (stale synchronous parallel, Ho et al. 2013; sharded over its workers as in
DistBelief, Dean et al. 2012), on torch.distributed's messages alone: docs/adr/0029.

Every rank trains a replica, and holds some of the parameters for all ranks (server.py). Between two steps it sends its
gradient to the ranks that hold the parameters, and gets back weights that lack at most `bound` updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddlbench.checkpoint import Live
from ddlbench.errors import check_values, refuse
from ddlbench.frameworks.parameter_server.server import GRADIENT, WEIGHTS, Server, flat
from ddlbench.frameworks.shared.groups import Staleness, all_ranks, batch_norms, gradient
from ddlbench.frameworks.shared.refusals import check_alike
from ddlbench.frameworks.shared.replica import Replica, Update, build
from ddlbench.job import Batch, Job, on_meta
from ddlbench.measure.profiling.spans import COMMUNICATE, UPDATE, span
from ddlbench.ranks.launch import group_timeout, is_fake


@dataclass
class ParameterServer:
    """Gradients of at most `bound` updates ago; 0: of the newest weights."""

    name: str = "parameter_server"
    bound: int = 0

    def __post_init__(self) -> None:
        check_values("framework.", self, least={"bound": 0})

    def check(self, job: Job) -> None:
        tensors = len(list(on_meta(job).parameters()))
        reasons = {
            f"gradients are summed in fp32, not {job.reduce_dtype}: set train.reduce_dtype=fp32":
                job.reduce_dtype != "fp32",
            "a rank cannot skip an update that overflows elsewhere, because it does not wait for the other ranks: use "
            "train.precision=bf16, or framework=ddp": job.precision == "fp16",
            "no rank has the norm of all gradients, because each holds a share of them and makes its update at another "
            "time: set train.clip_norm=null, or use framework=ddp": job.clip_norm is not None,
            f"{job.world_size} ranks cannot share {tensors} parameters, which are not cut: start at most {tensors}":
                job.world_size > tensors,
        }  # fmt: skip
        refuse(self.name, reasons)
        check_alike(job, job.world_size)

    def setup(self, job: Job) -> ServedReplica:
        return ServedReplica(job, build(job), self.bound)


def shares(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """The names that each rank holds: the largest first, each to the rank that has the fewest numbers."""
    held, numbers = [list[str]() for _ in range(ranks)], [0] * ranks
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = min(range(ranks), key=lambda rank: (numbers[rank], len(held[rank])))
        held[rank].append(name)
        numbers[rank] += sizes[name]
    return held


class Exchange(Update):
    """The worker's side: instead of an update, every server is sent its gradients and is asked for its weights.

    parameters: the replica's parameters that each rank holds; sizes: how many numbers these are
    weights: for each other rank the memory of its message: its parameters and their staleness
    ages: staleness of the weights in use, by the rank that holds them
    """

    def __init__(self, job: Job, parameters: list[list[nn.Parameter]], server: Server, staleness: Staleness) -> None:
        # The loop's optimizer has the same states and hooks, but other learning rates: the loop sets that of the next
        # gradient while the server's thread may be at an earlier update.
        optimizer: Optimizer = object.__new__(type(server.optimizer))
        vars(optimizer).update(vars(server.optimizer))
        optimizer.param_groups = [dict(group) for group in server.optimizer.param_groups]
        super().__init__(optimizer, job)
        self.job, self.parameters, self.server, self.staleness = job, parameters, server, staleness
        self.sizes = [sum(parameter.numel() for parameter in held) for held in parameters]
        pinned = job.device.type == "cuda"
        self.weights = {
            rank: torch.empty(size + 1, pin_memory=pinned) for rank, size in enumerate(self.sizes) if rank != job.rank
        }
        self.ages = [0] * job.world_size
        self.works: list[tuple[dist.Work, Tensor]] | None = None  # messages in flight; None: no weights are asked for

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        server = self.server
        with span(UPDATE):
            server.rates[server.clocks[self.job.rank]] = self.optimizer.param_groups[0]["lr"]
            self._push(ends=False)
            self.count += 1
        for parameter in parameters:
            parameter.grad = None

    def pull(self) -> None:
        """Wait for the weights that were asked for, if any, and train with them from now on."""
        if self.works is None:
            return
        with span(COMMUNICATE), torch.no_grad():
            works, self.works = self.works, None
            for work, _ in works:
                work.wait()
            answers = {**self.weights, self.job.rank: self.server.take_answer()}
            for rank, answer in answers.items():
                numbers = answer.to(self.job.device, non_blocking=True)  # read until the next gradient is on the host
                sizes = [parameter.numel() for parameter in self.parameters[rank]]
                for parameter, values in zip(self.parameters[rank], numbers[:-1].split(sizes), strict=True):
                    parameter.copy_(values.view(parameter.shape))
            if not is_fake():
                self.ages = [int(answers[rank][-1]) for rank in range(self.job.world_size)]

    def finish(self) -> None:
        """Give all ranks the weights after all their updates, and end the servers' threads."""
        self.pull()
        if self.server.thread is not None or self.job.world_size == 1:
            self._push(ends=True)  # the copies of the first `pull` may still read this memory; the second copies it all
            self.pull()
            self.server.join()

    def _push(self, ends: bool) -> None:
        with span(COMMUNICATE):
            if ends:
                messages = [torch.ones(size + 1) for size in self.sizes]
            else:
                self.staleness.count(max(self.ages))
                more = torch.zeros(1, device=self.job.device)
                made = (flat([*map(gradient, held), more]) for held in self.parameters)
                if self.job.device.type == "cuda":  # one wait for all copies
                    made = [torch.empty(len(row), pin_memory=True).copy_(row, non_blocking=True) for row in made]
                    torch.cuda.current_stream(self.job.device).synchronize()
                messages = list(made)
            group = self.server.group
            works = [(group.recv([weights], rank, WEIGHTS), weights) for rank, weights in self.weights.items()]
            works += [(group.send([messages[rank]], rank, GRADIENT), messages[rank]) for rank in self.weights]
            self.works = works
            # In a rehearsal there are no others, and their gradients are this one.
            for rank in range(self.job.world_size) if is_fake() else [self.job.rank]:
                self.server.accept(rank, None if ends else messages[self.job.rank][:-1])


class ServedReplica(Replica):
    """One rank's live replica, with its share of the server."""

    def __init__(self, job: Job, model: nn.Module, bound: int) -> None:
        parameters = dict(model.named_parameters())
        names = shares({name: parameter.numel() for name, parameter in parameters.items()}, job.world_size)
        held = [[parameters[name] for name in of_rank] for of_rank in names]
        # Contiguous, as what is sent: a fused optimizer reads weights and gradients in the order of their memory.
        layout = torch.contiguous_format
        served = {
            name: nn.Parameter(parameters[name].detach().to("cpu", copy=True, memory_format=layout))
            for name in names[job.rank]
        }
        self.server, self.staleness = Server(job, served, bound, messages(job)), Staleness(job.rank, job.world_size)
        self.exchange = Exchange(job, held, self.server, self.staleness)
        facts = {
            "bound": bound,
            "reduce_dtype": "fp32",
            "communication": "host",
            "parameters_held": self.exchange.sizes,
        }
        dp_group = all_ranks(job) if batch_norms(model) else None
        super().__init__(job, model, self.exchange, facts, dp_group=dp_group, saved_part=f"shard{job.rank}")

    def step(self, batch: Batch | None) -> Tensor | None:
        if not is_fake():
            self.server.start()
        self.exchange.pull()
        return super().step(batch)

    def flush(self) -> None:
        self.exchange.finish()
        self.staleness.gather()

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        for name, weight in self.server.weights.items():
            weight.data.copy_(state[name])

    def live(self) -> Live:
        return Live(self.server.weights, self.server.optimizer, dict(self.model.named_buffers()), self.saved_part)

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Each rank has the weights that it holds; all get them from there."""
        super().restore(numbers)
        served = iter(self.server.weights.values())
        for rank, held in enumerate(self.exchange.parameters):
            for parameter in held:
                weight = next(served).detach() if rank == self.job.rank else torch.empty(parameter.shape)
                dist.broadcast(weight, rank, self.server.group)
                parameter.data.copy_(weight)

    def facts(self) -> dict[str, Any]:
        return {**self.constant_facts, "staleness": self.staleness.by_stage()}

    def close(self) -> None:
        """A rank that stops between two steps serves the others until they have stopped there."""
        if self.exchange.works is not None and self.server.error is None:
            with suppress(RuntimeError):
                self.exchange.finish()
        super().close()


def messages(job: Job) -> dist.ProcessGroup:
    """A group of all ranks on the CPU, with a connection between any two: messages of NCCL would keep the order of a
    stream, and a server answers when another rank is ready (docs/adr/0014)."""
    backend = None if is_fake() else "gloo"
    group = dist.new_group(backend=backend, timeout=group_timeout(job.device, job.timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    others = [rank for rank in range(job.world_size) if rank != job.rank]
    tokens = {rank: (torch.zeros(1), torch.zeros(1)) for rank in others}
    works = [group.send([sent], rank, GRADIENT) for rank, (sent, _) in tokens.items()]
    works += [group.recv([received], rank, GRADIENT) for rank, (_, received) in tokens.items()]
    for work in works:
        work.wait()
    return group
