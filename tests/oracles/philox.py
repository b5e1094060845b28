"""Philox4x32-10, the counter-based random number generator, in Python integers.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011,
section 3.3 and table 2; the known answers are of its Random123 distribution (kat_vectors).
"""

from collections.abc import Sequence

WORD = 0xFFFFFFFF
M0, M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of counter words 0 and 2
W0, W1 = 0x9E3779B9, 0xBB67AE85  # key increments: golden ratio, sqrt(3) - 1
ROUNDS = 10

KNOWN_ANSWERS = [  # (counter, key, output)
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Four 32-bit words from a counter of four and a key of two 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = M0 * c0, M1 * c2
        high0, low0 = product0 >> 32, product0 & WORD
        high1, low1 = product1 >> 32, product1 & WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + W0) & WORD, (k1 + W1) & WORD
    return c0, c1, c2, c3
