"""Colors and markers of curves: a framework, or another factor that is compared, has one color for each value in a
report; curves of one color differ in their markers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's palette, readable for color-blind people, without yellow: it is too pale on white paper.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.3)), (0, (7, 1.5, 1, 1.5)))


# Where a panel has too many curves, each family of frameworks gets a panel of its own.
FAMILIES = {
    "data parallel": ("single", "ddp", "horovod", "local_sgd", "parameter_server", "zero0"),
    "sharded": ("fsdp", "zero1", "zero2", "zero3", "deepspeed"),
    "tensor": ("tensor", "megatron", "channel", "spatial"),
    "pipeline": (
        "gpipe", "1f1b", "interleaved", "zero_bubble", "looped_bfs", "zbv", "dualpipev", "pipedream", "pipedream_2bw",
    ),
    "hybrid": ("hybrid",),
}  # fmt: skip
OTHER = "other frameworks"


def family(framework: str) -> str:
    """The family of a framework, or of compared factors that begin with one; OTHER for names that this version does not
    know."""
    first = framework.partition(",")[0]
    return next((name for name, frameworks in FAMILIES.items() if first in frameworks), OTHER)


@dataclass(frozen=True)
class Look:
    """How a curve is drawn. filled: whether its markers are filled with the color, else with white."""

    color: str
    marker: str
    filled: bool = True
    dashes: int = 0

    @property
    def shape(self) -> dict[str, Any]:
        """Properties of the markers and of the line between them."""
        face = {} if self.filled else {"markerfacecolor": "white", "markeredgecolor": self.color}
        return {"marker": self.marker, "linestyle": DASHES[self.dashes], "markeredgecolor": "white", **face}


SHAPES = tuple((marker, filled) for filled in (True, False) for marker in MARKERS)


def numbered(names: Iterable[str]) -> dict[str, Look]:
    """Looks for the curves of one framework in a panel of its own: each has a color."""
    return {name: Look(PALETTE[n % len(PALETTE)], *SHAPES[n % len(SHAPES)]) for n, name in enumerate(names)}


Looks = dict[tuple[str, str], Look]  # of all curves (framework, name) of a report


def looks_of(curves: Iterable[tuple[str, str]], kept: Looks | None = None) -> Looks:
    """Looks of curves (framework, name): one color a framework, and a shape that no other curve of the color has, as
    far as the shapes go.

    kept: looks whose colors the frameworks keep
    """
    names = sorted(set(curves), key=lambda curve: (family(curve[0]), *curve))  # a family's colors differ
    frameworks = list(dict.fromkeys(framework for framework, _ in kept or names))
    taken: dict[str, set[tuple[str, bool]]] = {color: set() for color in PALETTE}
    looks: Looks = {}
    drawn = Counter[str]()
    for framework, name in names:
        number = frameworks.index(framework)
        color, start = PALETTE[number % len(PALETTE)], number % len(MARKERS)
        if len(taken[color]) == len(SHAPES):
            taken[color].clear()
        shape = next(shape for shape in (*SHAPES[start:], *SHAPES[:start]) if shape not in taken[color])
        taken[color].add(shape)
        looks[framework, name] = Look(color, *shape, dashes=drawn[framework] % len(DASHES))
        drawn[framework] += 1
    return looks
