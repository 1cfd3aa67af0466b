from __future__ import annotations

import weakref

import torch

from ddlbench.ranks.boundary import Boundary


def boundary() -> Boundary:
    made = Boundary(torch.device("cpu"))
    made.begin(0, 4)
    return made


def test_losses_in_their_order_and_no_tensor_of_a_step_stays() -> None:
    passed, steps = boundary(), list[weakref.ref[torch.Tensor]]()
    for value in (3.0, float("nan"), -1.0):
        loss = torch.tensor(value)
        passed.pass_step(loss)
        steps.append(weakref.ref(loss))
        del loss
    first, second, third = passed.losses.tolist()
    assert (first, second != second, third) == (3.0, True, -1.0)
    assert [step() for step in steps] == [None] * 3


def test_an_epoch_without_losses_on_this_rank() -> None:
    passed = boundary()
    passed.pass_step(torch.tensor(1.0))
    passed.begin(1, 4)
    passed.pass_step(None)
    assert passed.losses.tolist() == []


def test_a_loss_of_another_type_is_a_number_of_32_bits() -> None:
    passed = boundary()
    passed.pass_step(torch.tensor(1 / 3, dtype=torch.bfloat16))
    passed.pass_step(torch.tensor(1 / 3))
    assert passed.losses.tolist() == [torch.tensor(1 / 3, dtype=torch.bfloat16).item(), torch.tensor(1 / 3).item()]
