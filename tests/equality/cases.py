"""What every framework trains in the equality tests: small models, each in several ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import nn

from ddlbench.job import Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from tests.support.reference import Case, Outcome, reference


@dataclass
class NarrowResNet(ResNet):
    """128 to 1,024 channels between its blocks instead of 256 to 2,048: bf16 convolutions are slow on a CPU."""

    def build(self) -> nn.Sequential:
        with patch("torchvision.models.resnet.Bottleneck.expansion", 2):
            return super().build()


MODELS: dict[str, Model] = {
    "resnet": NarrowResNet(name="resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=64, num_classes=7),
    "vgg": VGG(name="vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=7, dropout=0.0),
    "gpt2": GPT2(name="gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0),
}

# BatchNorm and ReLU make a ResNet sensitive to its last bits: small steps keep it where rounding does not grow, and
# from this seed no unit sits so close to zero that the order of a sum would switch it early on (seen: up to 5e-2 of the
# way from other seeds, 9e-3 from this one).
RATES = {"resnet": 1e-5, "vgg": 0.02, "gpt2": 0.02}
SEEDS = {"resnet": 6, "vgg": 3, "gpt2": 3}


def case_of(model: str, name: str, **keys: Any) -> Case:
    return Case(f"{model}-{name}", MODELS[model], lr=RATES[model], seed=SEEDS[model], **keys)


CASES = [
    *(
        case_of(model, f"{precision}-{'accumulated' if micro else 'whole'}", precision=precision, micro_batch=micro)
        for model in MODELS
        for precision in ("fp32", "bf16")
        for micro in (None, 2)
    ),
    *(case_of(model, "checkpointed-clipped", clip_norm=0.5, checkpoint_activations=True) for model in MODELS),
    *(
        case_of(model, name, checkpoint_activations=value)
        for model in MODELS
        for name, value in (("segments", "every:2"), ("selective", "selective"))
    ),
    Case("gpt2-padded", replace(MODELS["gpt2"], pad_vocab_to_multiple=8), lr=RATES["gpt2"]),  # pyright: ignore
]


def at(world: int, case: Case) -> Case:
    """Six samples a rank: they divide into the same micro batches at any number of ranks."""
    return replace(case, global_batch=6 * world)


def plain_process(case: Case, replicas: int, micro_batch: int | None, policy: bool = False) -> Outcome:
    """micro_batch counts where the case gives none."""
    return reference(replace(case, micro_batch=case.micro_batch or micro_batch, policy=policy), replicas)
