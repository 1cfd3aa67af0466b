"""What a person sees while a run works: a bar on a terminal, plain lines in a log file, on rank 0 only."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from ddlbench.texts import say

Item = TypeVar("Item")


def tell(text: str, who: str = "ddlbench") -> None:
    """One line of the program itself on stderr, from any rank, whatever characters the text has."""
    with contextlib.suppress(OSError):  # nobody reads: the terminal or `tee` has ended
        say(f"{who}: {text}", stream=sys.stderr)


class Progress:
    """Writes to stderr, so that stdout has results alone."""

    def __init__(self, enabled: bool, every_s: float = 10.0) -> None:
        self.enabled = enabled
        self.every_s = every_s
        self.bar = enabled and sys.stderr.isatty()

    def say(self, text: str) -> None:
        if self.enabled:
            with contextlib.suppress(OSError):
                tqdm.write(text, file=sys.stderr) if self.bar else say(text, stream=sys.stderr)

    def steps(self, items: Iterable[Item], total: int, what: str, unit: str = "steps") -> Iterator[Item]:
        """Yield the items and show how many have passed."""
        if not self.enabled:
            yield from items
            return
        if self.bar:
            unit = unit.removesuffix("s")
            yield from tqdm(items, what, total, leave=False, unit=unit, dynamic_ncols=True, mininterval=0.5)
            return
        began = said = time.perf_counter()
        for done, item in enumerate(items):
            yield item
            now = time.perf_counter()
            if now - said >= self.every_s:
                said = now
                self.say(f"{what}: {done + 1}/{total}, {(done + 1) / (now - began):.2f} {unit}/s")
