"""The part of a configuration that changes what is measured: `run_id` is its hash, reports merge and compare by it.

A field that a later version adds is declared with the value that keeps the earlier behavior, so that new records are
repeats of old ones that lack it: `field(default=None, metadata={"before": None})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, cast

Plain = Mapping[str, Any]
STAGE_TO = "data.stage_to"
# Keys that say where a run happens or how it is shown, not what it measures. The data are covered by their hash.
UNMEASURED = (
    "results_dir", "dryrun", "progress", "train.timeout_s", "train.time_limit_s",
    "profile", "profile_steps", "profile_trace",  # a window after all that is measured (docs/adr/0016)
    "preflight", "preflight_warn", "preflight_stop",  # a check before it (run/preflight.py)
    "data.root", "data.cache_dir", "data.tokenizer", "data.train", "data.valid", "cluster.notes",
    "checkpoint.dir", "checkpoint.keep", "checkpoint.resume",
)  # fmt: skip


def added_later(config: object, prefix: str = "") -> dict[str, Any]:
    """The dotted keys of a dataclass, or of one of its objects, that a later version added, with the value that
    keeps the earlier behavior."""
    added: dict[str, Any] = {}
    keys: tuple[Field[Any], ...] = fields(cast(Any, config))
    for field in keys:
        if "before" in field.metadata:
            added[prefix + field.name] = field.metadata["before"]
        elif is_dataclass(part := getattr(config, field.name, None)):
            added |= added_later(part, f"{prefix}{field.name}.")
    return added


def measured_part(plain: Plain, before: Plain, prefix: str = "") -> dict[str, Any]:
    """A configuration without the keys that do not change a measurement, and without the modules' paths that older
    records hold. Whether data were staged changes it, the folder does not.

    before: the keys that were added later, with the value at which they are left out; of a record too, whose
        configuration may lack any of its keys
    prefix: the section whose keys these are, with a dot; "": the complete configuration
    """
    measured: dict[str, Any] = {}
    for key, value in plain.items():
        name = prefix + key
        if key == "_target_" or (name in before and before[name] == value):
            continue
        if name == STAGE_TO:
            measured["staged"] = value is not None
        elif name not in UNMEASURED:
            section = isinstance(value, Mapping)
            measured[key] = measured_part(cast(Plain, value), before, f"{name}.") if section else value
    if prefix:
        return measured
    return {key: value for key, value in measured.items() if value != {}}  # a section of keys that were all added later
