from __future__ import annotations

import weakref

import torch

from ddlbench.ranks.boundary import Losses


def test_losses_in_their_order_and_no_tensor_of_a_step_stays() -> None:
    losses, steps = Losses(4), list[weakref.ref[torch.Tensor]]()
    for value in (3.0, float("nan"), -1.0):
        loss = torch.tensor(value)
        losses.add(loss)
        steps.append(weakref.ref(loss))
        del loss
    first, second, third = losses.tolist()
    assert (first, second != second, third) == (3.0, True, -1.0)
    assert [step() for step in steps] == [None] * 3


def test_an_epoch_without_losses_on_this_rank() -> None:
    assert Losses(4).tolist() == []


def test_a_loss_of_another_type_is_a_number_of_32_bits() -> None:
    losses = Losses(2)
    losses.add(torch.tensor(1 / 3, dtype=torch.bfloat16))
    losses.add(torch.tensor(1 / 3))
    assert losses.tolist() == [torch.tensor(1 / 3, dtype=torch.bfloat16).item(), torch.tensor(1 / 3).item()]
