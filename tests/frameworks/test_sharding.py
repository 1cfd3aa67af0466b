from __future__ import annotations

import torch
from torch import nn

from ddlbench.frameworks.fsdp import root_group
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.vgg import VGG


def built(model: GPT2 | VGG) -> nn.Sequential:
    with torch.device("meta"):
        return model.build()


def test_blocks_that_share_a_parameter_and_blocks_of_vectors_stay_in_the_root_group() -> None:
    text = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16)
    untied = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, tie_weights=False)
    names = list(dict(built(text).named_children()))
    first, last, head = names[0], names[-2], names[-1]
    assert root_group(built(text)) == [first, last, head]
    assert root_group(built(untied)) == [last]


def test_blocks_of_convolutions_have_groups_of_their_own() -> None:
    model = built(VGG("vgg16", channels=[8, 8, 16, 16, 16], hidden=32, image_size=64, num_classes=10))
    kept = root_group(model)
    assert all(not list(block.parameters()) for name, block in model.named_children() if name in kept)
