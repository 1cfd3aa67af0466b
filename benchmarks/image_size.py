"""Memory by image size: rehearsed peaks of a rank of ResNet-50, with complete images and with parts of them.

python -m benchmarks.image_size [--sizes 224 448 896 1792] [--batch 4] [--figure FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ddlbench.config.compose import configuration
from ddlbench.figures import plotting
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.rehearse import rehearse
from ddlbench.texts import GIB

PARTS = (1, 2, 4)


def peak(size: int, parts: int, batch: int, precision: str) -> int:
    """Bytes of a rank with both neighbors (of two parts: with the only one) at its fullest moment, on "cuda". batch:
    images of a replica; the images of a replica are shared by `parts` ranks, of 4 in all."""
    framework = (
        ("+framework=ddp",) if parts == 1 else ("+framework=spatial", f"framework.sp={parts}", "framework.dp=null")
    )
    words = (*framework, "+model=resnet50", f"model.image_size={size}", f"train.global_batch={batch * 4 // parts}")
    config = configuration(*words, f"train.precision={precision}", "recipe=sgd")
    row = rehearse(config, Launch("torchrun", 1, 4, 1, 4), torch.device("cuda", 0))
    if row.memory is None:
        raise RuntimeError(row.error)
    return row.memory["peak"] or 0


def draw(peaks: Mapping[int, Sequence[float]], options: argparse.Namespace) -> None:
    """peaks: GiB for each number of parts, by size"""
    with plotting.style():
        what = f"{options.batch} images a replica, {options.precision}, rehearsed"
        figure = plotting.grid([("Memory of a rank of ResNet-50", [what])])
        (axes,) = figure.axes
        for parts, marker, values in zip(PARTS, "os^", zip(*peaks.values(), strict=True), strict=True):
            name = "ddp: complete images" if parts == 1 else f"spatial: images in {parts} parts"
            axes.plot(list(peaks), values, marker=marker, label=name)
        axes.set(xscale="log", yscale="log", xlabel="pixels of an image's side", ylabel="GiB at the fullest moment")
        axes.set_xticks(list(peaks), [str(size) for size in peaks], minor=False)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(plotting.plain)
        plotting.arrange(figure)
        figure.savefig(options.figure, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 448, 896, 1792])
    parser.add_argument("--batch", type=int, default=4, help="images of a replica")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(arguments)
    print("| image | `ddp` | " + " | ".join(f"`spatial`, sp = {parts}" for parts in PARTS[1:]) + " |")
    print("|---" * (1 + len(PARTS)) + "|")
    measured = dict[int, list[float]]()
    for size in options.sizes:
        peaks = measured[size] = [peak(size, parts, options.batch, options.precision) / GIB for parts in PARTS]
        shares = [f"{peaks[0]:.2f} GiB", *(f"{part:.2f} GiB ({part / peaks[0]:.0%})" for part in peaks[1:])]
        print(f"| {size} x {size} | {' | '.join(shares)} |", flush=True)
    if options.figure:
        draw(measured, options)


if __name__ == "__main__":
    main()
