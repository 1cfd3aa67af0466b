"""ResNets of bottleneck blocks: torchvision's modules as one sequence of named blocks.

He et al. 2016, "Deep residual learning for image recognition", with the stride on the 3x3 convolution (version 1.5).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from ddlbench.errors import check_values

STEM = ("conv1", "bn1", "relu", "maxpool")


@dataclass
class ResNet:
    """Images [B, 3, image_size, image_size] -> logits [B, num_classes].

    layers: bottlenecks in each of the four stages
    width_per_group: channels of the first stage's 3x3 convolutions; the others are 2, 4 and 8 times as wide
    """

    name: str
    layers: list[int]
    width_per_group: int = 64
    image_size: int = 224
    num_classes: int = 1000
    kind: str = "images"

    def __post_init__(self) -> None:
        check_values(
            "model.", self,
            least={"width_per_group": 1, "num_classes": 1, "image_size": 2**5},  # halved five times, to one pixel
            rules={"layers": (len(self.layers) == 4 and min(self.layers) > 0, "4 numbers, each 1 or more")},
        )  # fmt: skip

    def build(self) -> nn.Sequential:
        """stem, layer1_0, layer1_1, ..., head."""
        from torchvision.models.resnet import Bottleneck
        from torchvision.models.resnet import ResNet as Original

        original = Original(Bottleneck, self.layers, self.num_classes, width_per_group=self.width_per_group)
        stem = OrderedDict[str, nn.Module]((name, original.get_submodule(name)) for name in STEM)
        bottlenecks = {ours: original.get_submodule(theirs) for ours, theirs in self._bottlenecks().items()}
        head = OrderedDict[str, nn.Module](avgpool=original.avgpool, flatten=nn.Flatten(), fc=original.fc)
        blocks = OrderedDict[str, nn.Module](stem=nn.Sequential(stem), **bottlenecks, head=nn.Sequential(head))
        return nn.Sequential(blocks)

    def input_shape(self) -> tuple[int, ...]:
        return (3, self.image_size, self.image_size)

    def outputs(self) -> int:
        return self.num_classes

    def tensor_plan(self) -> dict[str, str]:
        """Every convolution by its filters, BatchNorm with them: one all-gather a convolution forward."""
        pairs = {"stem.conv1": "stem.bn1"}
        for block in self._bottlenecks():
            pairs |= {f"{block}.conv{i}": f"{block}.bn{i}" for i in (1, 2, 3)}
            if block.endswith("_0"):
                pairs |= {f"{block}.downsample.0": f"{block}.downsample.1"}
        return dict.fromkeys(pairs, "filter") | dict.fromkeys(pairs.values(), "norm") | {"head.fc": "logits"}

    def _bottlenecks(self) -> dict[str, str]:
        stages = enumerate(self.layers, start=1)
        return {f"layer{stage}_{i}": f"layer{stage}.{i}" for stage, blocks in stages for i in range(blocks)}
