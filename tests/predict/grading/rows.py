"""A published measurement and its base, as rows of a CSV file."""

from __future__ import annotations

from collections.abc import Mapping

from ddlbench.results.reading.published import CsvRow

BASE = {
    "source": "a page", "model": "ResNet-50", "framework": "PyTorch", "strategy": "DDP", "gpus": "8",
    "gpus_per_node": "8", "gpu_type": "A100-SXM4-80GB", "network": "8x HDR 200 Gb/s a node", "batch_per_gpu": "256",
    "global_batch": "", "precision": "amp fp16", "measured": "16000", "unit": "img/s", "base_gpus": "",
    "base_value": "", "step_ms": "", "layout": "", "seq_len": "",
}  # fmt: skip
POINT = {**BASE, "gpus": "32", "measured": "60000", "base_gpus": "8", "base_value": "16000"}


def rows(*cells: Mapping[str, str]) -> list[CsvRow]:
    """The rows of a file with these cells."""
    return [CsvRow(line, one) for line, one in enumerate(cells, 2)]
