"""16-byte pieces of bfloat16 or float32 rows in registers.

A piece is 8 values. bfloat16: four uint32 of packed pairs in a row of a local array; float32:
eight. Rows start at multiples of 16 bytes, so a row is whole pieces plus nothing: C is a multiple
of 8.
"""

from numba import cuda

from llmq_nb.kernels.ptx import bf16x2, bf_hi, bf_lo, ldg128, ldg128_cs, ldg128_nc, stg128

PIECE = 8
"""Values of a piece."""


@cuda.jit(device=True)
def load_piece(tile, i, address, inside):
    """tile[i, 0:4] = 8 bfloat16 at the address, zeros where not `inside` (nothing is read then)."""
    if inside:
        tile[i, 0], tile[i, 1], tile[i, 2], tile[i, 3] = ldg128(address)
    else:
        for j in range(4):
            tile[i, j] = 0


@cuda.jit(device=True)
def load_piece_nc(tile, i, address, inside):
    """load_piece through the read-only path, for what no kernel in flight writes (weights)."""
    if inside:
        tile[i, 0], tile[i, 1], tile[i, 2], tile[i, 3] = ldg128_nc(address)
    else:
        for j in range(4):
            tile[i, j] = 0


@cuda.jit(device=True)
def load_piece_cs(tile, i, address, inside):
    """load_piece, streaming: for what is read once."""
    if inside:
        tile[i, 0], tile[i, 1], tile[i, 2], tile[i, 3] = ldg128_cs(address)
    else:
        for j in range(4):
            tile[i, j] = 0


@cuda.jit(device=True)
def store_piece(address, tile, i, inside):
    """8 bfloat16 at the address = tile[i, 0:4], if `inside`."""
    if inside:
        stg128(address, (tile[i, 0], tile[i, 1], tile[i, 2], tile[i, 3]))


@cuda.jit(device=True)
def get(tile, i, k):
    """Value k (0..7, constant after unrolling) of piece i, as float32."""
    return bf_lo(tile[i, k >> 1]) if (k & 1) == 0 else bf_hi(tile[i, k >> 1])


@cuda.jit(device=True)
def add_pieces(a, b, i):
    """a[i] = bfloat16(a[i] + b[i])."""
    for j in range(4):
        a[i, j] = bf16x2(bf_lo(a[i, j]) + bf_lo(b[i, j]), bf_hi(a[i, j]) + bf_hi(b[i, j]))
