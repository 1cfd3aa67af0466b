"""State dicts of a model under two sets of names: the named blocks' and those of the original class."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ddlbench.job import Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG


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
            return {
                **_features(model),
                "fc6.linear": "classifier.0",
                "fc7.linear": "classifier.3",
                "fc8": "classifier.6",
            }
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
