"""Checks of a model's sizes that all families share. Keywords are the keys of `model.` in the configuration."""

from __future__ import annotations

from ddlbench.errors import UserError


def at_least(least: int, **sizes: int | list[int]) -> None:
    """Raise UserError for a size, or one of a list of sizes, below `least`."""
    for key, size in sizes.items():
        if min(size if isinstance(size, list) else [size], default=least) < least:
            entry = f"entries of {least}" if isinstance(size, list) else f"model.{key}={least}"
            raise UserError(f"model.{key}={size} is too small: choose {entry} or more")


def length_is(length: int, **lists: list[int]) -> None:
    """Raise UserError for a list without exactly `length` entries."""
    for key, entries in lists.items():
        if len(entries) != length:
            raise UserError(f"model.{key}={entries} has {len(entries)} entries: give {length}, one per stage")


def is_probability(**rates: float) -> None:
    """Raise UserError for a dropout rate outside [0, 1)."""
    for key, rate in rates.items():
        if not 0 <= rate < 1:
            raise UserError(f"model.{key}={rate} is not a dropout rate: choose 0 <= model.{key} < 1, 0 turns it off")


def halvings_fit(halvings: int, image_size: int) -> None:
    """Raise UserError where the image is too small to be halved that often."""
    if image_size < 2**halvings:
        raise UserError(
            f"model.image_size={image_size} is below {2**halvings}, which {halvings} halvings of the resolution "
            f"bring to one pixel: choose model.image_size={2**halvings} or more"
        )
