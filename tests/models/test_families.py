"""Every family: a seed gives the original's weights, equal weights train alike, states and copies lose nothing. Then
what GPT-2 has that no other family has."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.resnet import Bottleneck
from torchvision.models.vgg import make_layers
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from ddlbench.errors import UserError
from ddlbench.job import Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG, Pool
from tests.support.originals import (
    PARAMETERS,
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
UNTIED = replace(TINY, tie_weights=False)
RESNET = ResNet("resnet", layers=[2, 1, 1, 1], width_per_group=8, image_size=32, num_classes=10)
VGG16 = VGG("vgg", convs=[2, 1, 1, 1, 1], channels=[4, 6, 8, 8, 8], hidden=16, image_size=32, num_classes=10)
SMALL: dict[str, Model] = {"gpt2": TINY, "untied gpt2": UNTIED, "resnet": RESNET, "vgg": VGG16}


def transformers_gpt2(tied: bool = True, activation: str = "gelu_pytorch_tanh") -> nn.Module:
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=16, tie_word_embeddings=tied,
        activation_function=activation, bos_token_id=None, eos_token_id=None,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        use_cache=False,  # it would lay keys and values out another way, and kernels round by layout
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def small_vgg() -> nn.Module:
    """torchvision's class around small layers: it fixes the classifier's sizes, so that smaller ones are put in."""
    with torch.device("meta"):
        features = make_layers([4, 4, "M", 6, "M", 8, "M", 8, "M", 8, "M"])
        network = torchvision.models.VGG(features, num_classes=10, init_weights=False)
        network.classifier[0] = nn.Linear(8 * 7 * 7, 16)
        network.classifier[3] = nn.Linear(16, 16)
        network.classifier[6] = nn.Linear(16, 10)
    return network.to_empty(device="cpu")


ORIGINALS: dict[str, Any] = {
    "gpt2": transformers_gpt2,
    "untied gpt2": lambda: transformers_gpt2(tied=False),
    "resnet": lambda: torchvision.models.ResNet(Bottleneck, [2, 1, 1, 1], num_classes=10, width_per_group=8),
    "vgg": small_vgg,
    "vgg16": torchvision.models.vgg16,
}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_outputs_gradients_and_statistics_equal_the_original(name: str, precision: torch.dtype) -> None:
    model, theirs = SMALL[name], ORIGINALS[name]()
    ours = model.build().train()
    theirs.load_state_dict(to_original(model, ours.state_dict()), strict=True)
    assert_trains_as(model, ours, theirs, precision)


@pytest.mark.parametrize("size", [2, 7, 14])
def test_the_pool_is_torch_s_and_runs_no_kernel_on_its_own_size(size: int) -> None:
    images = torch.rand(2, 3, size, size)
    assert torch.equal(Pool(7)(images), nn.AdaptiveAvgPool2d(7)(images))
    assert (Pool(7)(images) is images) == (size == 7)


@pytest.mark.parametrize("name", ["gpt2", "untied gpt2", "resnet", "vgg16"])
def test_a_seed_gives_the_original_weights_which_load_into_it_and_back(name: str) -> None:
    model = SMALL.get(name) or configured(name)
    torch.manual_seed(11)
    ours = model.build().state_dict()
    torch.manual_seed(11)
    theirs = ORIGINALS[name]()
    assert_same_bits(to_original(model, ours), theirs.state_dict())
    theirs.load_state_dict(to_original(model, ours), strict=True)
    back = from_original(model, theirs.state_dict())
    assert list(back) == list(ours)
    assert_same_bits(back, ours)


COPIERS: dict[str, Any] = {
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
    "compile": lambda network: torch.compile(copy.deepcopy(network), backend="eager", fullgraph=True),
}


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("name", ["gpt2", "resnet", "vgg"])
def test_copies_give_the_same_output_and_gradients(name: str, copier: str) -> None:
    model = replace(TINY, dropout=0.0) if name == "gpt2" else SMALL[name]
    network, (inputs, targets) = model.build(), samples(model)
    output, gradients = train_once(COPIERS[copier](network), inputs, targets)
    expected, expected_gradients = train_once(network, inputs, targets)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close([*gradients.values()], [*expected_gradients.values()])


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name: str) -> None:
    assert parameters(configured(name)) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("model", "count"),
    [
        # The embeddings, and in each of two blocks attention weights, attention output and MLP.
        (TINY, 7),
        (VGG16, 2),
    ],
)
def test_dropout_is_one_rate_for_all(model: Any, count: int) -> None:
    network = replace(model, dropout=0.3).build()
    assert [module.p for module in network.modules() if isinstance(module, nn.Dropout)] == [0.3] * count


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (TINY, {"n_embd": 30}, r"n_embd=30 is not divisible by model.n_head=4 .*: choose model.n_embd=28 or 32"),
        (TINY, {"n_embd": 3}, r"n_embd=3 is not divisible by model.n_head=4 .*: choose model.n_embd=4$"),
        (TINY, {"n_layer": 0}, r"n_layer=0 must be 1 or more"),
        (TINY, {"seq_len": 0}, r"seq_len=0 must be 1 or more"),
        (TINY, {"pad_vocab_to_multiple": 0}, r"pad_vocab_to_multiple=0 must be 1 or more"),
        (TINY, {"dropout": -0.1}, r"dropout=-0.1 must be a rate from 0 to below 1"),
        (RESNET, {"image_size": 31}, r"image_size=31 must be 32 or more"),
        (RESNET, {"layers": [1, 1, 1]}, r"layers=\[1, 1, 1\] must be 4 numbers"),
        (RESNET, {"layers": [1, 0, 1, 1]}, r"layers=\[1, 0, 1, 1\] must be 4 numbers, each 1 or more"),
        (RESNET, {"width_per_group": 0}, r"width_per_group=0 must be 1 or more"),
        (RESNET, {"num_classes": 0}, r"num_classes=0 must be 1 or more"),
        (VGG16, {"image_size": 16}, r"image_size=16 must be 32 or more"),
        (VGG16, {"convs": [1, 1]}, r"convs=\[1, 1\] must be 5 numbers"),
        (VGG16, {"channels": [8, 8, 8, 8, 0]}, r"channels=\[8, 8, 8, 8, 0\] must be 5 numbers, each 1 or more"),
        (VGG16, {"hidden": 0}, r"hidden=0 must be 1 or more"),
        (VGG16, {"dropout": 1.0}, r"dropout=1.0 must be a rate from 0 to below 1"),
    ],
)
def test_impossible_sizes(model: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.{message}"):
        replace(model, **sizes)


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


@pytest.mark.parametrize(
    "move",
    [copy.deepcopy, lambda network: network.to(torch.float64), pytest.param(nn.Module.cuda, marks=pytest.mark.gpu)],
)
def test_tied_weights_stay_tied(move: Any) -> None:
    network = move(TINY.build())
    assert network.head.weight is network.embed.wte.weight
