"""Which rows of an image each part has, and which rows of other parts a layer needs. Plain arithmetic.

The rows of every layer's input and output are cut in the same way, as `Part.span` says: parts differ by one row at
most. Heights need not divide, so with strides a part may need rows from one neighbour only, or not all of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddlbench.frameworks.tensor.collectives import Part


@dataclass(frozen=True)
class Window:
    """A layer that computes a row of its output from `kernel` rows of its input, `stride` rows further for each row.

    height: rows of its input; kernel: with dilation; padding: rows above and below the image
    """

    height: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0

    @property
    def output(self) -> int:
        """Rows of its output."""
        return (self.height + 2 * self.padding - self.kernel) // self.stride + 1

    def needed(self, part: Part, rank: int) -> tuple[int, int]:
        """First row and end of what a part needs for its output; rows outside of the image are padding."""
        first, count = part.span(self.output, rank)
        first = first * self.stride - self.padding
        return first, first + (count - 1) * self.stride + self.kernel

    def shared(self, part: Part, owner: int, user: int) -> slice:
        """The rows that one part has and another one needs, as rows of the owner; empty if there are none."""
        begin, count = part.span(self.height, owner)
        first, end = self.needed(part, user)
        first, end = max(first - begin, 0), min(end - begin, count)
        return slice(first, max(first, end))

    def lent(self, part: Part) -> list[slice]:
        """This part's rows that each part needs, itself included."""
        return [self.shared(part, part.rank, user) for user in range(part.size)]

    def taken(self, part: Part) -> list[int]:
        """How many rows this part needs of each part's, itself included."""
        return [length(self.shared(part, owner, part.rank)) for owner in range(part.size)]


def length(rows: slice) -> int:
    return rows.stop - rows.start
