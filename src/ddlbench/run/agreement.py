"""All ranks compare their environments before anything is measured: one result must not mix versions."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ddlbench.errors import UserError
from ddlbench.ranks.control import all_gather
from ddlbench.record.fingerprint import fingerprint, is_version
from ddlbench.texts import digest, first_few

SHOWN = 5  # differences that one line names
LONGEST = 60  # letters of a value
PER_RANK = ("cpu_count",)  # ranks may have different cores; the record has the fewest


def compare_environments(environment: Mapping[str, Any]) -> list[str]:
    """What ranks differ in, a line each, the same on every rank. UserError, on every rank, where two ranks have other
    versions of a library. Collective. environment: this rank's, as in run.json"""
    packages = {f"packages.{name}": version for name, version in environment["packages"].items()}
    environment_here = {k: v for k, v in (fingerprint(environment) | packages).items() if k not in PER_RANK}
    if len(set(all_gather(digest(environment_here, 64)))) == 1:  # usual: a few bytes a rank
        return []
    ranks = all_gather((socket.gethostname(), environment_here))
    keys = sorted({key for _, values in ranks for key in values})
    lines = {key: line for key in keys if (line := _difference(key, ranks))}
    conflicts = [line for key, line in lines.items() if is_version(key)]
    if conflicts:
        differences = "; ".join(first_few(conflicts, SHOWN, "more differences"))
        raise UserError(f"{differences}: install the same versions on every host")
    return list(lines.values())


def _difference(key: str, ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """ "rank 2 on node2 has driver 560.1, rank 0 on node1 has 550.54" of the first rank that differs from rank 0."""
    first_host, first = ranks[0]
    differing = [rank for rank, (_, values) in enumerate(ranks) if values.get(key) != first.get(key)]
    if not differing:
        return None
    rank = differing[0]
    host, values = ranks[rank]
    more = f" (as {len(differing) - 1} more)" if len(differing) > 1 else ""
    name = key.removeprefix("packages.").removeprefix("variables.")
    other = _shown(first.get(key))
    return f"rank {rank} on {host}{more} has {name} {_shown(values.get(key))}, rank 0 on {first_host} has {other}"


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"
