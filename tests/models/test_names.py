from __future__ import annotations

import pytest
import torch

from ddlbench.errors import UserError
from ddlbench.models.names import inverse, renamed

MODULES = {"stem.conv": "conv", "h1": "blocks.1", "h10": "blocks.10"}


def test_whole_module_names_are_replaced_and_back() -> None:
    names = ["stem.conv.weight", "h1.norm.weight", "h10.norm.weight"]
    state = {name: torch.tensor(float(i)) for i, name in enumerate(names)}
    there = renamed(state, MODULES)
    assert list(there) == ["conv.weight", "blocks.1.norm.weight", "blocks.10.norm.weight"]
    assert renamed(there, inverse(MODULES)) == state


@pytest.mark.parametrize("name", ["h2.weight", "stem.bias", "h1"])
def test_a_weight_of_another_model(name: str) -> None:
    with pytest.raises(UserError, match=f"weight {name} belongs to none of the modules stem.conv, h1, h10"):
        renamed({name: torch.zeros(1)}, MODULES)
