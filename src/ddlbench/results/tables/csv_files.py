"""Tables as CSV files, as spreadsheets may open them: no text is run as a formula."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ddlbench.texts import FORMULA, quoted


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV with a header; a missing cell is empty, a number has the shortest digits that give it back.
    A text that a spreadsheet would run as a formula gets a ' before it."""
    texts = table.select_dtypes("string")
    odd = [name for name in texts if texts[name].str.startswith(FORMULA).any()]
    safe = {str(name): texts[name].map(quoted, na_action="ignore") for name in odd}
    table.assign(**safe).to_csv(path, index=False)
