"""What is saved of a rank, by name; and what a framework must say before it is."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from ddlbench.checkpoint.live import (
    Live,
    checkpointable,
    make_optimizer_states,
    named_tensors,
    set_random_states,
)
from ddlbench.errors import Unsupported
from tests.support.jobs import CPU


def trained(part: str = "model") -> tuple[nn.Sequential, Live]:
    """One update made by AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, Live(dict(model.named_parameters()), optimizer, dict(model.named_buffers()), part)


def test_everything_that_training_changes_has_a_name() -> None:
    model, live = trained("tensor1")
    weight = model.get_parameter("0.weight")
    result = named_tensors(live, rank=5, device=CPU)
    own = {f"rank5/own/{name}" for name, _ in model.named_buffers()}
    parameters = {f"tensor1/parameters/{name}" for name, _ in model.named_parameters()}
    states = {
        f"tensor1/optimizer/{name}/{key}"
        for name, _ in model.named_parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert result.keys() == own | parameters | states | {"rank5/random/cpu"}
    assert result["tensor1/parameters/0.weight"].data_ptr() == weight.data_ptr()  # in place
    assert not result["tensor1/parameters/0.weight"].requires_grad


def test_a_new_optimizer_gets_the_states_of_the_saved_one() -> None:
    _, before = trained()
    saved = named_tensors(before, 0, CPU)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    live = Live(
        dict(model.named_parameters()),
        torch.optim.AdamW(model.parameters(), lr=0.1),
        dict(model.named_buffers()),
    )
    make_optimizer_states(live, {name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()})
    made = named_tensors(live, 0, CPU)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in made.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()
    }


@pytest.mark.parametrize("count", [torch.tensor(7.0), 7])
def test_the_updates_that_a_group_counts_are_saved(count: torch.Tensor | int) -> None:
    """By timm's LAMB: as a tensor, or as a number in older versions."""
    _, before = trained("tensor1")
    before.optimizer.param_groups[0]["step"] = count
    saved = {name: tensor.clone() for name, tensor in named_tensors(before, 0, CPU).items()}
    _, live = trained("tensor1")
    make_optimizer_states(live, {name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()})
    restored = named_tensors(live, 0, CPU)
    assert restored.keys() == saved.keys()
    for name, tensor in restored.items():
        tensor.copy_(saved[name])  # in place, as a checkpoint is read
    assert live.optimizer.param_groups[0]["step"] == 7


@pytest.mark.parametrize("fused", [True, False])
def test_the_states_of_a_fused_optimizer_are_on_its_device(fused: bool) -> None:
    """Also where the groups alone know that it is fused, as in the optimizer that Horovod makes."""
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([{"params": [weight], "fused": fused}])
    make_optimizer_states(
        Live({"weight": weight}, optimizer), {"model/optimizer/weight/step": (torch.Size(), torch.float32)}
    )
    assert optimizer.state[weight]["step"].device.type == ("meta" if fused else "cpu")


def test_random_numbers_go_on_where_they_were() -> None:
    _, live = trained()
    torch.manual_seed(7)
    torch.rand(5)
    saved = {name: tensor.clone() for name, tensor in named_tensors(live, 2, CPU).items()}
    expected, seed = torch.rand(3), torch.initial_seed()
    torch.manual_seed(8)
    set_random_states(saved, 2, CPU)
    assert torch.initial_seed() == seed  # frameworks count from it
    assert torch.equal(torch.rand(3), expected)


def test_a_trainer_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"^other does not save checkpoints: set checkpoint.every=null$"):
        checkpointable("other", cast(Any, object()))
