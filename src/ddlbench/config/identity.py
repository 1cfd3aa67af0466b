"""The part of a configuration that changes what is measured: `run_id` is its hash, reports merge and compare by it.

A field that a later version adds is declared with the value that keeps the earlier behavior, so that new records are
repeats of old ones that lack it: `field(default=None, metadata={"before": None})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, cast

STAGE_TO = "data.stage_to"
# Keys that say where a run happens or how it is shown, not what it measures. The data are covered by their hash.
UNMEASURED = (
    "results_dir", "dryrun", "progress", "train.timeout_s", "train.time_limit_s",
    "profile", "profile_steps", "profile_trace",  # a window after all that is measured (docs/adr/0016)
    "preflight", "preflight_warn", "preflight_stop",  # a check before it (run/preflight.py)
    "data.root", "data.cache_dir", "data.tokenizer", "data.train", "data.valid", STAGE_TO, "cluster.notes",
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


def measured_part(plain: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the keys that do not change a measurement. Whether data were staged changes it, the
    folder does not.

    before: the keys that were added later, with the value at which they are left out; of a record too, whose
        configuration may lack any of its keys
    """
    left = _without_classes(plain)
    for key, value in before.items():
        section, leaf = _place(left, key)
        if leaf in section and section[leaf] == value:
            del section[leaf]
    for key in UNMEASURED:
        section, leaf = _place(left, key)
        if key == STAGE_TO and leaf in section:
            section["staged"] = section[leaf] is not None
        section.pop(leaf, None)
    return {key: value for key, value in left.items() if value != {}}  # a section of keys that were all added later


def _without_classes(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of its sections without the modules' paths that older records hold."""
    return {
        key: _without_classes(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value
        for key, value in plain.items()
        if key != "_target_"
    }


def _place(config: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section that holds a dotted key, and the key's last part."""
    *path, leaf = key.split(".")
    for part in path:
        section = config.get(part)
        config = cast(dict[str, Any], section) if isinstance(section, dict) else {}
    return config, leaf
