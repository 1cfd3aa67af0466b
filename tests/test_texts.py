"""Texts that are safe to print."""

from __future__ import annotations

import pytest

from ddlbench.texts import printable, shortened


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain µs … 你好", "plain µs … 你好"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("\x9b", "\\x9b"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_what_does_not_print_is_an_escape(text, expected):
    assert printable(text) == expected


def test_a_short_text_stays_and_a_long_one_is_cut_to_the_length():
    assert shortened("x" * 20, 20) == "x" * 20
    assert len(shortened("x" * 21, 20)) == 20
    assert shortened("x" * 50 + "a", 20) != shortened("x" * 50 + "b", 20)
