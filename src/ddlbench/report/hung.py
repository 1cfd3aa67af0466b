"""Which rank of a run that hung is behind which, from the last collectives that each rank saved beside the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddlbench.record.files import COLLECTIVES


def behind(attempt: Path) -> str:
    """The last collective of each rank that saved one, in words; "" where none did."""
    files = sorted((attempt / COLLECTIVES).glob("rank-*.json"))
    ranks: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    last = [(rank, rank["collectives"][-1]) for rank in ranks if rank["collectives"]]
    said = [
        f"rank {rank['rank']} on {rank['host']} last began {line['operation']} "
        f"{line['sequence']} of group {line['group']}"
        for rank, line in sorted(last, key=lambda pair: pair[1]["sequence"])
    ]
    return "; ".join(said)
