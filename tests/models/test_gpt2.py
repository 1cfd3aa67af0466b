"""What GPT-2 has that no other family has; test_families.py has the rest."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.originals import TINY, UNTIED, transformers_gpt2
from tests.support.originals import from_original, parameters, samples, to_original, train_once


def test_gpt2s_own_activation_differs_by_rounding_only() -> None:
    """transformers' default, gelu_new, computes the same formula in eight kernels, which round one by one."""
    theirs, ours = transformers_gpt2(activation="gelu_new"), replace(TINY, dropout=0.0).build().train()
    ours.load_state_dict(from_original(TINY, theirs.state_dict()))
    inputs, targets = samples(TINY)
    output, gradients = train_once(ours, inputs, targets)
    expected, expected_gradients = train_once(theirs.eval(), inputs, targets)  # evaluation mode: no dropout
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(to_original(TINY, gradients), expected_gradients, rtol=1e-4, atol=1e-6)


def test_the_activation_keeps_one_tensor_for_the_backward_pass() -> None:
    mlp: Any = TINY.build().h0.mlp
    kept, kernels = list[torch.Tensor](), list[str]()

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kernels.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autocast("cpu", torch.bfloat16):
        wide = mlp.c_fc(torch.randn(3, 16, 32))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Launches():
            mlp.act(wide)
    assert wide.dtype == torch.bfloat16
    assert sum({each.data_ptr(): each.nbytes for each in kept}.values()) == wide.nbytes
    assert kernels == ["aten::gelu"]


@pytest.mark.parametrize("move", [copy.deepcopy, lambda m: m.to(torch.float64), lambda m: m.to("cpu")])
def test_tied_weights_stay_tied(move: Any) -> None:
    network = move(TINY.build())
    assert network.head.weight is network.embed.wte.weight


@pytest.mark.gpu
def test_tied_weights_stay_tied_on_the_gpu() -> None:
    network = TINY.build().to("cuda")
    assert network.head.weight is network.embed.wte.weight
    assert network.head.weight.is_cuda


def test_untied_head_is_a_matrix_of_its_own() -> None:
    assert parameters(UNTIED) == parameters(TINY) + 97 * 32


def test_attention_is_causal_without_a_mask_tensor() -> None:
    class Watch(TorchFunctionMode):
        calls: list[dict[str, Any]] = []  # noqa: RUF012

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                self.calls.append(kwargs)
            return func(*args, **(kwargs or {}))

    network = TINY.build().eval()
    tokens = torch.arange(16).unsqueeze(0)
    with torch.no_grad(), Watch() as watch:
        logits = network(tokens)
        tokens[0, 9] = 50
        changed = network(tokens)
    assert len(watch.calls) == 4
    assert all(call["is_causal"] and call["attn_mask"] is None for call in watch.calls)
    assert torch.equal(logits[0, :9], changed[0, :9])
    assert not torch.equal(logits[0, 9], changed[0, 9])


def test_shorter_sequences_are_taken() -> None:
    assert TINY.build()(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 97)


@pytest.mark.parametrize(("multiple", "padded"), [(1, 97), (97, 97), (64, 128)])
def test_padded_vocabulary(multiple: int, padded: int) -> None:
    model = replace(TINY, pad_vocab_to_multiple=multiple)
    network = model.build()
    assert model.outputs() == padded
    assert network.embed.wte.weight.shape == network.head.weight.shape == (padded, 32)
