"""The parameter server on real ranks: bit for bit ddp without staleness; with it, one plain process whose gradients are
as old as each rank counted; a slow rank that the other does not wait for; refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.parameter_server.adapter import ParameterServer, ServedReplica, shares
from ddlbench.job import Batch, Framework, Job
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from ddlbench.rehearsal.observed import UNPINNED
from tests.equality.cases import MODELS, RATES
from tests.equality.distances import TOLERANCES, assert_equal, assert_same_bits, distance
from tests.support.changed_job import changed
from tests.support.equal import make_job, ready, train_case, train_cases
from tests.support.jobs import refused, two_ranks, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case, Outcome, begin, cross_entropy, order, reference, snapshot, validate
from tests.support.rehearsals import rehearsed

CASES = {
    "gpt2": Case("gpt2", MODELS["gpt2"], lr=0.02, rates=[0.02, 0.03, 0.005, 0.04, 0.01]),
    "gpt2, adamw": Case("gpt2", MODELS["gpt2"], lr=0.002, optimizer="adamw"),
    "resnet": Case("resnet", MODELS["resnet"], lr=RATES["resnet"], seed=6, micro_batch=3),
    "vgg, bf16": Case("vgg", MODELS["vgg"], precision="bf16", lr=RATES["vgg"]),
}
TEXT = TOLERANCES["gpt2", "fp32"]
BOUND = 2
LATE = replace(CASES["gpt2"], steps=6, lr=0.1, rates=[])


@dataclass
class Slow(ParameterServer):
    """After its first step (a warm-up, after which all ranks meet) rank 1 waits until rank 0 has ended as many steps as
    it may without it. Keeps the version of each server's weights that each gradient was computed with."""

    def setup(self, job: Job) -> ServedReplica:
        trainer, store = super().setup(job), dist.distributed_c10d._get_default_store()  # pyright: ignore
        own, push = trainer.step, trainer.exchange._push  # pyright: ignore[reportPrivateUsage]
        self.made, self.versions, self.ended_before = 0, list[list[int]](), False

        def step(batch: Batch | None) -> Tensor | None:
            if job.rank == 1 and self.made == 1:
                store.wait([f"steps {1 + self.bound + 1}"])
                self.ended_before = True
            self.made += 1
            loss = own(batch)
            if job.rank == 0:
                store.set(f"steps {self.made}", "ended")
            return loss

        def pushed(ends: bool) -> None:
            if not ends:
                self.versions.append([self.made - 1 - age for age in trainer.exchange.ages])
            push(ends)

        trainer.step, trainer.exchange._push = step, pushed  # pyright: ignore
        return trainer


def both() -> dict[str, list[Outcome]]:
    frameworks: list[Framework] = [DDP(), ParameterServer()]
    return {name: train_cases([(case, each) for each in frameworks]) for name, case in CASES.items()}


def late() -> tuple[Outcome, list[list[int]], bool]:
    slow = Slow(bound=BOUND)
    return train_case(LATE, slow), slow.versions, slow.ended_before


def facts() -> dict[str, Any]:
    with ready(ParameterServer(bound=1), make_job(CASES["gpt2"]), dist.get_rank()) as (trainer, batch):
        trainer.step(batch)
        trainer.step(batch)
        trainer.flush()
        return trainer.facts()


WORK: dict[str, Callable[[], Any]] = {
    "both": both, "late": late, "facts": facts,
}  # fmt: skip


@cache
def ranks() -> list[dict[str, Any]]:
    """What each piece of work returned, by rank: one set of processes does it all."""
    return run_ranks(2, results, WORK)


