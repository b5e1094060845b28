"""Inline PTX for sm_90 and later (mbarrier, bulk copies, clusters) and for sm_90a (wgmma,
setmaxnreg).

Same conventions as ptx.py, whose `asm_op` and `tile_op` make everything here; none of it has a
simulator stand-in. A tensor map is passed as the 64-byte aligned address of its copy in device
memory. sm_120 has the bulk copies but no multicast and no wgmma. Kernels for wgmma need
Options(arch_specific=True). Source    PTX ISA 9.0; rules learned by measuring: bench/README.md.
"""

from typing import Any

from llmq_nb.kernels.ptx import asm_op, tile_op

_STORE: dict[str, Any] = {"side": True, "memory": True}

# ---- mbarrier: shared address, then the operand ------------------------------------------------
mbar_init = asm_op("mbar_init", "mbarrier.init.shared::cta.b64 [$0], $1;", "", "rr", **_STORE)
mbar_expect = asm_op(
    "mbar_expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "", "rr", **_STORE
)
mbar_arrive = asm_op("mbar_arrive", "mbarrier.arrive.shared::cta.b64 _, [$0];", "", "r", **_STORE)
mbar_try = asm_op(  # 1 if the phase of this parity has completed
    "mbar_try",
    "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p;}",
    "r",
    "rr",
    **_STORE,
)
mbar_wait = asm_op(  # blocks until the phase of this parity has completed
    "mbar_wait",
    "{.reg .pred p; WAIT_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
    "@p bra DONE_${:uid}; bra WAIT_${:uid}; DONE_${:uid}: }",
    "",
    "rr",
    **_STORE,
)
fence_async = asm_op("fence_async", "fence.proxy.async.shared::cta;", **_STORE)
fence_mbar_init = asm_op("fence_mbar_init", "fence.mbarrier_init.release.cluster;", **_STORE)

# ---- bulk and tensor copies --------------------------------------------------------------------
_TMA = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes{} "
bulk_g2s = asm_op(  # (shared destination, global source, bytes, barrier)
    "bulk_g2s",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    "",
    "rlrr",
    **_STORE,
)
bulk_prefetch = asm_op(  # global source, bytes: into the L2 cache
    "bulk_prefetch", "cp.async.bulk.prefetch.L2.global [$0], $1;", "", "lr", **_STORE
)
# (shared destination, tensor map, coordinates innermost first, barrier)
tma_2d = asm_op("tma_2d", _TMA.format(2, "") + "[$0], [$1, {$2, $3}], [$4];", "", "rlrrr", **_STORE)
tma_3d = asm_op(
    "tma_3d", _TMA.format(3, "") + "[$0], [$1, {$2, $3, $4}], [$5];", "", "rlrrrr", **_STORE
)
tma_4d = asm_op(
    "tma_4d", _TMA.format(4, "") + "[$0], [$1, {$2, $3, $4, $5}], [$6];", "", "rlrrrrr", **_STORE
)
tma_2d_multicast = (
    asm_op(  # last argument: mask of the cluster's blocks; each completes on its own barrier
        "tma_2d_multicast",
        "{.reg .b16 m; cvt.u16.u32 m, $5; "
        + _TMA.format(2, ".multicast::cluster")
        + "[$0], [$1, {$2, $3}], [$4], m;}",
        "",
        "rlrrrr",
        **_STORE,
    )
)
tma_3d_multicast = asm_op(
    "tma_3d_multicast",
    "{.reg .b16 m; cvt.u16.u32 m, $6; "
    + _TMA.format(3, ".multicast::cluster")
    + "[$0], [$1, {$2, $3, $4}], [$5], m;}",
    "",
    "rlrrrrr",
    **_STORE,
)
_TMA_STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group "
tma_store_2d = asm_op(
    "tma_store_2d", _TMA_STORE.format(2) + "[$0, {$1, $2}], [$3];", "", "lrrr", **_STORE
)
tma_store_3d = asm_op(
    "tma_store_3d", _TMA_STORE.format(3) + "[$0, {$1, $2, $3}], [$4];", "", "lrrrr", **_STORE
)
tma_add_2d = (
    asm_op(  # memory += tile in the map's element type; one addition an element, so order-free
        "tma_add_2d",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [$0, {$1, $2}], [$3];",
        "",
        "lrrr",
        **_STORE,
    )
)
prefetch_map = asm_op("prefetch_map", "prefetch.tensormap [$0];", "", "l", **_STORE)
bulk_commit = asm_op("bulk_commit", "cp.async.bulk.commit_group;", **_STORE)
bulk_wait0 = asm_op("bulk_wait", "cp.async.bulk.wait_group 0;", **_STORE)
bulk_wait_read0 = asm_op("bulk_wait", "cp.async.bulk.wait_group.read 0;", **_STORE)
bulk_wait_read1 = asm_op("bulk_wait", "cp.async.bulk.wait_group.read 1;", **_STORE)
bulk_wait_read2 = asm_op("bulk_wait", "cp.async.bulk.wait_group.read 2;", **_STORE)
# ordered: a plain ldg128_nc may sink to its first use, behind the main loop
ldg128_early = asm_op(
    "ldg128", "ld.global.nc.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "l", side=True
)

