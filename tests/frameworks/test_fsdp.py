"""What FSDP2 sends and holds, and what it refuses; that it trains what one process trains is tested in
tests/equality/."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddlbench.errors import UserError
from ddlbench.frameworks.fsdp import FSDP, root_group
from ddlbench.job import Job, Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.equality.cases import MODELS
from tests.support.equal import facts_of, make_job, ready
from tests.support.jobs import job, refused, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case

TEXT = GPT2("gpt2", n_layer=1, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)
VGG16 = MODELS["vgg"]
WIDE = replace(TEXT, n_embd=64)
CASE = Case("gpt2", TEXT, micro_batch=2)
BF16 = replace(CASE, precision="bf16")


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


WORK: dict[str, Callable[[], Any]] = {
    "sent": sent, "cast_bytes": cast_bytes, "state_bytes": state_bytes, "facts": partial(facts_of, BF16, FSDP()),
}  # fmt: skip


@pytest.fixture(scope="module")
def collected() -> list[dict[str, Any]]:
    """What each piece of work returned, by rank: one set of processes does it all."""
    return run_ranks(2, results, WORK)


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
    by_policy = FSDP(mixed_precision="policy")
    refused(by_policy, four_ranks(precision="fp16"), "BatchNorm's weights to fp16 but not its running statistics")
    FSDP().check(four_ranks(precision="bf16"))  # autocast, as the model has BatchNorm
    by_policy.check(four_ranks())
    by_policy.check(four_ranks(precision="bf16", model=TEXT))
    fused = partial(make_optimizer, OptimizerConfig("sgd", lr=0.1, fused=True))
    refused(
        FSDP(), four_ranks(optimizer=fused), r"fused SGD does not support shards: set recipe\.optimizer\.fused=null"
    )
    offloaded = FSDP(offload_parameters=True)
    refused(offloaded, four_ranks(precision="fp16"), "gradients are on the host and the loss scale is on the device")


def kept(model: Model) -> list[str]:
    """The blocks in the root's group."""
    with torch.device("meta"):
        return root_group(model.build())


def test_blocks_that_share_a_parameter_and_blocks_of_vectors_stay_in_the_root_group() -> None:
    assert kept(TEXT) == ["embed", "ln_f", "head"]
    assert kept(replace(TEXT, tie_weights=False)) == ["ln_f"]


def test_blocks_of_convolutions_have_groups_of_their_own() -> None:
    without_weights = [name for name, block in VGG16.build().named_children() if not [*block.parameters()]]
    assert set(kept(VGG16)) <= {*without_weights}
