"""What a warpgroup of attention_hopper_items does with one query tile.

S^T of a tile is issued before dV and dK of the tile before, which run under its exponentials. At
D = 64 dP^T goes with S^T; at D = 128, for want of registers, when dV has ended and left P's.
"""

from typing import Any

from numba import cuda

from llmq_nb.kernels.attention_hopper_tiles import make_pack, make_product, make_product_registers
from llmq_nb.kernels.attention_hopper_transposed import (
    QUERY_TILE,
    make_mask_queries,
    probabilities_transposed,
    score_gradients_transposed,
)
from llmq_nb.kernels.ptx_hopper import (
    make_pin,
    make_settle,
    make_wgmma_fence,
    make_wgmma_wait,
    mbar_arrive,
    wgmma_commit,
)


def make_steps(D: int, KV_HALF: int, Q_HALF: int) -> tuple[Any, Any, Any]:
    """(begin, advance, finish): the first tile, each later one with the one before, the last one.

    s, dp: tiles of 32; p, ds: 16 pairs of the tile in work; gk, gv: D / 2 accumulators. key, value:
    descriptors of the warpgroup's rows; query: of the tile's Q, query_t: of Q as N-major operand of
    the tile that p and ds belong to (dO follows at DOUT). stats: shared address of this lane's
    statistics. row, column: this lane's first key and query, base: as make_mask_queries. dump:
    shared address for settle. free: barrier of the stage before.
    """
    DOUT = D // 64 * Q_HALF >> 4
    EARLY = D == 64  # dP^T goes with S^T
    ACC = D // 2
    scores = make_product(D, QUERY_TILE, KV_HALF, Q_HALF)
    accumulate = make_product_registers(D, QUERY_TILE)
    pack = make_pack(16)
    mask = make_mask_queries()
    fence_scores = make_wgmma_fence(32)
    fence_acc = make_wgmma_fence(ACC)
    wait_s = make_wgmma_wait(32, 1)
    wait_dp = make_wgmma_wait(32, 0)
    wait_s_of_three = make_wgmma_wait(32, 2)
    wait_dp_of_three = make_wgmma_wait(32, 1)
    wait_acc = make_wgmma_wait(ACC, 0)
    wait_acc_of_two = make_wgmma_wait(ACC, 1)
    settle = make_settle(32)
    pin_p = make_pin(16, "r")

    @cuda.jit(device=True)
    def begin(
        s, dp, p, ds, key, value, query, stats, segment_start, base, row, column, T, scale_log2,
        dump,
    ):  # fmt: skip
        fence_scores(s)
        fence_scores(dp)
        scores(s, key, query)
        wgmma_commit()
        scores(dp, value, query + DOUT)
        wgmma_commit()
        wait_s(s)
        mask(s, segment_start, base, row, column, T)
        probabilities_transposed(s, stats, scale_log2)
        settle(s, dump)
        wait_dp(dp)
        score_gradients_transposed(dp, s, stats + QUERY_TILE * 4)
        pack(s, p)
        pack(dp, ds)

    @cuda.jit(device=True)
    def advance(
        gk, gv, s, dp, p, ds, key, value, query, query_t, stats, masked, segment_start, base, row,
        column, T, scale_log2, dump, free,
    ):  # fmt: skip
        pin_p(p)
        pin_p(ds)
        fence_scores(s)
        fence_acc(gk)
        fence_acc(gv)
        if EARLY:
            fence_scores(dp)
        scores(s, key, query)
        wgmma_commit()
        if EARLY:
            scores(dp, value, query + DOUT)
            wgmma_commit()
        accumulate(gv, p, query_t + DOUT)
        if not EARLY:
            wgmma_commit()
        accumulate(gk, ds, query_t)
        wgmma_commit()
        wait_s_of_three(s)
        if masked:
            mask(s, segment_start, base, row, column, T)
        probabilities_transposed(s, stats, scale_log2)
        settle(s, dump)
        if EARLY:
            wait_dp_of_three(dp)
            score_gradients_transposed(dp, s, stats + QUERY_TILE * 4)
            wait_acc(gv)
            wait_acc(gk)
            pin_p(p)  # read until here
            pin_p(ds)
            mbar_arrive(free)
            pack(s, p)
        else:
            wait_acc_of_two(gv)
            pin_p(p)  # read until here
            fence_scores(dp)
            scores(dp, value, query + DOUT)
            wgmma_commit()
            wait_acc_of_two(gk)
            pin_p(ds)
            mbar_arrive(free)
            pack(s, p)
            wait_dp(dp)
            score_gradients_transposed(dp, s, stats + QUERY_TILE * 4)
        pack(dp, ds)

    @cuda.jit(device=True)
    def finish(gk, gv, p, ds, query_t):
        pin_p(p)
        pin_p(ds)
        fence_acc(gk)
        fence_acc(gv)
        accumulate(gv, p, query_t + DOUT)
        accumulate(gk, ds, query_t)
        wgmma_commit()
        wait_acc(gv)
        wait_acc(gk)

    return begin, advance, finish
