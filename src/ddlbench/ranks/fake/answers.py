"""What libraries are told in a world that does not exist (ranks/fake/fake.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Answer = tuple[Any, str, Any]  # module or object, name of its attribute, value meanwhile


def returning(value: Any) -> Callable[..., Any]:
    """A function that returns it, whatever it is given."""
    return lambda *_, **__: value
