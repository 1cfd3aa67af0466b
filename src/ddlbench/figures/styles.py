"""Colors and markers of curves: a framework, or another factor that is compared, has one color for each value in a
report; no two curves of a panel look the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
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


@dataclass(frozen=True)
class Looks:
    """The looks of all curves of a report."""

    colors: dict[str, str]
    curves: dict[tuple[str, str], Look]

    def of(self, curves: Iterable[tuple[str, str]]) -> dict[str, Look]:
        """A look for each curve (framework, name) of a panel, by its name. If two share one, the later takes the next
        free one."""
        taken: set[tuple[str, str, bool]] = set()
        looks: dict[str, Look] = {}
        for framework, name in curves:
            look = self.curves.get((framework, name), Look(self.colors.get(framework, PALETTE[0]), "o"))
            colors = (look.color, *PALETTE)  # its own first
            others = (replace(look, color=color, marker=m, filled=f) for color, (m, f) in product(colors, SHAPES))
            free = (one for one in (look, *others) if (one.color, one.marker, one.filled) not in taken)
            looks[name] = look = next(free, look)
            taken.add((look.color, look.marker, look.filled))
        return looks


def looks_of(curves: Iterable[tuple[str, str]], kept: Looks | None = None) -> Looks:
    """Looks of curves (framework, name): one color a framework, and a shape that no other curve of the color has, as
    far as the shapes go.

    kept: looks whose colors the frameworks keep
    """
    names = sorted(set(curves), key=lambda curve: (family(curve[0]), *curve))  # a family's colors differ
    frameworks = list(kept.colors if kept else dict.fromkeys(framework for framework, _ in names))
    colors = {framework: PALETTE[n % len(PALETTE)] for n, framework in enumerate(frameworks)}
    taken: dict[str, set[tuple[str, bool]]] = {color: set() for color in PALETTE}
    looks: dict[tuple[str, str], Look] = {}
    drawn = Counter[str]()
    for framework, name in names:
        color, start = colors[framework], frameworks.index(framework) % len(MARKERS)
        if len(taken[color]) == len(SHAPES):
            taken[color].clear()
        shape = next(shape for shape in (*SHAPES[start:], *SHAPES[:start]) if shape not in taken[color])
        taken[color].add(shape)
        looks[framework, name] = Look(color, *shape, dashes=drawn[framework] % len(DASHES))
        drawn[framework] += 1
    return Looks(colors, looks)
