"""TFRecord files, as TensorFlow's tensorflow/core/lib/io/record_writer.h has them: one record after another, each

    uint64 length | uint32 masked crc32c of the length | payload | uint32 masked crc32c of the payload

all little-endian, and DALI's index of them: one line "offset size" a record, the frame counted in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from ddlbench.errors import importing
from ddlbench.foreign import open_regular

HEAD, FOOT = struct.Struct("<QI"), struct.Struct("<I")
FRAME = HEAD.size + FOOT.size  # bytes of a record that are not its payload

Span = tuple[int, int]  # offset and size of a record in its file, in bytes


class BadRecord(Exception):
    """What is wrong with a record. next: where the one behind it begins; None where its length is not known."""

    def __init__(self, what: str, next: int | None) -> None:
        super().__init__(what)
        self.next = next


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return b"".join((length, FOOT.pack(masked_crc(length)), payload, FOOT.pack(masked_crc(payload))))


def masked_crc(content: bytes) -> int:
    """crc32c, turned by 15 bits and moved: the checksum of data that holds checksums would be a weak one."""
    crc = crc32c()(content)
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


@cache
def crc32c() -> Callable[[bytes], int]:
    """google-crc32c's function. It is imported here: only packed sets need the library, and a cluster may lack it."""
    with importing("google-crc32c", "pip install google-crc32c"):
        return import_module("google_crc32c").value


def read_record(file: BinaryIO, offset: int, end: int) -> bytes:
    """The payload of the record at `offset` of a file of `end` bytes. Raises BadRecord."""
    file.seek(offset)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        raise BadRecord(f"cut short, the file ends after {len(head)} bytes of its header", None)
    length, check = HEAD.unpack(head)
    if check != masked_crc(head[:8]):
        raise BadRecord(f"its length ({length}) does not match its checksum", None)
    after = offset + length + FRAME
    if after > end:
        raise BadRecord(f"cut short, {after - end} of its {length + FRAME} bytes are missing", None)
    payload = file.read(length)
    if FOOT.unpack(file.read(FOOT.size))[0] != masked_crc(payload):
        raise BadRecord("its payload does not match its checksum", after)
    return payload


def walk(path: Path, spans: Sequence[Span] = ()) -> Iterator[tuple[int, bytes | BadRecord]]:
    """(offset, payload or what is wrong) of every record. After a damaged length it continues at the next record
    of `spans`, an index of the file, or ends if there is none."""
    end, offset = path.stat().st_size, 0
    with open_regular(path) as file:
        while offset < end:
            try:
                payload = read_record(file, offset, end)
            except BadRecord as bad:
                yield offset, bad
                later = (start for start, _ in spans if start > offset)
                offset = bad.next if bad.next is not None else min(later, default=end)
            else:
                yield offset, payload
                offset += len(payload) + FRAME


def index_text(spans: Iterable[Span]) -> bytes:
    """What DALI's tfrecord2idx writes."""
    return b"".join(b"%d %d\n" % span for span in spans)


def read_index(text: bytes) -> list[Span]:
    """Raises ValueError for what is no index."""
    lines = [tuple(map(int, line.split())) for line in text.splitlines()]
    if bad := next((number for number, line in enumerate(lines, 1) if len(line) != 2), None):
        raise ValueError(f"line {bad} is not two numbers")
    return [(line[0], line[1]) for line in lines]