@pytest.mark.parametrize("name", CASES)
def test_without_staleness_two_ranks_train_as_ddp_bit_for_bit(name: str) -> None:
    for rank in ranks():
        ddp, served = rank["both"][name]
        assert_same_bits(served, ddp)
        assert served.updates == ddp.updates == CASES[name].steps
        assert served.metrics["val_loss"] == ddp.metrics["val_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 4])
def test_other_numbers_of_ranks_are_equal_within_the_tolerance(world: int) -> None:
    """The mean is added in the order of ranks, ddp's in that of a ring."""
    case = replace(CASES["gpt2"], global_batch=6 * world)
    (result,) = run_ranks(world, train_cases, [(case, ParameterServer())])[0]
    assert_equal(result, simulation(case, fresh(case, world)), TEXT)


def fresh(case: Case, world: int) -> list[list[list[int]]]:
    """Versions of the newest weights, as `simulation` takes them."""
    return [[[clock] * world for clock in range(case.steps)] for _ in range(world)]


def simulation(case: Case, versions: Sequence[Sequence[Sequence[int]]]) -> Outcome:
    """One plain process: rank r's gradient of clock t is that of weights of which those that rank k holds are version
    versions[r][t][k]. Update t is made by the mean of clock t."""
    model, optimizer = begin(case)
    start, train, world = snapshot(model), case.data.split(True, case.model, case.seed), len(versions)
    names = shares({name: weight.numel() for name, weight in model.named_parameters()}, world)
    holder = {name: rank for rank, held in enumerate(names) for name in held}
    history = [{name: weight.detach().clone() for name, weight in model.named_parameters()}]
    losses = list[float]()
    for clock, chosen in enumerate(order(case).split(case.global_batch)[: case.steps]):
        losses.append(0.0)
        for seen, rows in zip(versions, chosen.split(len(chosen) // world), strict=True):
            old: Mapping[str, Tensor] = {
                name: history[seen[clock][rank]][name].clone().requires_grad_() for name, rank in holder.items()
            }
            loss = cross_entropy(torch.func.functional_call(model, old, (train.inputs[rows],)), train.targets[rows])
            loss.backward()
            losses[-1] += loss.item() / world
            for name, weight in model.named_parameters():
                gradient = old[name].grad
                assert gradient is not None
                weight.grad = gradient / world + (0 if weight.grad is None else weight.grad)
        optimizer.param_groups[0]["lr"] = case.rate(clock)
        optimizer.step()
        optimizer.zero_grad()
        history.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
    return Outcome(losses, snapshot(model), validate(case, model), case.steps, start)


def test_a_slow_rank_does_not_stop_the_other_within_the_bound() -> None:
    """Rank 1 sends one gradient, and no more until rank 0 has ended four steps. In the last of them rank 0 saw weights
    after the one update that both had made, and lacked two of its own."""
    (_, fast, _), (_, _, ended_before) = (rank["late"] for rank in ranks())
    assert ended_before
    assert fast[1 + BOUND] == [1, 1]


def test_staleness_is_counted_and_never_above_the_bound() -> None:
    for outcome, versions, _ in (rank["late"] for rank in ranks()):
        ages = [clock - min(seen) for clock, seen in enumerate(versions)]
        assert all(0 <= age <= BOUND for age in ages)
        assert outcome.updates == LATE.steps
    assert max(clock - min(seen) for clock, seen in enumerate(ranks()[0]["late"][1])) == BOUND


def test_old_gradients_train_as_one_process_with_weights_as_old() -> None:
    result: Outcome = ranks()[0]["late"][0]
    expected = simulation(LATE, [rank["late"][1] for rank in ranks()])
    assert_equal(result, expected, TEXT)
    assert distance(result.weights, simulation(LATE, fresh(LATE, 2))) > 2 * TEXT.weights


def test_facts_say_how_old_gradients_were_and_who_holds_how_much() -> None:
    for facts in (rank["facts"] for rank in ranks()):
        assert facts["bound"] == 1
        assert facts["communication"] == "host"
        assert len(facts["staleness"]) == 2
        assert max(facts["staleness"]) <= 1
        assert sum(facts["parameters_held"]) == sum(weight.numel() for weight in MODELS["gpt2"].build().parameters())


def test_gradients_reach_pinned_memory_of_the_host_with_one_wait() -> None:
    waits = rehearsed("parameter_server", "gpt2_small", device="cuda").host_waits or {}
    names = Counter({call.partition(" at ")[0]: number for call, number in waits.items()})
    assert names == {"Stream.synchronize": 1, UNPINNED: 1}  # the other one is for the weights that this rank holds


def in_channels_last() -> tuple[Outcome, bool]:
    """What a fused optimizer trains, and whether all replicas have the weights that a checkpoint gives the servers."""
    images = Case("vgg", MODELS["vgg"], lr=RATES["vgg"])
    fused = OptimizerConfig("sgd", lr=images.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    framework = changed(ParameterServer(), channels_last=True, optimizer=partial(make_optimizer, fused))
    outcome = train_case(images, framework)
    with ready(framework, make_job(images)) as (trainer, _):
        before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        for weight in trainer.live().parameters.values():
            weight.data.mul_(2)
        trainer.restore(trainer.numbers())
        restored = [torch.equal(weight, 2 * before[name]) for name, weight in trainer.model.named_parameters()]
    return outcome, all(restored)


def test_weights_in_channels_last_are_updated_and_restored() -> None:
    by_rank = run_ranks(2, in_channels_last)
    expected = reference(Case("vgg", MODELS["vgg"], lr=RATES["vgg"]), 2)
    assert_equal(by_rank[0][0], expected, TOLERANCES["vgg", "fp32"])
    assert all(restored for _, restored in by_rank)


def test_the_largest_parameters_are_shared_out_first() -> None:
    assert shares({"a": 1, "b": 5, "c": 3, "d": 2}, 2) == [["b", "a"], ["c", "d"]]
    assert shares({"a": 1, "b": 0}, 2) == [["a"], ["b"]]


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    ParameterServer().check(two_ranks(precision="bf16"))
    many = replace(two_ranks(global_batch=1000), world_size=1000)
    refused(ParameterServer(), many, r"1000 ranks cannot share \d+ parameters")
    wrong_knob(ParameterServer, r"framework\.bound=-1 must be 0 or more", bound=-1)
