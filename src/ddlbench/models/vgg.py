"""VGG as one sequence of named blocks, a block for each layer with weights.

Simonyan & Zisserman 2015, "Very deep convolutional networks for large-scale image recognition": configuration D is
VGG-16. torchvision's class fixes the classifier at 512 * 7 * 7 -> 4096 -> 4096, so the same modules are made here,
in the same order and with the same initialization: with its sizes, a seed gives torchvision's weights.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor, nn

from ddlbench.errors import check_values

POOLED = 7  # pixels a side that the convolutions' output is pooled to


@dataclass
class VGG:
    """Images [B, 3, image_size, image_size] -> logits [B, num_classes].

    convs:    3x3 convolutions in each of the five stages
    channels: their width in each stage
    hidden:   width of the two hidden fully connected layers
    dropout:  rate after each of these two
    """

    name: str
    convs: list[int] = field(default_factory=lambda: [2, 2, 3, 3, 3])
    channels: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 512])
    hidden: int = 4096
    dropout: float = 0.5
    image_size: int = 224
    num_classes: int = 1000
    kind: str = "images"

    def __post_init__(self) -> None:
        stages = {"convs": self.convs, "channels": self.channels}
        check_values(
            "model.", self,
            least={"hidden": 1, "num_classes": 1, "image_size": 2**5},  # halved five times, to one pixel
            rules={
                "dropout": (0 <= self.dropout < 1, "a rate from 0 to below 1; 0 turns it off"),
                **{key: (len(n) == 5 and min(n) > 0, "5 numbers, each 1 or more") for key, n in stages.items()},
            },
        )  # fmt: skip

    def build(self) -> nn.Sequential:
        """conv1_1, conv1_2, ..., conv5_3, fc6, fc7, fc8."""
        blocks, width = OrderedDict[str, nn.Module](), 3
        for stage, (convs, channels) in enumerate(zip(self.convs, self.channels, strict=True), start=1):
            for i in range(1, convs + 1):
                block = OrderedDict[str, nn.Module](conv=nn.Conv2d(width, channels, 3, padding=1), relu=nn.ReLU(True))
                if i == convs:
                    block["pool"] = nn.MaxPool2d(2)
                blocks[f"conv{stage}_{i}"] = nn.Sequential(block)
                width = channels
        pool = OrderedDict[str, nn.Module](pool=Pool(POOLED), flatten=nn.Flatten())
        blocks["fc6"] = nn.Sequential(pool | self._hidden(width * POOLED**2))
        blocks["fc7"] = nn.Sequential(self._hidden(self.hidden))
        blocks["fc8"] = nn.Linear(self.hidden, self.num_classes)
        model = nn.Sequential(blocks)
        # He et al. 2015 by fan-out for convolutions, N(0, 0.01²) for the classifier, biases 0: torchvision's choice.
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        return model

    def input_shape(self) -> tuple[int, ...]:
        return (3, self.image_size, self.image_size)

    def outputs(self) -> int:
        return self.num_classes

    def tensor_plan(self) -> dict[str, str]:
        """Convolutions by their filters, joined after pooling; the classifier as in Shoeybi et al. 2019, section 3."""
        convs = [f"conv{stage}_{i}.conv" for stage, count in enumerate(self.convs, 1) for i in range(1, count + 1)]
        features = dict.fromkeys(convs, "filter") | {name.removesuffix(".conv"): "channels" for name in convs}
        classifier = {"fc6.linear": "column", "fc6.dropout": "dropout", "fc7.linear": "row", "fc8": "logits"}
        return features | classifier

    def _hidden(self, width: int) -> OrderedDict[str, nn.Module]:
        return OrderedDict(linear=nn.Linear(width, self.hidden), relu=nn.ReLU(True), dropout=nn.Dropout(self.dropout))


class Pool(nn.AdaptiveAvgPool2d):
    """torchvision's pool, without the kernels where its input has the size of its output already, as at 224 x 224. On
    GPUs the backward pass has no deterministic kernel."""

    def forward(self, input: Tensor) -> Tensor:
        return input if input.shape[-2:] == (self.output_size,) * 2 else super().forward(input)
