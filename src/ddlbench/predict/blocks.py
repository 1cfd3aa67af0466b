"""`--blocks`: FLOPs, bytes and arithmetic intensity of each block, and what limits it on a device (Gusak et al. 2022,
table 6; the roofline of Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ddlbench.counts.counts import Block, Work
from ddlbench.oracle.timing.computation import ANY, Computation
from ddlbench.texts import aligned

HEADERS = ("blocks", "pass", "GFLOP", "GB moved", "FLOP/byte", "limited by")


def lines(computation: Computation, samples: int) -> Iterator[str]:
    """A table of all blocks, equal neighbours together. samples: of a micro batch"""
    speeds = computation.speeds
    ridge = None if speeds is ANY else speeds.flops_per_s / speeds.bytes_per_s

    def figures_of(block: Block) -> tuple[tuple[float, float], ...]:
        return flops_and_bytes(block.forward, samples), flops_and_bytes(block.backward, samples)

    rows = list[tuple[str, ...]]()
    for figures, group in groupby(computation.counts.blocks, figures_of):
        first, *others = group
        name = f"{first.name} to {others[-1].name}" if others else first.name
        for direction, (flops, moved) in zip(("forward", "backward"), figures, strict=True):
            intensity = flops / moved if moved else 0.0
            limit = "" if ridge is None else "computing" if intensity > ridge else "memory"
            rows.append((name, direction, f"{flops / 1e9:.4g}", f"{moved / 1e9:.4g}", f"{intensity:.3g}", limit))
    yield f"work of each block for {samples} samples, from the operations of the model:"
    yield from aligned(HEADERS, rows, left=("blocks", "pass", "limited by"))
    if ridge is None:
        yield "the peaks of the device are not known, so what limits a block is not, either"
    else:
        yield f"above {ridge:.3g} FLOP/byte computing limits, below it the bandwidth of the memory"


def flops_and_bytes(work: Work, samples: int) -> tuple[float, float]:
    """FLOPs of one pass, and the bytes that it reads and writes."""
    return float(work.flops.sum()) * samples, float(work.moved.at(samples).sum())