# ---- clusters ----------------------------------------------------------------------------------
cluster_rank = asm_op("cluster_rank", "mov.u32 $0, %cluster_ctarank;", "r", "")
cluster_sync = asm_op(
    "cluster_sync", "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", **_STORE
)
# Arrives on the same barrier of block $1. Not .release.cluster, which compiles to MEMBAR.ALL.GPU:
# data read by wgmma is complete after its wait, so there is nothing to release.
mbar_arrive_cluster = asm_op(
    "mbar_arrive_cluster",
    "{.reg .b32 t; mapa.shared::cluster.u32 t, $0, $1; "
    "mbarrier.arrive.shared::cluster.b64 _, [t];}",
    "",
    "rr",
    **_STORE,
)
cluster_address = asm_op(  # of block $2's shared address $1
    "cluster_address", "mapa.shared::cluster.u32 $0, $1, $2;", "r", "rr"
)
sts128f_cluster = asm_op(
    "sts128f_cluster",
    "st.shared::cluster.v4.f32 [$0], {$1,$2,$3,$4};",
    "",
    "rffff",
    groups=(1, 4),
    **_STORE,
)

# ---- packed bfloat16, matrix stores: sm_90 and later -------------------------------------------
stsm4 = asm_op(
    "stsm4",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};",
    "",
    "rrrrr",
    groups=(1, 4),
    **_STORE,
)
add2 = asm_op("add2", "add.rn.bf16x2 $0, $1, $2;", "r", "rr")
maxmag2 = asm_op(
    "maxmag2", "max.xorsign.abs.bf16x2 $0, $1, $2;", "r", "rr"
)  # sign bits are rubbish

# ---- wgmma: sm_90a -----------------------------------------------------------------------------
DESCRIPTOR_HIGH = 1 << 30 | 64
"""High half of every descriptor: 128-byte swizzle, eight rows 1024 bytes apart."""
wgmma_fence = asm_op("wgmma_fence", "wgmma.fence.sync.aligned;", **_STORE)
wgmma_commit = asm_op("wgmma_commit", "wgmma.commit_group.sync.aligned;", **_STORE)
wgmma_wait0 = asm_op("wgmma_wait", "wgmma.wait_group.sync.aligned 0;", **_STORE)
wgmma_wait1 = asm_op("wgmma_wait", "wgmma.wait_group.sync.aligned 1;", **_STORE)


def make_set_registers(count: int, *, increase: bool) -> Any:
    """setmaxnreg: this warpgroup's registers a thread, a multiple of 8; with launch bounds (384,
    1)."""
    return asm_op(
        "set_registers",
        f"setmaxnreg.{'inc' if increase else 'dec'}.sync.aligned.u32 {count};",
        side=True,
    )


def make_wgmma(
    n: int, *, kind: str = "bf16", registers: bool = False, trans_a: int = 0, trans_b: int = 0
) -> Any:
    """tile[n / 2] (64 x n float32) += A[64, k] B[n, k]^T for one step: k = 16 (bf16) or 32 (FP8).

    op(tile, descriptor_a, descriptor_b, use_tile), or with `registers` op(tile, fragments, offset,
    descriptor_b, use_tile); use_tile = 0 starts from zero. trans_*: operand is M- or N-major (bf16
    only). Descriptors are the low 32 bits; the high ones are DESCRIPTOR_HIGH, so that stepping one
    is a 32-bit addition.
    """
    half = n // 2
    tile = ",".join(f"${i}" for i in range(half))
    width = 4 if registers else 1
    first = 2 * half
    a = "{" + ",".join(f"${first + i}" for i in range(4)) + "}" if registers else "a"
    scales = "1, 1"
    if kind == "bf16":
        scales += f", {trans_b}" if registers else f", {trans_a}, {trans_b}"
    k = 16 if kind == "bf16" else 32
    pack_a = "" if registers else f"mov.b64 a, {{${first}, high}}; "
    template = (
        f"{{.reg .pred p; .reg .b32 high; .reg .b64 a, b; mov.b32 high, {DESCRIPTOR_HIGH:#x}; "
        f"{pack_a}mov.b64 b, {{${first + width}, high}}; setp.ne.b32 p, ${first + width + 1}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} "
        f"{{{tile}}}, {a}, b, p, {scales};}}"
    )
    return tile_op(
        "wgmma", template, half, "rr" if registers else "rrr", fragments=4 if registers else 0
    )


def make_wgmma_wait(n: int, left: int = 0) -> Any:
    """Wait until at most `left` groups are in flight, with the n elements as tied operands, so that
    no use of the accumulators moves above it."""
    return tile_op("wgmma_wait_tile", f"wgmma.wait_group.sync.aligned {left};", n)


def make_wgmma_fence(n: int) -> Any:
    """wgmma.fence with the n elements of the accumulator tile as operands."""
    return tile_op("wgmma_fence_tile", "wgmma.fence.sync.aligned;", n)


def make_pin(n: int, kind: str = "f") -> Any:
    """Emits nothing; every element of the tile is final before this point. Without it ptxas may
    report C7513 (wgmma serialised)."""
    return tile_op("pin", "// pin", n, kind=kind)


# ---- order -------------------------------------------------------------------------------------
# ptxas hoists wgmma.wait_group to the top of its block, and the arithmetic that should run under
# the products then runs after them. It does not move a wait over a store to shared memory, so a
# store that never happens, but depends on the arithmetic, keeps the order.
# settle(value, shared address): value >= 0 is final before a later wait.
settle = asm_op(
    "settle",
    "{.reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p st.shared.f32 [$1], $0;}",
    "",
    "fr",
    **_STORE,
)


def make_settle(n: int) -> Any:
    """settle(tile, shared address) for n elements, none negative: n / 2 instructions."""
    steps = "".join(f"lop3.b32 t, t, ${i}, ${i + 1}, 0xfe; " for i in range(0, n, 2))
    template = (
        "{.reg .pred p; .reg .b32 t; mov.b32 t, 0; "
        f"{steps}setp.lt.s32 p, t, 0; @p st.shared.b32 [${2 * n}], t;}}"
    )
    return tile_op("settle", template, n, "r")
