"""CRC-32 (ISO-HDLC, as in zlib) of bytes, combined from their parts so that nothing is read twice.

A CRC is the remainder of a polynomial over GF(2); appending bytes multiplies it by a power of x.

Source: Mark Adler's `crc32_combine` (zlib, crc32.c).
"""

from __future__ import annotations

import zlib
from functools import lru_cache

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31
"""x^0: the lowest power is in the highest bit."""
LONG = 65_536
"""Bytes from which compiled kernels may be faster than zlib."""


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Returns the checksum of flat bytes that follow those with checksum `value`.

    The first long input loads torch and may compile a kernel: do not make that call on an event loop.
    """
    if len(data) < LONG:
        return zlib.crc32(data, value)
    from fulmen_exchange import kernels

    return kernels.checksum(memoryview(data), value)


def combine(first: int, second: int, size: int) -> int:
    """Returns the checksum of two concatenated parts.

    Args:
        first: Checksum of the first part.
        second: Checksum of the second part.
        size: Bytes of the second part.
    """
    lowest, low, high, highest = _tables(size)
    return lowest[first & 255] ^ low[first >> 8 & 255] ^ high[first >> 16 & 255] ^ highest[first >> 24] ^ second


def without(whole: int, first: int, size: int) -> int:
    """Returns the checksum of the second of two parts.

    Args:
        whole: Checksum of both.
        first: Checksum of the first part.
        size: Bytes of the second part.
    """
    return combine(first, whole, size)  # sums over GF(2) are differences


@lru_cache(maxsize=64)
def _tables(size: int) -> tuple[list[int], ...]:
    """Returns the product with x^(8 size) for each value of each byte of a checksum."""
    power = _power(size)
    tables = []
    for shift in range(0, 32, 8):
        table = [0] * 256
        for bit in range(8):
            product = _product(power, 1 << shift + bit)
            for value in range(1 << bit):
                table[1 << bit | value] = table[value] ^ product
        tables.append(table)
    return tuple(tables)


def _power(size: int) -> int:
    """Returns x^(8 size)."""
    power, square = ONE, ONE >> 8
    while size:
        if size & 1:
            power = _product(square, power)
        square = _product(square, square)
        size >>= 1
    return power


def _product(left: int, right: int) -> int:
    product = 0
    while left:
        if left & ONE:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (POLYNOMIAL if right & 1 else 0)
    return product
