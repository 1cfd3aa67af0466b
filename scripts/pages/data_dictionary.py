"""docs/data-dictionary.md: the columns of all tables. `python -m scripts.pages.data_dictionary` prints it."""

from __future__ import annotations

from collections.abc import Sequence

from ddlbench.record.schema import CLOCKS, DICTIONARY, RANGES, RANKS, columns_of
from ddlbench.texts import markdown_table


def markdown() -> str:
    """The whole dictionary as one Markdown page."""
    page, units = DICTIONARY["page"], {f"`{unit}`": f"{low:g} to {high:g}" for unit, (low, high) in RANGES.items()}
    words = (("over ranks", "meaning", RANKS), ("clock", "meaning", CLOCKS), ("unit", "values", units))
    parts = [page["head"], *("\n" + markdown_table(head, texts.items()) for *head, texts in words)]
    head = ("column", "kind", "unit", "meaning", "over ranks", "clock", "source")
    for name, table in page["tables"].items():
        rows = list[Sequence[str]]()
        for column in columns_of(name):
            source = " or ".join(f"`{key}`" for key in column.source.split("|") if key)
            meaning = column.meaning
            if column.range and list(column.range) != RANGES.get(column.unit):
                meaning += "; {:g} to {:g}".format(*column.range)
            rows.append((f"`{column.name}`", column.kind, column.unit, meaning, column.ranks, column.clock, source))
        parts.append(f"\n## {table['file']}\n\n{table['rows']}\n\n{markdown_table(head, rows)}")
    return "".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
