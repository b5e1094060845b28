"""Inline-PTX instruction set: one Python name for each machine instruction that the kernels use.

`asm_op` turns one PTX template into a device function, `tile_op` into one whose operands are the
elements of a `cuda.local.array`. This file is the only user of Numba's extension API; ptx_hopper.py
adds the sm_90 instructions through the same two functions. When NUMBA_ENABLE_CUDASIM=1 every name
is its Python stand-in of the same name in sim_ops.py instead (calling one that has none is an
error).

Operands  LLVM inline-asm numbers: outputs first ($0, $1, ...), then inputs. One letter each:
          h = 16-bit, r = 32-bit, l = 64-bit integer, f = float32. Arguments are cast to these
          types, so 64-bit index arithmetic truncates to the 32 bits of a shared address.
Addresses Global: 64-bit integers. Shared: 32-bit integers from `smem_addr`.
Results   Several outputs are a tuple, one is a scalar, none is None. Stores of four words take one
          tuple.
Order     `side` marks the instruction volatile (never dropped, never moved over another volatile
          one), `memory` adds a memory clobber. Arithmetic has neither, so that NVVM can move and
          merge it.
Rounding  Kernels compile with fast math; what must round like IEEE (quantisation, stochastic
          rounding) uses `mul_rn`, `add_rn`, `div_rn`, `ffma`, which neither flush subnormals nor
          approximate.
Targets   Everything here runs on sm_80 and later but the FP8 conversions and FP8 mma: sm_89 and
          later.
Source    PTX ISA 9.0. Speeds of the access forms: bench/README.md.
"""

import os
from typing import Any

from llvmlite import ir
from numba.cuda import types

from llmq_nb.kernels import sim_ops

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"
"""True in the CUDA simulator, where every instruction is a Python function."""

intrinsic: Any = None
if not SIMULATED:
    from numba.cuda.extending import intrinsic

_NUMBA = {"h": types.uint16, "r": types.uint32, "l": types.uint64, "f": types.float32}
_LLVM: dict[str, Any] = {
    "h": ir.IntType(16), "r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType()
}  # fmt: skip


def _tuple_type(letters: str) -> Any:
    """Numba type of a value made of these operands."""
    parts = [_NUMBA[c] for c in letters]
    if len(parts) == 1:
        return parts[0]
    return types.UniTuple(parts[0], len(parts)) if len(set(parts)) == 1 else types.Tuple(parts)


def _flatten(builder: Any, kind: Any, value: Any) -> list[Any]:
    """Scalars of a scalar or tuple argument, in order."""
    if not isinstance(kind, (types.UniTuple, types.Tuple)):
        return [value]
    parts = enumerate(kind.types)
    return [s for i, t in parts for s in _flatten(builder, t, builder.extract_value(value, i))]


def _with_arity(
    names: list[str], argument_types: tuple[Any, ...], result: Any, codegen: Any
) -> Any:
    """An intrinsic with these named arguments (Numba folds *args of an intrinsic into one
    tuple)."""
    # An argument type of None takes whatever type the caller has (tiles).
    terms = [
        n if t is None else f"types_[{i}]"
        for i, (n, t) in enumerate(zip(names, argument_types, strict=True))
    ]
    scope = {"types_": argument_types, "result": result, "codegen": codegen}
    head = f"def op({', '.join(['context', *names])}):"
    exec(f"{head}\n    return result({', '.join(terms)}), codegen", scope)
    return intrinsic(scope["op"])


