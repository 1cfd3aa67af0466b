"""Replacements for attributes of libraries in a fake world (ranks/fake/fake.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Answer = tuple[Any, str, Any]  # module or object, name of its attribute, value meanwhile


def returning(value: Any) -> Callable[..., Any]:
    """A function that returns `value` for any arguments."""
    return lambda *_, **__: value
