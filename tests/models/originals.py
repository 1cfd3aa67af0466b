"""A small GPT-2, and the class of transformers that it must equal."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from ddlbench.models.gpt2 import GPT2

TINY = GPT2("tiny", n_layer=2, n_embd=32, n_head=4, vocab_size=97, seq_len=16)
UNTIED = replace(TINY, tie_weights=False)


def transformers_gpt2(tied: bool = True, activation: str = "gelu_pytorch_tanh") -> nn.Module:
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=16, tie_word_embeddings=tied,
        activation_function=activation, bos_token_id=None, eos_token_id=None,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        use_cache=False,  # it would lay keys and values out another way, and kernels round by layout
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()