def asm_op(
    name: str,
    template: str,
    outs: str = "",
    ins: str = "",
    *,
    side: bool = False,
    memory: bool = False,
    groups: tuple[int, ...] | None = None,
    tied: int = 0,
) -> Any:
    """A device function that is one PTX template.

    name: of the stand-in in sim_ops.py. groups: how the inputs make up arguments, e.g. ins="lrrrr",
    groups=(1, 4) takes an address and a tuple; default one argument each. tied: that many first
    inputs share their registers with the first outputs.
    """
    if SIMULATED:
        return sim_ops.stand_in(name)
    groups = groups or (1,) * len(ins)
    starts = [sum(groups[:i]) for i in range(len(groups))]
    argument_types = tuple(_tuple_type(ins[s : s + g]) for s, g in zip(starts, groups, strict=True))
    constraints = ["=" + c for c in outs] + [str(i) if i < tied else c for i, c in enumerate(ins)]
    constraints += ["~{memory}"] * memory
    llvm_outs = [_LLVM[c] for c in outs]
    returned = (
        ir.LiteralStructType(llvm_outs) if len(outs) > 1 else (llvm_outs or [ir.VoidType()])[0]
    )
    function_type = ir.FunctionType(returned, [_LLVM[c] for c in ins])
    result = _tuple_type(outs) if outs else types.void

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        operands = [
            s for t, v in zip(signature.args, args, strict=True) for s in _flatten(builder, t, v)
        ]
        asm = ir.InlineAsm(function_type, template, ",".join(constraints), side_effect=side)
        value = builder.call(asm, operands)
        if len(outs) < 2:
            return value if outs else context.get_dummy_value()
        return context.make_tuple(
            builder, result, [builder.extract_value(value, i) for i in range(len(outs))]
        )

    return _with_arity([f"a{i}" for i in range(len(groups))], argument_types, result, codegen)


def tile_op(
    name: str, template: str, n: int, ins: str = "", *, fragments: int = 0, kind: str = "f"
) -> Any:
    """A device function whose n operands are the elements of a local array, read and written in
    place.

    Every register of the tile is a data dependence, so nothing that uses the tile moves over the
    call. With `fragments`, that many uint32 operands come from a second local array at an element
    offset: op(tile, fragment_array, offset, *ins); without: op(tile, *ins).
    """
    if SIMULATED:
        return sim_ops.stand_in(name)
    scalar, i32, i64 = _LLVM[kind], ir.IntType(32), ir.IntType(64)
    inputs = [scalar] * n + [i32] * fragments + [_LLVM[c] for c in ins]
    function_type = ir.FunctionType(ir.LiteralStructType([scalar] * n), inputs)
    constraints = (
        ["=" + kind] * n + [str(i) for i in range(n)] + ["r"] * fragments + [*ins, "~{memory}"]
    )

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def data(k: int) -> Any:
            return context.make_array(signature.args[k])(context, builder, value=args[k]).data

        tile = [builder.gep(data(0), [i64(i)]) for i in range(n)]
        operands = [builder.load(p) for p in tile]
        for i in range(fragments):
            operands.append(builder.load(builder.gep(data(1), [builder.add(args[2], i64(i))])))
        asm = ir.InlineAsm(function_type, template, ",".join(constraints), side_effect=True)
        value = builder.call(asm, operands + list(args[3 if fragments else 1 :]))
        for i, p in enumerate(tile):
            builder.store(builder.extract_value(value, i), p)
        return context.get_dummy_value()

    names = (
        ["tile"]
        + ["fragment_array", "offset"] * bool(fragments)
        + [f"a{i}" for i in range(len(ins))]
    )
    tiles = (None, None, types.int64) if fragments else (None,)
    return _with_arity(names, tiles + tuple(_NUMBA[c] for c in ins), types.void, codegen)


