"""The files of a record: names of those that are there while a run goes on, and how JSON is written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ddlbench.credentials import LEFT_OUT, may_hold_credential
from ddlbench.files import replacing

RESERVE = ".reserve"  # holds space for the last run.json
HEARTBEAT = ".heartbeat"  # which process keeps the record, and when it lived
CLAIM = ".end-by-another-rank"  # who made it writes the end in the place of rank 0


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by this content, as `plain` makes it."""
    text = json.dumps(plain(content), indent=1) + "\n"
    with replacing(path, through=path.parent) as file:
        file.write(text.encode())


def plain(value: Any) -> Any:
    """What JSON can hold: a number that is not finite is unknown, null. A text with a credential is left out."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(list[Any], value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return LEFT_OUT if isinstance(value, str) and may_hold_credential(value) else value
