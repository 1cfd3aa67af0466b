"""Numbers as docs/oracle.md has them."""

from __future__ import annotations


def s(seconds: float) -> str:
    return f"{seconds:.3g} s"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