# ---- global memory -----------------------------------------------------------------------------
# ldgN / stgN: N bits. Suffix f: float32 instead of integer. _nc: through the read-only path, may be
# moved (only for data that no kernel in flight writes). _cs: streaming, evicted first.
ldg128 = asm_op("ldg128", "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "l", side=True)
ldg128_nc = asm_op("ldg128", "ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "l")
ldg128_cs = asm_op("ldg128", "ld.global.cs.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "l", side=True)
ldg128f = asm_op("ldg128f", "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "l", side=True)
ldg128f_nc = asm_op("ldg128f", "ld.global.nc.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "l")
ldg128f_cs = asm_op("ldg128f", "ld.global.cs.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "l", side=True)
ldg64 = asm_op("ldg64", "ld.global.v2.b32 {$0,$1}, [$2];", "rr", "l", side=True)
ldg64_nc = asm_op("ldg64", "ld.global.nc.v2.b32 {$0,$1}, [$2];", "rr", "l")
ldg64f_nc = asm_op("ldg64f", "ld.global.nc.v2.f32 {$0,$1}, [$2];", "ff", "l")
ldg32 = asm_op("ldg32", "ld.global.b32 $0, [$1];", "r", "l", side=True)
ldg32_nc = asm_op("ldg32", "ld.global.nc.b32 $0, [$1];", "r", "l")
ldg32f = asm_op("ldg32f", "ld.global.f32 $0, [$1];", "f", "l", side=True)
ldg32f_nc = asm_op("ldg32f", "ld.global.nc.f32 $0, [$1];", "f", "l")
ldg16 = asm_op("ldg16", "ld.global.u16 $0, [$1];", "r", "l", side=True)
ldg8 = asm_op("ldg8", "ld.global.u8 $0, [$1];", "r", "l", side=True)

_STORE: dict[str, Any] = {"side": True, "memory": True}
stg128 = asm_op(
    "stg128", "st.global.v4.b32 [$0], {$1,$2,$3,$4};", "", "lrrrr", groups=(1, 4), **_STORE
)
stg128_cs = asm_op(
    "stg128", "st.global.cs.v4.b32 [$0], {$1,$2,$3,$4};", "", "lrrrr", groups=(1, 4), **_STORE
)
stg128f = asm_op(
    "stg128f", "st.global.v4.f32 [$0], {$1,$2,$3,$4};", "", "lffff", groups=(1, 4), **_STORE
)
stg128f_cs = asm_op(
    "stg128f", "st.global.cs.v4.f32 [$0], {$1,$2,$3,$4};", "", "lffff", groups=(1, 4), **_STORE
)
stg64 = asm_op("stg64", "st.global.v2.b32 [$0], {$1,$2};", "", "lrr", **_STORE)
stg32 = asm_op("stg32", "st.global.b32 [$0], $1;", "", "lr", **_STORE)
stg32f = asm_op("stg32f", "st.global.f32 [$0], $1;", "", "lf", **_STORE)
stg16 = asm_op("stg16", "st.global.b16 [$0], $1;", "", "lr", **_STORE)
stg8 = asm_op("stg8", "st.global.b8 [$0], $1;", "", "lr", **_STORE)
# max of the uint32 in memory (of non-negative float32 bits: their max), exact in any order
red_max_g = asm_op("red_max_g", "red.global.max.u32 [$0], $1;", "", "lr", **_STORE)
# integer sums: exact in any order, unlike float ones, which no kernel makes
red_add_g = asm_op("red_add_g", "red.global.add.u32 [$0], $1;", "", "lr", **_STORE)
# returns the uint32 in memory and adds 1, or makes it 0 where it was $2 (or more)
atom_inc_g = asm_op("atom_inc_g", "atom.global.inc.u32 $0, [$1], $2;", "r", "lr", **_STORE)

# ---- shared memory -----------------------------------------------------------------------------
lds128 = asm_op("lds128", "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "r", side=True)
lds64 = asm_op("lds64", "ld.shared.v2.b32 {$0,$1}, [$2];", "rr", "r", side=True)
lds64f = asm_op("lds64f", "ld.shared.v2.f32 {$0,$1}, [$2];", "ff", "r", side=True)
lds32 = asm_op("lds32", "ld.shared.b32 $0, [$1];", "r", "r", side=True)
lds32f = asm_op("lds32f", "ld.shared.f32 $0, [$1];", "f", "r", side=True)
lds16 = asm_op("lds16", "ld.shared.u16 $0, [$1];", "r", "r", side=True)
sts128 = asm_op(
    "sts128", "st.shared.v4.b32 [$0], {$1,$2,$3,$4};", "", "rrrrr", groups=(1, 4), **_STORE
)
sts64 = asm_op("sts64", "st.shared.v2.b32 [$0], {$1,$2};", "", "rrr", **_STORE)
sts64f = asm_op("sts64f", "st.shared.v2.f32 [$0], {$1,$2};", "", "rff", **_STORE)
sts32 = asm_op("sts32", "st.shared.b32 [$0], $1;", "", "rr", **_STORE)
sts32f = asm_op("sts32f", "st.shared.f32 [$0], $1;", "", "rf", **_STORE)
sts16 = asm_op("sts16", "st.shared.b16 [$0], $1;", "", "rr", **_STORE)

# ---- asynchronous copies, global to shared -----------------------------------------------------
cp16 = asm_op("cp16", "cp.async.cg.shared.global [$0], [$1], 16;", "", "rl", **_STORE)
# third argument: source bytes, 0 or 16; the rest of the 16 is filled with zeros and not read
cp16z = asm_op("cp16z", "cp.async.cg.shared.global [$0], [$1], 16, $2;", "", "rlr", **_STORE)
cp4 = asm_op("cp4", "cp.async.ca.shared.global [$0], [$1], 4;", "", "rl", **_STORE)
cp_commit = asm_op("cp_commit", "cp.async.commit_group;", **_STORE)
cp_wait0 = asm_op(
    "cp_wait", "cp.async.wait_group 0;", **_STORE
)  # until at most 0 groups are in flight
cp_wait1 = asm_op("cp_wait", "cp.async.wait_group 1;", **_STORE)
cp_wait2 = asm_op("cp_wait", "cp.async.wait_group 2;", **_STORE)
cp_wait3 = asm_op("cp_wait", "cp.async.wait_group 3;", **_STORE)

# ---- conversions -------------------------------------------------------------------------------
bf16x2 = asm_op("bf16x2", "cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff")  # (low, high) -> packed
bf_lo = asm_op("bf_lo", "shl.b32 $0, $1, 16;", "f", "r")  # low bfloat16 of a pair, exact
bf_hi = asm_op("bf_hi", "and.b32 $0, $1, 0xffff0000;", "f", "r")  # high bfloat16 of a pair, exact
f2u = asm_op("f2u", "mov.b32 $0, $1;", "r", "f")  # float32 bits
u2f = asm_op("u2f", "mov.b32 $0, $1;", "f", "r")
u32_to_f32 = asm_op("u32_to_f32", "cvt.rn.f32.u32 $0, $1;", "f", "r")  # value, not bits
# FP8, saturating, first argument in the lowest byte: sm_89 and later (fp8.py has the software twin)
_FP8X4 = (
    "{{.reg .b16 a, b; cvt.rn.satfinite.{0}x2.f32 a, $2, $1; "
    "cvt.rn.satfinite.{0}x2.f32 b, $4, $3; mov.b32 $0, {{a, b}};}}"
)
_FP8X2_F32 = (
    "{{.reg .b32 t; .reg .b16 a, b; cvt.rn.f16x2.{0}x2 t, $2; "
    "mov.b32 {{a, b}}, t; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}}"
)
e4m3x4 = asm_op("e4m3x4", _FP8X4.format("e4m3"), "r", "ffff")
e5m2x4 = asm_op("e5m2x4", _FP8X4.format("e5m2"), "r", "ffff")
e4m3x2_f32 = asm_op("e4m3x2_f32", _FP8X2_F32.format("e4m3"), "ff", "h")  # two codes -> (low, high)
e5m2x2_f32 = asm_op("e5m2x2_f32", _FP8X2_F32.format("e5m2"), "ff", "h")

# ---- bits and packed bfloat16 ------------------------------------------------------------------
low32 = asm_op(
    "low32", "cvt.u32.u64 $0, $1;", "r", "l"
)  # np.uint32(x) is an error for large x when simulated
high32 = asm_op("high32", "{.reg .b32 t; mov.b64 {t, $0}, $1;}", "r", "l")
prmt = asm_op(
    "prmt", "prmt.b32 $0, $1, $2, $3;", "r", "rrr"
)  # byte i of the result: nibble i of $3
mulhi = asm_op("mulhi", "mul.hi.u32 $0, $1, $2;", "r", "rr")
mullo = asm_op("mullo", "mul.lo.u32 $0, $1, $2;", "r", "rr")
xor3 = asm_op("xor3", "lop3.b32 $0, $1, $2, $3, 0x96;", "r", "rrr")
fma2 = asm_op("fma2", "fma.rn.bf16x2 $0, $1, $2, $3;", "r", "rrr")
maxabs2 = (
    asm_op(  # (running maxima, packed pair): max.bf16x2 of the first and the second's magnitudes
        "maxabs2", "{.reg .b32 t; and.b32 t, $2, 0x7fff7fff; max.bf16x2 $0, $1, t;}", "r", "rr"
    )
)
# i + 1 that NVVM cannot see through: keeps a run-time loop rolled (it unrolls `range(n)` eight
# times)
inc = asm_op("inc", "add.u32 $0, $1, 1;", "r", "r", side=True)

# ---- float32 arithmetic ------------------------------------------------------------------------
ffma = asm_op("ffma", "fma.rn.f32 $0, $1, $2, $3;", "f", "fff")
fnma = asm_op(
    "fnma", "{.reg .f32 t; neg.f32 t, $1; fma.rn.f32 $0, t, $2, $3;}", "f", "fff"
)  # c - a b
mul_rn = asm_op("mul_rn", "mul.rn.f32 $0, $1, $2;", "f", "ff")
add_rn = asm_op("add_rn", "add.rn.f32 $0, $1, $2;", "f", "ff")
div_rn = asm_op("div_rn", "div.rn.f32 $0, $1, $2;", "f", "ff")
sqrt_rn = asm_op("sqrt_rn", "sqrt.rn.f32 $0, $1;", "f", "f")
fmax = asm_op("fmax", "max.f32 $0, $1, $2;", "f", "ff")  # the other one, if one is NaN
fmin = asm_op("fmin", "min.f32 $0, $1, $2;", "f", "ff")
# approximations, subnormals flushed; largest relative error (absolute for lg2 near 1, sin and cos)
ex2 = asm_op("ex2", "ex2.approx.ftz.f32 $0, $1;", "f", "f")  # 2 ulp
lg2 = asm_op("lg2", "lg2.approx.ftz.f32 $0, $1;", "f", "f")  # 2^-22
rcp = asm_op("rcp", "rcp.approx.ftz.f32 $0, $1;", "f", "f")  # 1 ulp
rsqrt = asm_op("rsqrt", "rsqrt.approx.ftz.f32 $0, $1;", "f", "f")  # 2^-22.9
sqrtf = asm_op("sqrtf", "sqrt.approx.ftz.f32 $0, $1;", "f", "f")  # 2^-23
sinf = asm_op("sinf", "sin.approx.ftz.f32 $0, $1;", "f", "f")  # 2^-20.5 in [-pi, pi]
cosf = asm_op("cosf", "cos.approx.ftz.f32 $0, $1;", "f", "f")  # 2^-20.5 in [-pi, pi]
tanhf = asm_op("tanhf", "tanh.approx.f32 $0, $1;", "f", "f")  # 2^-11
# selects (a ? b of int32, then the two float32 results): no branch a register tile could split on
_SELECT = "{{.reg .pred p; setp.{}.s32 p, $1, $2; selp.f32 $0, $3, $4, p;}}"
sel_gt = asm_op("sel_gt", _SELECT.format("gt"), "f", "rrff")
sel_ge = asm_op("sel_ge", _SELECT.format("ge"), "f", "rrff")
sel_eq = asm_op("sel_eq", _SELECT.format("eq"), "f", "rrff")

# ---- warps and blocks --------------------------------------------------------------------------
# All 32 lanes must reach each of these.
shfl_xor = asm_op(
    "shfl_xor", "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "r", "rr", side=True
)
shfl_xorf = asm_op(
    "shfl_xor", "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "f", "fr", side=True
)
shfl_idx = asm_op("shfl_idx", "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "r", "rr", side=True)
shfl_idxf = asm_op(
    "shfl_idx", "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "f", "fr", side=True
)
redux_max_u32 = asm_op(
    "redux_max_u32", "redux.sync.max.u32 $0, $1, 0xffffffff;", "r", "r", side=True
)
redux_min_u32 = asm_op(
    "redux_min_u32", "redux.sync.min.u32 $0, $1, 0xffffffff;", "r", "r", side=True
)
redux_add_u32 = asm_op(
    "redux_add_u32", "redux.sync.add.u32 $0, $1, 0xffffffff;", "r", "r", side=True
)
syncwarp = asm_op(
    "syncwarp", "bar.warp.sync 0xffffffff;", **_STORE
)  # not cuda.syncwarp: no stand-in
bar_sync = asm_op("bar_sync", "bar.sync $0, $1;", "", "rr", **_STORE)  # (barrier number, threads)

# ---- tensor cores ------------------------------------------------------------------------------
# c[16, 8] += a[16, k] b[8, k]^T, arguments (c0..c3, a0..a3, b0, b1), PTX fragment layouts
_MMA = (
    "mma.sync.aligned.m16n8k{1}.row.col.f32.{0}.{0}.f32 "
    "{{$0,$1,$2,$3}}, {{$8,$9,$10,$11}}, {{$12,$13}}, {{$4,$5,$6,$7}};"
)
mma_bf16 = asm_op("mma_bf16", _MMA.format("bf16", 16), "ffff", "ffffrrrrrr", tied=4)
mma_e4m3 = asm_op("mma_e4m3", _MMA.format("e4m3", 32), "ffff", "ffffrrrrrr", tied=4)  # sm_89
_LDSM = "ldmatrix.sync.aligned.m8n8.{}.shared.b16 "
ldsm4 = asm_op("ldsm4", _LDSM.format("x4") + "{$0,$1,$2,$3}, [$4];", "rrrr", "r", side=True)
ldsm4t = asm_op("ldsm4t", _LDSM.format("x4.trans") + "{$0,$1,$2,$3}, [$4];", "rrrr", "r", side=True)
ldsm2 = asm_op("ldsm2", _LDSM.format("x2") + "{$0,$1}, [$2];", "rr", "r", side=True)
ldsm2t = asm_op("ldsm2t", _LDSM.format("x2.trans") + "{$0,$1}, [$2];", "rr", "r", side=True)

# ---- addresses of arrays -----------------------------------------------------------------------
if SIMULATED:
    smem_addr, array_addr = sim_ops.smem_addr, sim_ops.array_addr
else:

    def _data_address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        return builder.ptrtoint(array.data, ir.IntType(64))

    @intrinsic
    def smem_addr(typing_context, array):
        """32-bit shared-window address of a (dynamic) shared array; dynamic ones are 1024-byte
        aligned as long as the kernel has no static one beside it."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)])
            template = "{.reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t;}"
            asm = ir.InlineAsm(kind, template, "=r,l")
            return builder.call(asm, [_data_address(context, builder, signature, args)])

        return types.uint32(array), codegen

    @intrinsic
    def array_addr(typing_context, array):
        """64-bit generic address of an array's first element."""
        return types.uint64(array), _data_address
