"""Optimizers by name: SGD, Adam and AdamW from torch, LARS and LAMB from timm, AdamW in 8 bits with bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import ceil
from typing import Any

from torch.optim import Optimizer

from ddlbench.errors import check_values, importing
from ddlbench.job import NamedParameters

BLOCK = 256  # numbers that share a scale where a state is in 8 bits, and
SMALLEST = 4096  # numbers of the smallest tensor with such states: both as bitsandbytes has them


@dataclass
class OptimizerConfig:
    """Keys of `recipe.optimizer`.

    lr: learning rate at a global batch of lr_base_batch samples, scaled linearly with the global batch
        (Goyal et al. 2017, section 2.1); at any batch where lr_base_batch is None
    momentum, nesterov: sgd and lars
    betas: adam, adamw, adamw8bit, lamb
    eps: added to the denominator of adam, adamw, adamw8bit and lamb, and of the trust ratio of lars
    weight_decay: added to the gradient by sgd, adam and lars, to the update by lamb; decoupled in adamw and adamw8bit
    decay_norm_and_bias: False leaves parameters of at most one dimension out of weight decay and of the layer-wise
        adaptation of lars and lamb, which then treat them as sgd and adam would
    trust_coefficient: eta of lars
    fused: one kernel for the whole update of sgd, adam and adamw; None leaves the choice to torch
    """

    name: str
    lr: float
    lr_base_batch: int | None = None
    momentum: float = 0.0
    nesterov: bool = False
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_norm_and_bias: bool = True
    trust_coefficient: float = 0.001
    fused: bool | None = None

    def __post_init__(self) -> None:
        betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        fusible = self.name not in optimizers or "fused" in optimizers[self.name].keys
        check_values(
            "recipe.optimizer.", self,
            above={"lr": 0, "lr_base_batch": 0, "trust_coefficient": 0},
            least={"eps": 0, "weight_decay": 0},
            choices={"name": optimizers},
            rules={
                "momentum": (0 <= self.momentum < 1, "at least 0 and below 1"),
                "nesterov": (not self.nesterov or self.momentum > 0, "false where recipe.optimizer.momentum is 0"),
                "betas": (betas, "two numbers from [0, 1)"),
                "fused": (fusible or not self.fused, f"false with recipe.optimizer.name={self.name}"),
            },
        )  # fmt: skip

    @property
    def costs(self) -> Costs:
        entry = optimizers[self.name]
        return entry.costs if self.momentum or entry.plain is None else entry.plain


def make_optimizer(config: OptimizerConfig, named_parameters: NamedParameters) -> Optimizer:
    """The optimizer over the trainable parameters, at the unscaled learning rate: the loop sets each update's.
    Unavailable where its library is missing.

    Shards keep the number of dimensions of the whole parameter, so that every layout gets the same groups.
    """
    entry = optimizers[config.name]
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if config.decay_norm_and_bias or parameter.ndim > 1]
    others = [parameter for parameter in trainable if not config.decay_norm_and_bias and parameter.ndim <= 1]
    layer_wise = {"always_adapt": False} if entry.needs == NORM else {}  # a key of timm's optimizers
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0, **layer_wise},
    ]
    module, _, name = entry.kind.rpartition(".")
    library, remedy = entry.install
    with importing(f"{library}, which recipe.optimizer.name={config.name} needs,", remedy):
        kind = getattr(import_module(module), name)
    arguments = {ARGUMENTS.get(key, key): getattr(config, key) for key in ("lr", *entry.keys)}
    return kind([group for group in groups if group["params"]], **arguments, **entry.fixed)


@dataclass(frozen=True)
class Costs:
    """What an update keeps and moves for one parameter in fp32.

    states: numbers that stay from update to update: momentum, Adam's two moments
    bytes_: read and written: weight, gradient and states are read, weight and states written; lars and lamb read
        weight and update once more for their norms, and weight decay of adamw8bit reads and writes the weight
    copies: temporary numbers while a tensor is updated: the gradient with weight decay added; for Adam a square root
        and a quotient
    quantized: states of tensors that are not small are codes of 8 bits, and a scale in fp32 of each block of them
    """

    states: int
    bytes_: int
    copies: int
    quantized: bool = False

    def state_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of the states of tensors with so many numbers, in fp32 where they are not quantized."""
        codes = [size for size in sizes if self.quantized and size >= SMALLEST]
        in_fp32 = sum(sizes) - sum(codes) + sum(ceil(size / BLOCK) for size in codes)
        return self.states * (4 * in_fp32 + sum(codes))


