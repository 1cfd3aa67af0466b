"""What the model families' tests share: the full configurations, and the comparison with the original class, whose
modules have other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from ddlbench.config.compose import configuration
from ddlbench.job import Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from tests.support.tiny import samples

# Numbers of the weights, those of torchvision and transformers.
PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
}


def configured(name: str) -> Model:
    """The model of conf/model/<name>.yaml."""
    return configuration("+framework=single", f"+model={name}").model


def parameters(model: Model) -> int:
    """Weights in the model, shared ones once; counted without allocating any."""
    with FakeTensorMode():
        return sum(weight.numel() for weight in model.build().parameters())


def train_once(network: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Output of one forward pass, and the gradient of every weight by the network's own names."""
    torch.manual_seed(7)  # of dropout
    output = network(inputs)
    output = getattr(output, "logits", output)
    F.cross_entropy(output.flatten(0, -2), targets.flatten()).backward()
    return output.detach(), {name: weight.grad for name, weight in network.named_parameters()}


def assert_trains_as(
    model: Model, ours: nn.Module, original: nn.Module, precision: torch.dtype = torch.float32
) -> None:
    """From equal weights: outputs, gradients and what the forward pass left in the buffers are the same bits."""
    inputs, targets = samples(model)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        output, gradients = train_once(ours, inputs, targets)
        expected, expected_gradients = train_once(original, inputs, targets)
    assert output.shape[-1] == model.outputs()
    assert torch.equal(output, expected)
    assert_same_bits(to_original(model, gradients), expected_gradients)
    assert_same_bits(to_original(model, ours.state_dict()), original.state_dict())
    with torch.no_grad():
        expected = original.eval()(inputs)
        assert torch.equal(ours.eval()(inputs), getattr(expected, "logits", expected))


def assert_same_bits(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(state) == sorted(expected)
    different = [name for name in state if not torch.equal(state[name], expected[name])]
    assert not different


def to_original(model: Model, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state of `build()` under the names of torchvision's or transformers' class."""
    return renamed(state, modules_of(model))


def from_original(model: Model, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state of torchvision's or transformers' class under the names of `build()`."""
    return renamed(state, {theirs: ours for ours, theirs in modules_of(model).items()})


def modules_of(model: Model) -> dict[str, str]:
    """Name of a module here -> its name in the original class."""
    match model:
        case GPT2():
            blocks = {f"h{i}": f"transformer.h.{i}" for i in range(model.n_layer)}
            embed = {"embed.wte": "transformer.wte", "embed.wpe": "transformer.wpe"}
            return {**embed, **blocks, "ln_f": "transformer.ln_f", "head": "lm_head"}
        case ResNet():
            return {"stem.conv1": "conv1", "stem.bn1": "bn1", **model._bottlenecks(), "head.fc": "fc"}
        case VGG():
            classifier = {"fc6.linear": "classifier.0", "fc7.linear": "classifier.3", "fc8": "classifier.6"}
            return {**_features(model), **classifier}
        case _:
            raise TypeError(model)


def _features(model: VGG) -> dict[str, str]:
    modules: dict[str, str] = {}
    index = 0  # of the next module in torchvision's flat `features`
    for stage, convs in enumerate(model.convs, start=1):
        for i in range(1, convs + 1):
            modules[f"conv{stage}_{i}.conv"] = f"features.{index}"
            index += 2  # convolution, ReLU
        index += 1  # max pooling
    return modules


def renamed(state: Mapping[str, Tensor], modules: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors in their order, with the module of each name replaced. KeyError for a name of no module."""
    return {_renamed(name, modules): tensor for name, tensor in state.items()}


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    path = name.split(".")
    for length in range(len(path) - 1, 0, -1):
        module = modules.get(".".join(path[:length]))
        if module is not None:
            return ".".join([module, *path[length:]])
    raise KeyError(name)
