"""FSDP2's own knobs, memory and states; that it trains what one process trains is tested in tests/equality/."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.fsdp import FSDP, root_group
from ddlbench.frameworks.shared.replica import Replica
from ddlbench.job import Job, Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.vgg import VGG
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.equality.distances import TOLERANCES, distance
from tests.support.changed_job import ChangedJob
from tests.support.equal import assert_reloaded, facts_of, make_job, overflow, ready, reload, train_cases
from tests.support.jobs import job, refused, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case, Outcome, reference

TEXT = GPT2("gpt2", n_layer=1, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)
WIDE = replace(TEXT, n_embd=64)
CASE = Case("gpt2", TEXT, micro_batch=2, lr=0.02)
VGG_CASE = Case("vgg", VGG("vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=7, dropout=0.0))
UNTIED, BF16 = replace(CASE, model=replace(TEXT, tie_weights=False)), replace(CASE, precision="bf16")
POLICY = replace(BF16, policy=True)


@dataclass
class ChangedFSDP(ChangedJob, FSDP): ...


@dataclass
class ChangedDDP(ChangedJob, DDP): ...


@dataclass
class Summed(FSDP):
    """Gradients summed over ranks where they should be averaged."""

    def setup(self, job: Job) -> Replica:
        trainer = super().setup(job)
        for module in trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        return trainer


# name -> case, framework, how far its weights may be from one process's, as a share of the way they went
EXACT = TOLERANCES["gpt2", "fp32"].weights
CLOSE = TOLERANCES["gpt2", "bf16"].weights
KNOBS = {
    "gathered again": (CASE, FSDP(reshard_after_forward=True), EXACT),
    "gathered once": (CASE, FSDP(reshard_after_forward=False), EXACT),
    "offloaded replicas": (replace(CASE, clip_norm=0.5), FSDP(offload_parameters=True, replicate=2), EXACT),
    "offloaded activations, too": (
        CASE,
        ChangedFSDP(offload_parameters=True, changes={"offload_activations": True}),
        EXACT,
    ),
    "replicas only": (CASE, FSDP(replicate=2), EXACT),
    "untied": (UNTIED, FSDP(), EXACT),
    "channels last": (VGG_CASE, ChangedFSDP(changes={"channels_last": True}), EXACT),
    "fp16 reduction": (CASE, ChangedFSDP(changes={"reduce_dtype": "fp16"}), 0.01),
    "policy in fp32": (CASE, FSDP(mixed_precision="policy"), EXACT),
    "policy": (POLICY, FSDP(), CLOSE),
    "policy, checkpointed": (replace(POLICY, checkpoint_activations=True), FSDP(reshard_after_forward=True), CLOSE),
    "autocast": (BF16, FSDP(mixed_precision="autocast"), CLOSE),
}
FAULTS = {"summed": (CASE, Summed(), EXACT)}

OPTIMIZERS = {
    "adamw": OptimizerConfig("adamw", lr=0.02, weight_decay=0.1, decay_norm_and_bias=False),
    "fused adamw": OptimizerConfig("adamw", lr=0.02, weight_decay=0.1, fused=True),
    "lars": OptimizerConfig("lars", lr=0.02, momentum=0.9, weight_decay=0.1, trust_coefficient=0.1),
    "lamb": OptimizerConfig("lamb", lr=0.02, weight_decay=0.1),
}


def train_knobs() -> list[Outcome]:
    return train_cases([(case, framework) for case, framework, _ in (KNOBS | FAULTS).values()])


def train_optimizers() -> list[Outcome]:
    changes = [{"optimizer": partial(make_optimizer, config)} for config in OPTIMIZERS.values()]
    return train_cases([(CASE, framework(changes=each)) for framework in (ChangedFSDP, ChangedDDP) for each in changes])


def sent() -> list[tuple[int, ...]]:
    """All-gathers, reduce-scatters and all-reduces of one update of three micro batches."""
    knobs = [FSDP(), FSDP(reshard_after_forward=True), FSDP(reshard_after_forward=False), FSDP(replicate=2)]
    return [sent_by(framework) for framework in knobs]


def sent_by(framework: FSDP) -> tuple[int, ...]:
    with ready(framework, make_job(CASE)) as (trainer, batch), Collectives() as watched:
        trainer.step(batch)
    kinds = ("all_?gather", "reduce_scatter", "all_?reduce")
    return tuple(sum(bool(re.search(kind, name)) for name in watched.names) for kind in kinds)


class Collectives(TorchDispatchMode):
    """Names of the collectives. (The hooks of torch's CommDebugMode fail in FSDP's forward pass with torch 2.11.)"""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back with its local tensors
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Gathered(TorchDispatchMode):
    """Bytes that all-gathers give."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func.__name__:
            self.total += args[0].nbytes
        return func(*args, **(kwargs or {}))