@dataclass(frozen=True)
class Entry:
    """One choice of recipe.optimizer.name: the name of its class in lower case.

    kind: module and name of the class, imported at its use: timm takes up to four seconds, and a cluster may lack it
    keys: those of OptimizerConfig that the class takes beside lr, under the names in ARGUMENTS or their own
    plain: its costs where recipe.optimizer.momentum is 0; None: momentum is no key of it
    needs: what an update takes from a whole layer; None: a number's update depends on that number alone
    fixed: other arguments of the class
    install: the library to install, and how
    """

    kind: str
    keys: tuple[str, ...]
    costs: Costs
    plain: Costs | None = None
    needs: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    install: tuple[str, str] = ("torch", "pip install torch")


NORM = "the norm of each full layer"
BLOCKS = "blocks of full layers"
ARGUMENTS = {"trust_coefficient": "trust_coeff"}
ADAM = ("betas", "eps")
TIMM = ("timm", "pip install timm")

optimizers = {
    "sgd": Entry("torch.optim.SGD", ("momentum", "nesterov", "fused"), Costs(1, 20, 1), plain=Costs(0, 12, 1)),
    "adam": Entry("torch.optim.Adam", (*ADAM, "fused"), Costs(2, 28, 2)),
    "adamw": Entry("torch.optim.AdamW", (*ADAM, "fused"), Costs(2, 28, 2)),
    "adamw8bit": Entry(
        "ddlbench.recipe.adamw8bit.AdamW8bit", ADAM, Costs(2, 24, 0, quantized=True), needs=BLOCKS,
        install=("bitsandbytes", "pip install 'ddlbench[8bit]'"),
    ),
    # LARS (You et al. 2017) as timm computes it, with ratio 1 where weight or gradient is zero. For gradient g, weights
    # w, weight decay b, momentum m:
    #     ratio = eta |w| / (|g| + b |w| + eps);   v <- m v + ratio (g + b w);   w <- w - lr v
    # Algorithm 1 of the paper has the learning rate in the momentum, v <- m v + lr ratio (g + b w); w <- w - v. Both
    # are equal while lr is constant. Where it changes, the paper's step has older gradients at their older rates, and
    # this one has all of them at the rate of the step, as torch's SGD, so that lars and sgd differ in the ratio alone,
    # and no momentum correction is needed (Goyal et al. 2017, section 3).
    "lars": Entry(
        "timm.optim.lars.Lars", ("momentum", "nesterov", "trust_coefficient", "eps"), Costs(1, 28, 1),
        plain=Costs(0, 20, 1), needs=NORM, fixed={"always_adapt": True}, install=TIMM,
    ),
    # LAMB (You et al. 2020, algorithm 2) with phi(z) = z, and ratio 1 where weight or update is zero. With Adam's
    # bias-corrected r = m^ / (sqrt(v^) + eps) and weight decay b:
    #     u = r + b w;   w <- w - lr (|w| / |u|) u
    # timm follows NVIDIA's variant, which clips gradients to norm 1 first: off here, because clipping is the same for
    # every optimizer (`train.clip_norm`).
    "lamb": Entry(
        "timm.optim.lamb.Lamb", ADAM, Costs(2, 36, 2), needs=NORM,
        fixed={"max_grad_norm": None, "always_adapt": True}, install=TIMM,
    ),
}  # fmt: skip
