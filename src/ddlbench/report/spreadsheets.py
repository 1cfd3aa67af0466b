"""Tables as spreadsheets may open them: no text is run as a formula."""

from __future__ import annotations

from typing import cast

import pandas as pd

from ddlbench.report.texts import quoted


def for_spreadsheets(table: pd.DataFrame) -> pd.DataFrame:
    """The table with every text quoted that a spreadsheet would run. Each different text is looked at once: epochs.csv
    repeats those of its runs."""
    texts = table.select_dtypes("string")
    return table.assign(**{str(name): _quoted(cast(pd.Series, texts[name])) for name in texts})


def _quoted(texts: pd.Series) -> pd.Series:
    odd = {text: quoted(text) for text in texts.dropna().unique() if quoted(text) != text}
    return texts.replace(odd) if odd else texts
