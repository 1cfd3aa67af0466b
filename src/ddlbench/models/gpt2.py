"""GPT-2: the modules of transformers' GPT2LMHeadModel as one sequence of named blocks.

Radford et al. 2019, "Language models are unsupervised multitask learners".
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddlbench.errors import UserError, check_values


class Embed(nn.Module):
    """Token plus position embedding: [B, T] int64 -> [B, T, n_embd], T at most seq_len."""

    def __init__(self, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.drop(self.wte(tokens) + self.wpe(positions))


class Block(nn.Module):
    """Causal self-attention and MLP, each behind a LayerNorm and beside the residual: [B, T, n_embd] -> the same.

    Every token of the batch is real, so there is no mask tensor: attention is causal by SDPA's own flag.
    """

    def __init__(self, ln_1: nn.Module, attn: nn.Module, ln_2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = ln_1, attn, ln_2, mlp

    def forward(self, hidden: Tensor) -> Tensor:
        attended, _ = self.attn(self.ln_1(hidden))
        hidden = hidden + attended
        return hidden + self.mlp(self.ln_2(hidden))


@dataclass
class GPT2:
    """Tokens [B, seq_len] int64 -> logits [B, seq_len, outputs()].

    dropout: one rate for embeddings, attention weights and residual branches
    tie_weights: the head shares the token embedding's matrix
    pad_vocab_to_multiple: rounds the rows of that matrix up (128 suits tensor cores); the rows added are never
        a target, but they are part of the softmax. 1: off
    """

    name: str
    n_layer: int
    n_embd: int
    n_head: int
    vocab_size: int = 50257
    seq_len: int = 1024
    dropout: float = 0.1
    tie_weights: bool = True
    pad_vocab_to_multiple: int = 1
    kind: str = "text"

    def __post_init__(self) -> None:
        sizes = ("n_layer", "n_embd", "n_head", "seq_len", "vocab_size", "pad_vocab_to_multiple")
        dropout = {"dropout": (0 <= self.dropout < 1, "a rate from 0 to below 1; 0 turns it off")}
        check_values("model.", self, least=dict.fromkeys(sizes, 1), rules=dropout)
        rest = self.n_embd % self.n_head
        if rest:
            fits = [size for size in (self.n_embd - rest, self.n_embd - rest + self.n_head) if size]
            raise UserError(
                f"model.n_embd={self.n_embd} is not divisible by model.n_head={self.n_head} heads (rest {rest}): "
                f"choose model.n_embd={' or '.join(map(str, fits))}"
            )

    def build(self) -> nn.Sequential:
        """embed, h0, h1, ..., ln_f, head."""
        from transformers.models.gpt2.configuration_gpt2 import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=self.outputs(),
            n_positions=self.seq_len,
            n_embd=self.n_embd,
            n_layer=self.n_layer,
            n_head=self.n_head,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            resid_pdrop=self.dropout,
            tie_word_embeddings=self.tie_weights,
            activation_function="gelu_pytorch_tanh",  # gelu_new's formula in one kernel, which keeps its input only
            bos_token_id=None,  # 50256 by default, which a shrunk vocabulary has not
            eos_token_id=None,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        )
        original = GPT2LMHeadModel(config)
        body = original.transformer
        parts = ("ln_1", "attn", "ln_2", "mlp")
        blocks = {f"h{i}": Block(*map(h.get_submodule, parts)) for i, h in enumerate(body.h)}
        embed = Embed(body.wte, body.wpe, body.drop)
        return nn.Sequential(OrderedDict(embed=embed, **blocks, ln_f=body.ln_f, head=original.lm_head))

    def input_shape(self) -> tuple[int, ...]:
        return (self.seq_len,)

    def outputs(self) -> int:
        """The vocabulary with its padding."""
        return -(-self.vocab_size // self.pad_vocab_to_multiple) * self.pad_vocab_to_multiple

    def tensor_plan(self) -> dict[str, str]:
        """Shoeybi et al. 2019, section 3: two sums a block forward and two backward."""
        block = {
            "attn": "heads",
            "attn.c_attn": "qkv",
            "attn.c_proj": "row",
            "mlp.c_fc": "column",
            "mlp.c_proj": "row",
            "mlp.dropout": "token_dropout",
        }
        blocks = {f"h{i}.{name}": style for i in range(self.n_layer) for name, style in block.items()}
        embed = {"embed.wte": "vocab", "embed.wpe": "positions", "embed.drop": "token_dropout"}
        return {**embed, **blocks, "head": "logits"}
