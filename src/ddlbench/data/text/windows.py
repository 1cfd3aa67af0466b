"""The windows of a text, by random access."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddlbench.data.feed import Fetched
from ddlbench.data.text.raw import RawText, RawTokens
from ddlbench.data.text.tokenfile import TokenFile
from ddlbench.recipe.losses import IGNORED


@dataclass(frozen=True)
class TokenSplit:
    """Window i has tokens [i*T, (i+1)*T) as inputs and the tokens one further as targets, T = seq_len.

    In training every window is whole and the rest of the text, at most T tokens, is left out. In validation every
    token after the first is scored exactly once: the last window may be short, its inputs are filled up with the last
    token and its targets with -100, which is not scored. Windows do not depend on epoch or seed.
    """

    file: TokenFile | RawText
    seq_len: int
    windows: int

    def __len__(self) -> int:
        return self.windows

    def __getitems__(self, keys: list[tuple[int, int]]) -> Fetched:
        """inputs, targets [B, seq_len] int64, valid [B] all True."""
        indices = np.array([index for _, index in keys], dtype=np.int64)
        assert ((indices >= 0) & (indices < self.windows)).all(), f"window outside [0, {self.windows}): {indices}"
        positions = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        last = self.file.index.tokens - 1
        window = torch.from_numpy(self.tokens[np.minimum(positions, last)].astype(np.int64))
        beyond = torch.from_numpy(positions[:, 1:] > last)
        return Fetched(
            inputs=window[:, :-1].contiguous(),
            targets=window[:, 1:].masked_fill(beyond, IGNORED),
            valid=torch.ones(len(keys), dtype=torch.bool),
        )

    @cached_property
    def tokens(self) -> NDArray[Any] | RawTokens:
        """The whole text, mapped, or tokenised at each access: [tokens]."""
        return self.file.read()

    def __getstate__(self) -> dict[str, Any]:
        """Without the text: a worker opens its own, instead of being sent the whole of it."""
        return {key: value for key, value in self.__dict__.items() if key != "tokens"}
