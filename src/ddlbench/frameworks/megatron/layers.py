"""GPT-2 of megatron-core's tensor parallel layers, as the sequence of named blocks that models/gpt2.py makes.

Between blocks activations are [T, B, n_embd], as the library has them; tokens are [B, T], logits [B, T, classes / tp].
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddlbench.frameworks.tensor.collectives import Part, rank_random
from ddlbench.frameworks.tensor.layers import Split, Splits
from ddlbench.measure.formulas.memory_formula import SPLIT
from ddlbench.models.gpt2 import GPT2
from ddlbench.recipe.recipe import IGNORED

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
# What is named otherwise than in transformers' GPT-2. Transformer Engine has the normalization in the layer behind it.
NAMES = {
    ".layer.self_attention.linear_qkv.layer_norm_": ".ln_1.",
    ".layer.mlp.linear_fc1.layer_norm_": ".ln_2.",
    ".layer.input_layernorm.": ".ln_1.",
    ".layer.pre_mlp_layernorm.": ".ln_2.",
    ".layer.self_attention.linear_qkv.": ".attn.c_attn.",
    ".layer.self_attention.linear_proj.": ".attn.c_proj.",
    ".layer.mlp.linear_fc1.": ".mlp.c_fc.",
    ".layer.mlp.linear_fc2.": ".mlp.c_proj.",
    ".layer.word_embeddings.": ".wte.",
    ".layer.position_embeddings.": ".wpe.",
    "head.layer.": "head.",
}
TRANSPOSED = ("qkv", "column", "row")  # transformers' Conv1D is [in, out]


class Wrapped(nn.Module):
    """layer: the library's"""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Embed(Wrapped):
    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        return self.layer(tokens, positions)


class Block(Wrapped):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden, attention_mask=None)[0]  # causal without a mask: `Attention`


class Head(Wrapped):
    """kept: rows of this rank's matrix that are classes; the other ones pad the vocabulary, which the library divides
    evenly. Their logits are -inf, so that the softmax is that of the classes and their gradients are 0."""

    def __init__(self, layer: nn.Module, kept: int) -> None:
        super().__init__(layer)
        self.kept = kept

    def forward(self, hidden: Tensor) -> Tensor:
        logits, _ = self.layer(hidden)
        if self.kept < logits.shape[-1]:
            with torch.no_grad():  # the gradient of the loss is 0 there already
                logits[..., self.kept :] = -inf
        return logits.transpose(0, 1)


class Attention(nn.Module):
    """Causal attention of this rank's heads by torch's kernels: [T, B, heads, size] -> [T, B, heads * size].

    It replaces that of the library, which takes buffers and random numbers from CUDA only."""

    def __init__(self, part: Part, dropout: float) -> None:
        super().__init__()
        self.part, self.dropout = part, dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: None, **_: object) -> Tensor:
        rate = self.dropout if self.training else 0.0
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with rank_random(self.part, query.device) if rate else nullcontext():
            mixed = F.scaled_dot_product_attention(*heads, dropout_p=rate, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def build_layers(model: GPT2, part: Part, group: dist.ProcessGroup, layers: str, fused: bool) -> nn.Sequential:
    """This rank's part, on the CPU and without values. group: the ranks of `part`, which may be one; fused: the library
    compiles bias, GELU, dropout and residual into one kernel each"""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.spec_utils import build_module

    config, width = transformer_config(model, part.size, fused), model.n_embd
    rows = -(-model.outputs() // part.size)  # of the vocabulary on each rank
    classes = rows * part.size
    engine = layers == TRANSFORMER_ENGINE
    spec: Any = specs.get_gpt_layer_with_transformer_engine_spec() if engine else specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = lambda **_: Attention(part, model.dropout)
    groups = ProcessGroupCollection(tp=group, cp=None, pp=None)
    embed = LanguageModelEmbedding(config, classes, model.seq_len, tp_group=group)
    blocks: dict[str, nn.Module] = {"embed": Embed(embed)}
    for number in range(model.n_layer):
        layer: Any = build_module(spec, config=config, layer_number=number + 1, pg_collection=groups)
        blocks[f"h{number}"] = Block(layer)
    norm: Any = TENorm if engine else spec.submodules.input_layernorm
    blocks["ln_f"] = norm(config=config, hidden_size=width, eps=config.layernorm_epsilon)
    head = ColumnParallelLinear(
        width, classes, config=config, init_method=config.init_method, bias=False, tp_group=group
    )
    kept = min(max(model.outputs() - part.rank * rows, 0), rows)
    if model.tie_weights:
        head.weight = embed.word_embeddings.weight
    return nn.Sequential(OrderedDict(blocks, head=Head(head, kept)))


def transformer_config(model: GPT2, tp: int, fused: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=model.n_layer,
        hidden_size=model.n_embd,
        num_attention_heads=model.n_head,
        tensor_model_parallel_size=tp,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        # Its fused kernel for F.gelu is the tanh approximation, without it F.gelu is the exact one.
        activation_func=F.gelu if fused else partial(F.gelu, approximate="tanh"),
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        use_cpu_initialization=True,
        perform_initialization=False,
        cuda_graph_scope=[],  # its default is deprecated
    )


def original_name(name: str) -> str:
    for library, original in NAMES.items():
        name = name.replace(library, original)
    return name


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """The style of `Model.tensor_plan()` by which the library splits a parameter of a name of transformers'; "" if it
    does not."""
    module, _, attribute = name.rpartition(".")
    style = plan.get(module, "")
    return style if attribute in ("weight", "bias") else ""


def splits_of(names: Iterable[str], plan: Mapping[str, str]) -> Splits:
    """How the library's parameters are cut, by their own names; matrices are [out, in]."""
    splits: Splits = {}
    for name in names:
        original = original_name(name)
        style = style_of(original, plan)
        if original.rpartition(".")[2] in SPLIT.get(style, ()):
            splits[name] = Split(int(style == "row"))
    return splits


def from_original(name: str, full: Tensor, model: GPT2, tp: int = 1) -> Tensor:
    """A full tensor of transformers' in the layout of the library, which has queries, keys and values head by head and
    zeros where the vocabulary is padded."""
    style = style_of(name, model.tensor_plan())
    if style in ("vocab", "logits"):
        full = F.pad(full, (0, 0, 0, -len(full) % tp))
    full = full.t() if style in TRANSPOSED else full
    if style == "qkv":
        full = full.unflatten(0, (3, model.n_head, -1)).transpose(0, 1).flatten(0, 2)
    return full.contiguous()


def to_original(name: str, full: Tensor, model: GPT2) -> Tensor:
    style = style_of(name, model.tensor_plan())
    if style == "qkv":
        full = full.unflatten(0, (model.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    if style in ("vocab", "logits"):
        full = full[: model.outputs()]
    return (full.t() if style in TRANSPOSED else full).contiguous()


def parallel_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats a scored target by the library's cross-entropy of [B, T, classes / tp], whose group is a global one."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    targets = targets.t()
    scored = targets != IGNORED
    nats = vocab_parallel_cross_entropy(logits.transpose(0, 1), targets.masked_fill(~scored, 0).contiguous())
    return nats.masked_fill(~scored, 0.0).sum() / scored.sum()