def cast_bytes() -> dict[str, tuple[int, int]]:
    """For both schemes: bytes of weights in bf16 that autograd holds when the forward pass ends, bytes gathered in an
    update; with all weights sharded again after forward."""
    return {
        scheme: cast_bytes_of(FSDP(reshard_after_forward=True, mixed_precision=scheme))
        for scheme in ("autocast", "policy")
    }


def cast_bytes_of(framework: FSDP) -> tuple[int, int]:
    sizes = {tuple(sorted(weight.shape)) for weight in WIDE.build().parameters() if weight.ndim == 2}
    held, after_forward = dict[int, torch.UntypedStorage](), list[int]()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 and tuple(sorted(tensor.shape)) in sizes:
            held[tensor.data_ptr()] = tensor.untyped_storage()
        return tensor

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        after_forward.append(sum(storage.size() for storage in held.values()))
        return plain(output, targets)

    job = make_job(replace(BF16, model=WIDE, micro_batch=None))
    plain = job.loss
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with ready(framework, replace(job, loss=loss)) as (trainer, batch), Gathered() as gathered, hooks:
        trainer.step(batch)
    return after_forward[0], gathered.total


def state_bytes() -> tuple[int, int, int]:
    """Bytes of the parameters, of the gradients before the update and of the momentum that this rank holds."""
    gradients: list[int] = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients.append(held(parameter.grad for parameter in parameters if parameter.grad is not None))

    with ready(FSDP(), make_job(replace(CASE, model=WIDE, micro_batch=None))) as (trainer, batch):
        trainer.optimizer.register_step_pre_hook(note)
        trainer.step(batch)
        momentum = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
        return held(trainer.model.parameters()), gradients[0], held(momentum)


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind sharded tensors, each piece counted once."""
    storages = [tensor.to_local().untyped_storage() for tensor in tensors]  # pyright: ignore
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def overflowing() -> tuple[int, bool, int, bool]:
    return overflow(FSDP(), make_job(replace(CASE, precision="fp16")))


WORK: dict[str, Callable[[], Any]] = {
    "trained": train_knobs, "optimizers": train_optimizers, "sent": sent, "cast_bytes": cast_bytes,
    "state_bytes": state_bytes, "overflowing": overflowing, "facts": partial(facts_of, BF16, FSDP()),
    "reloaded": partial(reload, CASE, FSDP()),  # an evaluation leaves the outermost group gathered
}  # fmt: skip


@pytest.fixture(scope="module")
def collected() -> list[dict[str, Any]]:
    """What each piece of work returned, by rank: one set of processes does it all."""
    return run_ranks(2, results, WORK)


def test_knobs_train_the_same_as_far_as_they_promise(collected: list[dict[str, Any]]) -> None:
    outcomes = zip((KNOBS | FAULTS).items(), collected[0]["trained"], strict=True)
    off = {name: distance(outcome.weights, reference(case, 2)) for (name, (case, _, _)), outcome in outcomes}
    for name, (_, _, tolerance) in KNOBS.items():
        assert off[name] <= tolerance, off
    assert off["fp16 reduction"] > 1e-6  # it did compress
    by_policy = dict(zip(KNOBS, collected[0]["trained"], strict=False))["policy"]
    assert distance(by_policy.weights, reference(BF16, 2)) > off["policy"]  # it is not autocast
    assert all(off[fault] > 100 * EXACT for fault in FAULTS), off  # the central test would notice


def test_optimizers_see_what_they_see_in_ddp(collected: list[dict[str, Any]]) -> None:
    start, outcomes = reference(CASE, 2).start, collected[0]["optimizers"]
    for name, sharded, whole in zip(OPTIMIZERS, outcomes[: len(OPTIMIZERS)], outcomes[len(OPTIMIZERS) :], strict=True):
        assert distance(sharded.weights, replace(whole, start=start)) <= 1e-3, name


def test_what_an_update_sends(collected: list[dict[str, Any]]) -> None:
    # Two groups of parameters: h0, and the root's with ln_f and the tied embedding and head. Each is gathered in the
    # three forward passes, and again in the three backward passes unless it was kept; gradients go once.
    assert collected[0]["sent"] == [(9, 2, 0), (12, 2, 0), (6, 2, 0), (0, 0, 2)]


def test_the_policy_keeps_no_cast_weights_and_gathers_half_the_bytes(collected: list[dict[str, Any]]) -> None:
    for rank in collected:
        (kept, gathered), (kept_by_policy, gathered_by_policy) = rank["cast_bytes"].values()
        matrices = sum(weight.numel() for name, weight in WIDE.build().named_parameters() if "weight" in name)
        assert kept == pytest.approx(2 * matrices, rel=0.1)  # the embedding's own table is looked up in fp32
        assert kept_by_policy == 0
        assert gathered_by_policy == gathered / 2


def assert_shares(sizes: Iterable[tuple[int, int, int]], world: int) -> None:
    whole = sum(parameter.numel() * 4 for parameter in WIDE.build().parameters())
    for rank in sizes:
        assert rank == pytest.approx([whole / world] * 3, rel=0.05)


def test_a_rank_holds_its_share_of_the_state(collected: list[dict[str, Any]]) -> None:
    assert_shares([rank["state_bytes"] for rank in collected], 2)


def test_all_ranks_skip_an_update_that_overflows_on_one(collected: list[dict[str, Any]]) -> None:
    assert [rank["overflowing"] for rank in collected] == [(1, False, 2, True)] * 2


def test_a_loaded_state_is_what_it_computes_with_and_gives_back(collected: list[dict[str, Any]]) -> None:
    assert_reloaded((rank["reloaded"] for rank in collected), TEXT)


def test_facts_name_the_scheme(collected: list[dict[str, Any]]) -> None:
    assert collected[1]["facts"] == {
        "staleness": 0, "reshard_after_forward": None, "replicas": 1, "shards": 2, "offload_parameters": False,
        "precision_scheme": "policy", "reduce_dtype": "fp32",
    }  # fmt: skip


def placements() -> tuple[list[str], tuple[int, int, int]]:
    """Where two replicas of two shards put a weight, and what plain shards hold."""
    with ready(FSDP(replicate=2), make_job(replace(CASE, global_batch=24))) as (trainer, _):
        weight = next(trainer.model.parameters())
        assert isinstance(weight, DTensor)
        groups = [weight.device_mesh.get_group(axis) for axis in ("replicate", "shard")]
        ranks = [str(dist.get_process_group_ranks(group)) for group in groups]
    return ranks, state_bytes()


@pytest.mark.slow
def test_neighbours_share_a_replica_on_four_ranks() -> None:
    by_rank = run_ranks(4, placements)
    expected = [["[0, 2]", "[0, 1]"], ["[1, 3]", "[0, 1]"], ["[0, 2]", "[2, 3]"], ["[1, 3]", "[2, 3]"]]
    assert [ranks for ranks, _ in by_rank] == expected
    assert_shares([sizes for _, sizes in by_rank], 4)


def four_ranks(**changes: object) -> Job:
    return replace(job(), world_size=4, micro_batch=None, **changes)  # pyright: ignore


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    wrong_knob(FSDP, r"mixed_precision=half must be one of autocast, policy, or null", mixed_precision="half")
    wrong_knob(FSDP, r"replicate=0 must be 1 or more", replicate=0)
    refused(FSDP(replicate=3), four_ranks(), r"replicate=3 does not divide 4 ranks \(rest 1\): .*=2", UserError)
    refused(FSDP(replicate=2), four_ranks(global_batch=5), r"global_batch=5 does not divide over 4 replicas", UserError)
    refused(FSDP(), four_ranks(reduce_dtype="bf16"), "bf16 need NCCL")
    FSDP().check(four_ranks(reduce_dtype="bf16", device=torch.device("cuda", 0)))
    with pytest.raises(Unsupported, match="BatchNorm's weights to fp16 but not its running statistics"):
        FSDP(mixed_precision="policy").check(four_ranks(precision="fp16"))
    FSDP().check(four_ranks(precision="bf16"))  # autocast, as the model has BatchNorm
    FSDP(mixed_precision="policy").check(four_ranks())
    FSDP(mixed_precision="policy").check(four_ranks(precision="bf16", model=TEXT))
    fused = partial(make_optimizer, OptimizerConfig("sgd", lr=0.1, fused=True))
    with pytest.raises(Unsupported, match=r"fused SGD does not support shards: set recipe\.optimizer\.fused=null"):
        FSDP().check(four_ranks(optimizer=fused))
    with pytest.raises(Unsupported, match="gradients are on the host and the loss scale is on the device"):
        FSDP(offload_parameters=True).check(four_ranks(precision="fp16"))
    refused(FSDP(), four_ranks(compile=True, checkpoint_activations=True), "cannot be combined")


def kept(model: Model) -> list[str]:
    """The blocks in the root's group."""
    with torch.device("meta"):
        return root_group(model.build())


def test_blocks_that_share_a_parameter_and_blocks_of_vectors_stay_in_the_root_group() -> None:
    assert kept(TEXT) == ["embed", "ln_f", "head"]
    assert kept(replace(TEXT, tie_weights=False)) == ["ln_f"]


def test_blocks_of_convolutions_have_groups_of_their_own() -> None:
    without_weights = [name for name, block in VGG_CASE.model.build().named_children() if not [*block.parameters()]]
    assert set(kept(VGG_CASE.model)) <= {*without_weights}
