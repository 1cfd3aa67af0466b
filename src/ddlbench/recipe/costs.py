"""What the update of one parameter costs: bytes moved, and states that stay in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

BLOCK = 256  # numbers that share a scale where a state is in 8 bits, and
SMALLEST = 4096  # numbers of the smallest tensor with such states: both as bitsandbytes has them


@dataclass(frozen=True)
class Costs:
    """What an update keeps and moves for one parameter in fp32.

    states: numbers that stay from update to update: momentum, Adam's two moments
    bytes_: read and written: weight, gradient and states are read, weight and states written; lars and lamb read
        weight and update once more for their norms, and weight decay of adamw8bit reads and writes the weight
    copies: numbers that live during the update of their tensor: what weight decay is added to; the square root and its
        quotient of Adam
    quantized: states of tensors that are not small are codes of 8 bits, and a scale in fp32 of each block of them
    """

    states: int
    bytes_: int
    copies: int
    quantized: bool = False

    def state_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of the states of tensors with so many numbers, in fp32 where they are not quantized."""
        codes = [size for size in sizes if self.quantized and size >= SMALLEST]
        in_fp32 = sum(sizes) - sum(codes) + sum(ceil(size / BLOCK) for size in codes)
        return self.states * (4 * in_fp32 + sum(codes))
