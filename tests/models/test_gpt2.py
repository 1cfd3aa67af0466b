from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from ddlbench.errors import UserError
from ddlbench.models.gpt2 import GPT2
from tests.support.originals import (
    assert_copies_train_alike,
    assert_same_bits,
    assert_trains_as,
    configured,
    from_original,
    parameters,
    samples,
    to_original,
    train_once,
)

TINY = GPT2("tiny", n_layer=2, n_embd=32, n_head=4, vocab_size=97, seq_len=16)


def original(tied: bool = True, activation: str = "gelu_pytorch_tanh") -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            vocab_size=97,
            n_positions=16,
            tie_word_embeddings=tied,
            activation_function=activation,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
            use_cache=False,  # it would lay keys and values out another way, and kernels round by layout
        )
    ).train()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_outputs_and_gradients_equal_the_original(tied: bool, precision: torch.dtype) -> None:
    model = replace(TINY, tie_weights=tied)
    theirs, ours = original(tied), model.build().train()
    ours.load_state_dict(from_original(model, theirs.state_dict()))
    assert_trains_as(model, ours, theirs, precision)


def test_gpt2s_own_activation_differs_by_rounding_only() -> None:
    """transformers' default, gelu_new, computes the same formula in eight kernels, which round one by one."""
    theirs, ours = original(activation="gelu_new"), replace(TINY, dropout=0.0).build().train()
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


@pytest.mark.parametrize("tied", [True, False])
def test_a_seed_gives_the_original_weights(tied: bool) -> None:
    model = replace(TINY, tie_weights=tied)
    torch.manual_seed(11)
    ours = model.build()
    torch.manual_seed(11)
    assert_same_bits(to_original(model, ours.state_dict()), original(tied).state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_state_loads_into_the_original_and_back(tied: bool) -> None:
    model = replace(TINY, tie_weights=tied)
    ours, theirs = model.build(), original(tied)
    theirs.load_state_dict(to_original(model, ours.state_dict()), strict=True)
    back = from_original(model, theirs.state_dict())
    assert list(back) == list(ours.state_dict())
    assert_same_bits(back, ours.state_dict())


def test_blocks_in_order() -> None:
    assert [name for name, _ in TINY.build().named_children()] == ["embed", "h0", "h1", "ln_f", "head"]


@pytest.mark.parametrize(("name", "count"), [("gpt2_small", 124_439_808), ("gpt2_medium", 354_823_168)])
def test_parameter_count(name: str, count: int) -> None:
    assert parameters(configured(name)) == count


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
    assert parameters(replace(TINY, tie_weights=False)) == parameters(TINY) + 97 * 32


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


def test_dropout_is_one_rate_for_all() -> None:
    network = replace(TINY, dropout=0.3).build()
    # The embeddings, and in each of two blocks attention weights, attention output and MLP.
    assert [module.p for module in network.modules() if isinstance(module, nn.Dropout)] == [0.3] * 7


@pytest.mark.parametrize(("multiple", "padded"), [(1, 97), (97, 97), (64, 128)])
def test_padded_vocabulary(multiple: int, padded: int) -> None:
    model = replace(TINY, pad_vocab_to_multiple=multiple)
    network = model.build()
    assert model.outputs() == padded
    assert network.embed.wte.weight.shape == network.head.weight.shape == (padded, 32)


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "compile"])
def test_copies_give_the_same_output_and_gradients(copier: str) -> None:
    assert_copies_train_alike(replace(TINY, dropout=0.0), copier)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"n_embd": 30},
            r"model.n_embd=30 is not divisible by model.n_head=4 .*: choose model.n_embd=28 or 32",
        ),
        ({"n_embd": 3}, r"model.n_embd=3 is not divisible by model.n_head=4 .*: choose model.n_embd=4$"),
        ({"n_layer": 0}, r"model.n_layer=0 must be 1 or more"),
        ({"seq_len": 0}, r"model.seq_len=0 must be 1 or more"),
        ({"pad_vocab_to_multiple": 0}, r"model.pad_vocab_to_multiple=0 must be 1 or more"),
        ({"dropout": -0.1}, r"model.dropout=-0.1 must be a rate from 0 to below 1"),
    ],
)
def test_impossible_sizes(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(TINY, **sizes)
