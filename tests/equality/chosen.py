"""Trainings that the selected tests ask for: one set of processes makes many, and none that no test asks for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


class Chosen:
    """What `make` gives for the keys of a set, made when the first of them is asked for. The keys are those of the
    selected tests of this file: their parameters `key`, of which `set_of` says the set."""

    def __init__(
        self, request: pytest.FixtureRequest, set_of: Callable[[Any], Hashable], make: Callable[[list[Any]], Any]
    ) -> None:
        items: list[Any] = [item for item in request.session.items if item.path == request.path]
        self.keys = [item.callspec.params["key"] for item in items if hasattr(item, "callspec")]
        self.set_of, self.make = set_of, make
        self.made: dict[Hashable, Any] = {}  # or the error, which no other test of the set need wait for again

    def __call__(self, key: Hashable) -> Any:
        chosen = self.set_of(key)
        if chosen not in self.made:
            try:
                self.made[chosen] = self.make([each for each in self.keys if self.set_of(each) == chosen])
            except Exception as error:
                self.made[chosen] = error
        if isinstance(self.made[chosen], Exception):
            raise self.made[chosen]
        return self.made[chosen]


def for_each(keys: Iterable[Iterable[object]], is_slow: Callable[[Any], bool]) -> pytest.MarkDecorator:
    """A test for each key, which is its name."""
    params = [
        pytest.param(
            key,
            id="-".join(map(str, key)).replace(",", "").replace(" ", "-"),
            marks=[pytest.mark.slow] if is_slow(key) else [],
        )
        for key in keys
    ]
    return pytest.mark.parametrize("key", params)
