"""What the models have at full size."""

from __future__ import annotations

# Numbers of the weights, those of torchvision and transformers.
PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
}
