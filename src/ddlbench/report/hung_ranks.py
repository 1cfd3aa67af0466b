"""Which rank of a run that hung is behind, from the last collectives that each rank saved beside the record.

All ranks of a process group begin its collectives in the same order: the others wait for the rank with the lowest
sequence number. Numbers of two groups, or of two backends of one group, are not comparable, and a message has a number
on each of its two ranks.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from ddlbench.errors import UserError
from ddlbench.foreign import parse, read_bytes
from ddlbench.record.files import COLLECTIVES
from ddlbench.texts import first_few

SHOWN = 8  # ranks of a group


def behind(attempt: Path) -> str:
    """Each group whose ranks are not at the same collective, in words, the lowest number first; "" if no rank saved
    one. UserError for a file that cannot be read."""
    groups = defaultdict[str, dict[int, tuple[int, str]]](dict)  # by rank, because the last line of a rank counts
    for file in sorted((attempt / COLLECTIVES).glob("rank-*.json")):
        try:
            saved = parse(read_bytes(file))
            rank = saved["rank"]
            for line in saved["collectives"]:
                if not line["message"]:
                    group = f"{line['group']} of {line['operation'].partition(':')[0]}"
                    text = f"rank {rank} on {saved['host']} last began {line['operation']} {line['sequence']}"
                    groups[group][rank] = (line["sequence"], text)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} holds no last collectives ({error!r}): remove it") from error
    lines = list[str]()
    for group, ranks in groups.items():
        numbers, texts = zip(*sorted(ranks.values()), strict=True)
        if numbers[0] != numbers[-1]:
            last = "; ".join(first_few(texts, SHOWN, "more ranks"))
            lines.append(f"{numbers.count(numbers[0])} of {len(ranks)} ranks behind in group {group}: {last}")
    return "; ".join(lines) or ("all ranks began the same last collectives" if groups else "")
