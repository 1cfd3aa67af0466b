"""`--blocks`: FLOPs, bytes and arithmetic intensity of each block, and what limits it on a device (Gusak et al. 2022,
table 6; the roofline of Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ddlbench.oracle.counts.counts import Block, Work
from ddlbench.oracle.timing.computation import ANY, Computation
from ddlbench.texts import aligned

HEADERS = ("blocks", "pass", "GFLOP", "GB moved", "FLOP/byte", "limited by")


def lines(computation: Computation, samples: int) -> Iterator[str]:
    """A table of all blocks, equal neighbours together. samples: of a micro batch"""
    speeds = computation.speeds
    ridge = None if speeds is ANY else speeds.flops_per_s / speeds.bytes_per_s
    yield f"work of each block for {samples} samples, from the operations of the model:"
    yield from aligned(
        HEADERS, list(_rows(computation.counts.blocks, samples, ridge)), left=("blocks", "pass", "limited by")
    )
    if ridge is None:
        yield "the peaks of the device are not known, so what limits a block is not, either"
    else:
        yield f"above {ridge:.3g} FLOP/byte computing limits, below it the bandwidth of the memory"


def _rows(blocks: Sequence[Block], samples: int, ridge: float | None) -> Iterator[tuple[str, ...]]:
    for same in (list(group) for _, group in groupby(blocks, lambda block: _figures(block, samples))):
        name = same[0].name if len(same) == 1 else f"{same[0].name} to {same[-1].name}"
        for direction, (flops, moved) in zip(("forward", "backward"), _figures(same[0], samples), strict=True):
            intensity = flops / moved if moved else 0.0
            limit = "" if ridge is None else "computing" if intensity > ridge else "memory"
            yield name, direction, f"{flops / 1e9:.4g}", f"{moved / 1e9:.4g}", f"{intensity:.3g}", limit


def _figures(block: Block, samples: int) -> tuple[tuple[float, float], ...]:
    return flops_and_bytes(block.forward, samples), flops_and_bytes(block.backward, samples)


def flops_and_bytes(work: Work, samples: int) -> tuple[float, float]:
    """FLOPs of one pass, and the bytes that it reads and writes."""
    return float(work.flops.sum()) * samples, float(work.moved.at(samples).sum())
