"""JSON files of unknown origin are read up to a size and a depth."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ddlbench.errors import UserError
from ddlbench.foreign import DEEPEST, parse, read_bytes


def test_a_file_up_to_the_limit_is_read(tmp_path):
    file = tmp_path / "run.json"
    file.write_bytes(b"x" * 100)
    assert read_bytes(file, largest=100) == b"x" * 100
    with pytest.raises(UserError, match="it has 100 bytes, more than the 99 that are read"):
        read_bytes(file, largest=99)


def test_a_file_without_a_size_is_read_up_to_the_limit():
    with pytest.raises(UserError, match="more than the 4 that are read"):
        read_bytes(Path("/proc/self/status"), largest=4)


def test_a_pipe_is_refused_with_and_without_a_writer(tmp_path):
    pipe = tmp_path / "run.json"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(pipe)
    writer = threading.Thread(target=lambda: os.close(os.open(pipe, os.O_RDWR)))
    writer.start()
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(pipe)
    writer.join()


def test_texts_are_printable_at_every_depth():
    assert parse(b'{"\\u001b": ["\\ud800", {"a": "x\\ny"}]}') == {"\\x1b": ["\\ud800", {"a": "x\\ny"}]}
    assert parse('{"a": ["\x7f", "\u202e", "ü"], "\x9b": 1}'.encode()) == {"a": ["\\x7f", "\\u202e", "ü"], "\\x9b": 1}


@pytest.mark.parametrize("inner", [b"1", b'"\\u001b"'])
def test_nesting_has_an_end(inner):
    levels = DEEPEST - 1
    assert parse(b'{"a": ' + b"[" * levels + inner + b"]" * levels + b"}")
    assert parse(b'{"a": ' + b"[" * (levels + 1) + b"]" * (levels + 1) + b"}")
    for deeper in (levels + 1, 500, 100_000):
        with pytest.raises(UserError, match="nested more than 50 levels deep"):
            parse(b'{"a": ' + b"[" * deeper + inner + b"]" * deeper + b"}")


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b'{"a"', b"null", b'{"a": ' + b"9" * 5000 + b"}"])
def test_json_that_is_no_object_is_a_value_error(content):
    with pytest.raises(ValueError):  # noqa: PT011 - whichever JSON or UTF-8 gives
        parse(content)
