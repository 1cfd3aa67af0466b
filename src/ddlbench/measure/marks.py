"""What makes the timing of a run doubtful: its marks. A marked run stays in every table; the reader judges.

The limits, on the node where a figure is largest:
- load: processes that are not of the run computed in more than a tenth of the cores' time, from the begin of epoch 0 to
  the end of the last one. Load averages say less: the run before this one is in them, and this run itself.
- cpu pressure: in more than a tenth of the last 10 s, at the begin of epoch 0 or after the last epoch, some process
  waited for a core. Ranks and loader workers that are more than the cores do this themselves.
- steal: the hypervisor gave more than a hundredth of the cores' time to others.

one visible GPU: several ranks of a node see one GPU each. NCCL must see all GPUs of a node to find NVLink, else it uses
PCIe or the host's memory without a message (NVIDIA/nccl#1066).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddlbench.measure.devices.load import Load

MOST_OTHERS, MOST_PRESSURE, MOST_STEAL = 0.1, 0.1, 0.01


def load_columns(before: Sequence[Load], after: Sequence[Load]) -> dict[str, float | None]:
    """The largest values of all nodes. before, after: one reading of each node, in the same order."""
    return {
        "load_start": _most(load.load for load in before),
        "load_end": _most(load.load for load in after),
        "cpu_pressure_start": _most(load.pressure for load in before),
        "cpu_pressure_end": _most(load.pressure for load in after),
        "cpu_steal_share": _most(b.steal_share(a) for a, b in zip(before, after, strict=True)),
        "cpu_others_share": _most(b.others_share(a) for a, b in zip(before, after, strict=True)),
    }


def marks(
    throttled: Sequence[str], retries: int, loads: Mapping[str, float | None], one_gpu: bool = False
) -> list[str]:
    """In words. throttled: why a GPU's clock had been lowered; retries: of the allocator; loads: as `load_columns`;
    one_gpu: `sees_one_gpu`."""
    pressure = max(loads["cpu_pressure_start"] or 0.0, loads["cpu_pressure_end"] or 0.0)
    doubts = {
        "throttled": bool(throttled),
        "allocator retries": retries > 0,
        "load": (loads["cpu_others_share"] or 0.0) > MOST_OTHERS,
        "cpu pressure": pressure > MOST_PRESSURE,
        "steal": (loads["cpu_steal_share"] or 0.0) > MOST_STEAL,
        "one visible GPU": one_gpu,
    }
    return [name for name, holds in doubts.items() if holds]


def sees_one_gpu(launch: Mapping[str, Any], visible: int | None) -> bool:
    """Whether ranks of one node see one GPU each. launch: that section of run.json; visible: GPUs that rank 0 sees."""
    return launch.get("backend") == "nccl" and launch.get("ranks_per_node", 1) > 1 and visible == 1


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
