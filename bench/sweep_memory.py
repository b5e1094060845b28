"""Times variants of the memory-bound kernels: python -m bench.sweep_memory [--compile] [KERNEL ...]

Each variant: 15 single launches after 3 warm-ups between CUDA events, L2 cold. `dirty`: a buffer
larger than L2 was written before (its lines are written back while the kernel runs); `clean`: one
was read. Percent: of the copy kernel over 1 GiB with the same treatment. JSON lines.
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from llmq_nb.core import device as core
from llmq_nb.kernels import (
    adamw, bias, column_sum, elementwise, embedding, qk_norm, rmsnorm_backward, rope, transpose,
)  # fmt: skip
from llmq_nb.kernels.compile import Options, compile_kernel
from llmq_nb.kernels.launch import cdiv, kernel

BF16 = ml_dtypes.bfloat16
RUNS, WARM_UPS = 15, 3
FLUSH = 256 << 20


@dataclass
class Spec:
    """One kernel to compile and how its arguments come from a context's buffers."""

    factory: Callable[..., Any]
    constants: dict[str, Any]
    signature: tuple[Any, ...]
    threads: int
    grid: tuple[int, ...]
    args: Callable[[Any], tuple[Any, ...]]
    min_blocks: int = 0
    smem: int = 0

    @property
    def options(self) -> Options:
        return Options(min_blocks=self.min_blocks)


@dataclass
class Variant:
    kernel: str
    case: str
    label: str
    specs: list[Spec]
    bytes: int
    buffers: dict[str, Any] = field(default_factory=dict)


def sum_spec(groups: int, columns: int) -> Spec:
    return Spec(
        column_sum.make_column_sum, {"partials": groups, "accumulate": True, "dtype": "bf16"},
        column_sum.SIGNATURE, column_sum.CELLS, (cdiv(columns, column_sum.COLUMNS),),
        lambda b: (b["out1"], b["out2"], b["scratch"], columns, columns, columns),
    )  # fmt: skip


def rmsnorm_variants() -> list[Variant]:
    out = []
    table = {
        (32768, 896): [(128, 2, 3, 512, 4), (128, 2, 4, 512, 4), (128, 2, 2, 512, 4), (128, 2, 4, 384, 0), (128, 2, 4, 256, 0), (64, 1, 4, 512, 0)],
        (32768, 1536): [(192, 1, 4, 512, 0), (96, 1, 4, 512, 0), (192, 1, 4, 384, 0), (192, 1, 3, 512, 0)],
        (16384, 2048): [(256, 1, 4, 512, 4), (128, 1, 4, 512, 4), (128, 1, 3, 512, 5), (256, 1, 3, 512, 4), (256, 1, 2, 512, 4), (256, 1, 4, 384, 3)],
        (32768, 2048): [(256, 1, 4, 512, 4), (128, 1, 4, 512, 4), (256, 1, 3, 384, 3)],
        (16384, 2560): [(320, 1, 4, 256, 2), (320, 1, 3, 384, 3), (160, 1, 3, 512, 0)],
        (16384, 3584): [(448, 1, 4, 256, 2), (448, 1, 3, 256, 2), (224, 1, 4, 256, 2)],
        (8192, 4096): [(512, 1, 4, 256, 2), (256, 1, 4, 256, 2), (512, 1, 3, 256, 2)],
        (8192, 5120): [(640, 1, 3, 128, 0), (320, 1, 3, 256, 2), (320, 1, 2, 256, 2), (320, 1, 3, 128, 0)],
        (8192, 8192): [(512, 1, 2, 256, 0), (1024, 1, 2, 128, 1), (512, 1, 2, 128, 0)],
    }  # fmt: skip
    for (N, C), tiles in table.items():
        for i, (threads, rows, stages, groups, low) in enumerate(tiles):
            tile = rmsnorm_backward.Tile(threads, rows, stages, groups)
            one = Spec(
                rmsnorm_backward.make_rmsnorm_backward,
                {"C": C, "residual": True, "absmax": True, "dtype": "bf16", **tile.constants()},
                rmsnorm_backward.SIGNATURE, threads, (groups,),
                lambda b, N=N: (b["dx"], b["scratch"], b["slot"], b["dy"], b["d"], b["x"], b["w"],
                                b["rstd"], N),
                low, tile.smem(3, C, 2),
            )  # fmt: skip
            buffers = {
                "dx": (N * C, BF16), "dy": (N * C, BF16), "d": (N * C, BF16), "x": (N * C, BF16),
                "w": (C, BF16), "rstd": (N, np.float32), "slot": 4, "scratch": 4 * 1024 * C,
                "out1": 4 * C, "out2": 4 * C,
            }  # fmt: skip
            nbytes = rmsnorm_backward.rmsnorm_backward_bytes(N, C)
            label = f"threads={threads} rows={rows} stages={stages} groups={groups} min={low}"
            two = sum_spec(groups, C)
            out.append(Variant("rmsnorm_backward", f"N={N} C={C}", label, [one, two], nbytes, buffers))
            if i == 0:
                out.append(Variant("rmsnorm_backward", f"N={N} C={C}", "stage one alone", [one], nbytes, buffers))
                out.append(Variant("rmsnorm_backward", f"N={N} C={C}", "stage two alone", [two], nbytes, buffers))
    return out


def adamw_variants() -> list[Variant]:
    size = {"fp32": 4, "bf16": 2, "e4m3": 1}
    out, n = [], 1 << 26
    for master, m, v, grad, copy, absmax in [
        ("bf16", "bf16", "bf16", "bf16", False, False), ("bf16", "bf16", "bf16", "bf16", False, True),
        ("bf16", "fp32", "fp32", "bf16", False, False), ("bf16", "fp32", "fp32", "bf16", False, True),
        ("fp32", "fp32", "fp32", "bf16", True, False), ("bf16", "e4m3", "bf16", "bf16", False, False),
        ("bf16", "e4m3", "bf16", "bf16", False, True),
    ]:  # fmt: skip
        for threads, low in [(128, 8), (64, 16)]:
            spec = Spec(
                adamw.make_adamw,
                {"master": master, "m": m, "v": v, "grad": grad, "copy": copy, "absmax": absmax,
                 "block": threads},
                adamw.SIGNATURE, threads, (cdiv(n, 8 * threads),),
                lambda b, copy=copy, absmax=absmax: (
                    b["p"], b["w"] if copy else 0, b["m"], b["v"], b["g"], b["m_scale"],
                    b["slot"] if absmax else 0, b["scalars"], b["total"], n, 0, 0.9, 0.1, 0.95,
                    0.05, 1e-8, 0.1, 1, 2,
                ), low,
            )  # fmt: skip
            kinds = {"fp32": np.float32, "bf16": BF16}
            floats = np.array([1e-5, 0.0, 0.3, 0.1], np.float32).view(np.uint32).tolist()
            buffers = {
                "p": (n, kinds[master], 0.02), "w": 2 * n, "m": n if m == "e4m3" else (n, kinds[m], 1e-4),
                "v": np.full(1 << 20, 1e-8, kinds[v]), "v_repeat": n >> 20, "g": (n, kinds[grad], 1e-4),
                "m_scale": (n // 128, np.float32, 1e-6), "slot": 4,
                "scalars": np.array([*floats, 5], np.uint32), "total": np.ones(3, np.float32),
            }  # fmt: skip
            nbytes = adamw.adamw_bytes(
                n, master=size[master], m=size[m] + (4 / 128 if m == "e4m3" else 0), v=size[v],
                grad=size[grad], copy=copy,
            )  # fmt: skip
            case = f"{master} {m} {v} {grad} copy={copy} absmax={absmax}"
            out.append(Variant("adamw", case, f"threads={threads} min={low}", [spec], nbytes, buffers))
    return out


def bias_variants() -> list[Variant]:
    out = []
    for N, M in [(32768, 1152), (32768, 2048), (16384, 4608)]:
        for i, (groups, threads, unroll) in enumerate(
            [(128, 256, 4), (64, 256, 8), (96, 256, 8)]
        ):  # fmt: skip
            one = Spec(
                bias.make_bias_backward,
                {"partials": groups, "dtype": "bf16", "block": threads, "unroll": unroll},
                bias.SIGNATURE, threads, (cdiv(M, 256), groups),
                lambda b, N=N, M=M: (b["scratch"], b["dy"], N, M),
            )  # fmt: skip
            buffers = {"dy": (N * M, BF16), "scratch": 1024 * M * 4, "out1": 4 * M, "out2": 4 * M}
            label, nbytes = f"groups={groups} threads={threads} unroll={unroll}", bias.bias_backward_bytes(N, M)
            two = sum_spec(groups, M)
            out.append(Variant("bias_backward", f"N={N} M={M}", label, [one, two], nbytes, buffers))
            if i == 0:
                out.append(Variant("bias_backward", f"N={N} M={M}", "stage one alone", [one], nbytes, buffers))
                out.append(Variant("bias_backward", f"N={N} M={M}", "stage two alone", [two], nbytes, buffers))
    return out


def qk_norm_variants() -> list[Variant]:
    out = []
    for N, H, G, D in [(32768, 16, 8, 128), (16384, 32, 8, 128)]:
        pieces, heads = N * (H + 2 * G) * D // 8, N * (H + 2 * G) * D
        buffers = {
            "dqkv": (heads, BF16), "dheads": (heads, BF16), "qkv": (heads, BF16), "q": (D, BF16),
            "k": (D, BF16), "rstd": (N * (H + G), np.float32), "scratch": 1024 * 2 * D * 4,
            "slot": 4, "out1": 4 * D, "out2": 4 * D,
        }  # fmt: skip
        for unroll, threads, low in [(2, 256, 0)]:
            spec = Spec(
                qk_norm.make_qk_norm_forward,
                {"H": H, "G": G, "D": D, "dtype": "bf16"},
                qk_norm.FORWARD_SIGNATURE, threads, (cdiv(pieces, threads * unroll),),
                lambda b, pieces=pieces: (b["dqkv"], b["rstd"], b["qkv"], b["q"], b["k"], pieces, 1e-6), low,
            )  # fmt: skip
            nbytes = qk_norm.qk_norm_forward_bytes(N, H, G, D)
            out.append(Variant("qk_norm_forward", f"N={N} H={H} G={G} D={D}", f"unroll={unroll} min={low}", [spec], nbytes, buffers))
        for i, (groups, pair, low) in enumerate([(512, 1, 4), (640, 1, 5), (384, 1, 3)]):
            one = Spec(
                qk_norm.make_qk_norm_backward,
                {"H": H, "G": G, "D": D, "blocks": groups, "absmax": True, "dtype": "bf16"},
                qk_norm.BACKWARD_SIGNATURE, 256, (groups,),
                lambda b, pieces=pieces: (b["dqkv"], b["scratch"], b["slot"], b["dheads"], b["qkv"], b["q"], b["k"], b["rstd"], pieces),
                low,
            )  # fmt: skip
            two = sum_spec(groups, 2 * D)
            nbytes = qk_norm.qk_norm_backward_bytes(N, H, G, D)
            case, label = f"N={N} H={H} G={G} D={D}", f"groups={groups} pair={pair} min={low}"
            out.append(Variant("qk_norm_backward", case, label, [one, two], nbytes, buffers))
            if i == 0:
                out.append(Variant("qk_norm_backward", case, "stage one alone", [one], nbytes, buffers))
    return out


def rope_variants() -> list[Variant]:
    out = []
    for B, T, H, G, D in [(32, 1024, 14, 2, 64), (32, 1024, 12, 2, 128), (8, 4096, 28, 4, 128)]:
        N = B * T
        for threads, heads, low in [(128, 2, 0), (128, 2, 10)]:
            spec = Spec(
                rope.make_rope,
                {"H": H, "G": G, "D": D, "backward": False, "dtype": "bf16", "block": threads, "heads": heads},
                rope.SIGNATURE, threads, (cdiv(N * cdiv(H + G, heads) * D // 16, threads),),
                lambda b, N=N, T=T: (b["qkv"], b["cos"], b["sin"], b["start"], N, T), low,
            )  # fmt: skip
            buffers = {
                "qkv": (N * (H + 2 * G) * D, BF16), "cos": (T * D // 2, np.float32),
                "sin": (T * D // 2, np.float32), "start": np.zeros(N, np.int32),
            }  # fmt: skip
            out.append(Variant("rope", f"B={B} T={T} H={H} G={G} D={D}", f"threads={threads} heads={heads} min={low}", [spec], rope.rope_bytes(N, H, G, D), buffers))
    return out


def transpose_variants() -> list[Variant]:
    out = []
    for R, C in [(32768, 896), (32768, 4864), (16384, 16384)]:
        for rows, columns, low in [(128, 128, 0)]:
            spec = Spec(
                transpose.make_transpose, {"rows": rows, "columns": columns}, transpose.SIGNATURE,
                256, (cdiv(C, columns), cdiv(R, rows)), lambda b, R=R, C=C: (b["y"], b["x"], R, C), low,
            )  # fmt: skip
            buffers = {"y": 2 * R * C, "x": (R * C, BF16)}
            out.append(Variant("transpose", f"R={R} C={C}", f"rows={rows} columns={columns} min={low}", [spec], transpose.transpose_bytes(R, C), buffers))
    return out


def zipf(N: int, V: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    weight = 1.0 / np.arange(1, V + 1)
    return rng.permutation(V)[rng.choice(V, N, p=weight / weight.sum())].astype(np.int32)


def embedding_variants() -> list[Variant]:
    out = []
    for N, C, V in [(32768, 896, 151936), (32768, 1536, 151936), (16384, 4096, 128256)]:
        for name, tokens in [("zipf", zipf(N, V)), ("same", np.full(N, 7, np.int32))]:
            order = np.argsort(tokens, kind="stable").astype(np.int32)
            distinct = np.unique(tokens).size
            buffers = {
                "table": (V * C, BF16), "x": (N * C, BF16), "t": tokens, "order": order,
                "scratch": embedding.embedding_backward_scratch(N, C),
            }  # fmt: skip
            case = f"N={N} C={C} V={V} {name}"
            for threads, unroll in [(256, 2)]:
                spec = Spec(
                    embedding.make_embedding_forward, {"C": C, "dtype": "bf16", "block": threads, "unroll": unroll},
                    embedding.FORWARD_SIGNATURE, threads, (cdiv(N * C // 8, threads * unroll),),
                    lambda b, N=N, V=V: (b["x"], b["t"], b["table"], N, V),
                )  # fmt: skip
                nbytes = embedding.embedding_forward_bytes(N, C) - 2 * C * (N - distinct)
                if name == "zipf":
                    out.append(Variant("embedding_forward", case, f"threads={threads} unroll={unroll}", [spec], nbytes, buffers))
            for accumulate in (True, False):
                for low, ring in enumerate([(128, 4, 2), (128, 4, 4), (256, 4, 2), (64, 4, 4), (128, 3, 2), (128, 4, 1)]):
                    ring = dict(zip(("block", "stages", "rows"), ring, strict=True))
                    groups = cdiv(C, embedding.WARP_COLUMNS)
                    grid = (cdiv(N, ring["block"]), groups)  # a segment is as long as a warp wide
                    one = Spec(
                        embedding.make_embedding_backward,
                        {"C": C, "accumulate": accumulate, "dtype": "bf16", "grad_dtype": "bf16", **ring},
                        embedding.BACKWARD_SIGNATURE, ring["block"], grid,
                        lambda b, N=N, V=V: (b["table"], b["scratch"], b["x"], b["t"], b["order"], N, V), 0,
                        embedding.ring_bytes(accumulate, "bf16", "bf16", **ring),
                    )  # fmt: skip
                    two = Spec(
                        embedding.make_embedding_join, {"C": C, "accumulate": accumulate, "grad_dtype": "bf16"},
                        embedding.JOIN_SIGNATURE, 256, (cdiv(N, 256), groups),
                        lambda b, N=N, V=V: (b["table"], b["scratch"], b["t"], b["order"], N, V),
                    )  # fmt: skip
                    clear = Spec(
                        embedding.make_embedding_clear, {}, embedding.CLEAR_SIGNATURE, 256,
                        (cdiv(V * C // 8, 1024),), lambda b, V=V, C=C: (b["table"], V * C // 8),
                    )  # fmt: skip
                    nbytes = embedding.embedding_backward_bytes(N, C, V, distinct=distinct, accumulate=accumulate)
                    label = str(ring)
                    specs = [one, two] if accumulate else [clear, one, two]
                    out.append(Variant("embedding_backward", f"{case} accumulate={accumulate}", label, specs, nbytes, buffers))
                    if low == 0:
                        out.append(Variant("embedding_backward", f"{case} accumulate={accumulate}", "stage one alone", [one], nbytes, buffers))
    return out


def copy_variants() -> list[Variant]:
    out = []
    for mib in (1024, 16, 32, 64, 128, 256):
        chunks = mib << 16
        spec = Spec(
            elementwise.make_copy, {}, elementwise.COPY_SIGNATURE, 256, (cdiv(chunks, 1024),),
            lambda b, chunks=chunks: (b["y"], b["x"], chunks),
        )  # fmt: skip
        out.append(Variant("copy", f"MiB={mib} read, as much written", "", [spec], 2 * chunks * 16, {"x": mib << 20, "y": mib << 20}))
    for mib in (32, 64, 128):  # read alone: absmax
        pieces = mib << 16
        spec = Spec(
            elementwise.make_absmax, {"dtype": "bf16"}, elementwise.COPY_SIGNATURE, 256,
            (min(2048, cdiv(pieces, 1024)),), lambda b, pieces=pieces: (b["slot"], b["x"], pieces),
        )  # fmt: skip
        out.append(Variant("absmax", f"MiB={mib} read", "", [spec], pieces * 16, {"x": (mib << 19, BF16), "slot": 4}))
    return out


FAMILIES = {
    "copy": copy_variants, "rmsnorm": rmsnorm_variants, "adamw": adamw_variants,
    "bias": bias_variants, "qk_norm": qk_norm_variants, "rope": rope_variants,
    "transpose": transpose_variants, "embedding": embedding_variants,
}  # fmt: skip


def compile_one(job: tuple[str, int, int]) -> str:
    """In a worker: one kernel into the disk cache; what failed, or nothing."""
    family, i, j = job
    spec = FAMILIES[family]()[i].specs[j]
    try:
        compiled = compile_kernel(
            spec.factory(**spec.constants), spec.signature, spec.threads, (9, 0), spec.options
        )
        r = compiled.resources
        return f"{spec.factory.__name__} {spec.constants} min={spec.min_blocks}: {r.registers} registers, {r.stack_bytes} stack"
    except Exception as error:
        return f"FAILED {spec.factory.__name__} {spec.constants}: {error}"


def compile_all(families: list[str]) -> None:
    seen, jobs = set(), []
    for family in families:
        for i, variant in enumerate(FAMILIES[family]()):
            for j, spec in enumerate(variant.specs):
                key = (spec.factory, spec.threads, spec.min_blocks, *sorted(spec.constants.items()))
                if key not in seen:
                    seen.add(key)
                    jobs.append((family, i, j))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(compile_one, jobs):
            print(line, file=sys.stderr)


class Sweep:
    def __init__(self) -> None:
        self.device = core.open_device(0)
        self.stream = core.create_stream()
        self.events = core.create_event(timing=True), core.create_event(timing=True)
        self.flush, self.read, self.slot = (core.allocate(n) for n in (FLUSH, FLUSH, 4))
        core.check(core.driver().cuMemsetD8(self.read, 0, FLUSH), "clear")
        self.copy: dict[str, float] = {}
        self.pair, self.equals = (core.allocate(1 << 30), core.allocate(1 << 30)), {}
        self.held: dict[str, tuple[Any, int]] = {}

    def buffer(self, name: str, what: Any) -> int:
        """Memory of one buffer; kept for the next variant if that asks for the same."""
        if isinstance(what, np.ndarray):
            key: Any = (what.shape, str(what.dtype), hash(what.tobytes()))
        else:
            key = str(what)
        if name in self.held:
            if self.held[name][0] == key:
                return self.held[name][1]
            core.free(self.held.pop(name)[1])
        d = core.driver()
        if isinstance(what, np.ndarray):
            host, nbytes = np.ascontiguousarray(what), what.nbytes
        elif isinstance(what, tuple):
            size, dtype, scale = (*what, 1.0)[:3]
            values = np.random.default_rng(1).standard_normal(min(size, 1 << 20)) * scale
            host, nbytes = values.astype(dtype), size * np.dtype(dtype).itemsize
        else:
            host, nbytes = np.zeros(min(what, 1 << 20), np.uint8), what
        address = core.allocate(nbytes)
        filled = min(host.nbytes, nbytes)
        core.check(d.cuMemcpyHtoD(address, host.ctypes.data, filled), "upload")
        while filled < nbytes:
            step = min(filled, nbytes - filled)
            core.check(d.cuMemcpyDtoD(address + filled, address, step), "repeat")
            filled += step
        self.held[name] = (key, address)
        return address

    def time(self, launch: Callable[[], None], mode: str) -> np.ndarray:
        core.synchronize_stream(0)
        times = []
        for _ in range(WARM_UPS + RUNS):
            if mode == "dirty":
                core.check(core.driver().cuMemsetD8Async(self.flush, 0, FLUSH, self.stream), "flush")
            else:
                elementwise.absmax_launch(self.slot, self.read, n=FLUSH // 2, stream=self.stream)
            core.record_event(self.events[0], self.stream)
            launch()
            core.record_event(self.events[1], self.stream)
            times.append(core.elapsed_seconds(*self.events))
        return np.array(times[WARM_UPS:])

    def equal(self, nbytes: int) -> float:
        """Seconds of a copy that reads and writes that much together."""
        half = min(nbytes // 32 * 16, 1 << 30)
        if half not in self.equals:
            self.equals[half] = float(np.median(self.time(
                lambda: elementwise.copy_launch(self.pair[0], self.pair[1], nbytes=half, stream=self.stream), "dirty"
            )))  # fmt: skip
        return self.equals[half]

    def run(self, variant: Variant) -> None:
        whats = dict(variant.buffers)
        if "v_repeat" in whats:
            whats["v"] = np.tile(whats["v"], 1)
            repeat = whats.pop("v_repeat")
            whats["v"] = (repeat << 20, whats["v"].dtype, "constant")
        b = {}
        for name, what in whats.items():
            if isinstance(what, tuple) and what[-1] == "constant":
                b[name] = self.constant(name, what)
            else:
                b[name] = self.buffer(name, what)
        calls = [
            (
                kernel(s.factory, s.signature, threads=s.threads, smem=s.smem, options=s.options, **s.constants),
                s.grid, s.args(b),
            )
            for s in variant.specs
        ]  # fmt: skip

        def launch() -> None:
            for k, grid, args in calls:
                k(self.stream, grid, *args)

        line = {"kernel": variant.kernel, "case": variant.case, "variant": variant.label}
        for mode in ("dirty", "clean"):
            times = self.time(launch, mode)
            rate = variant.bytes / float(np.median(times))
            if variant.kernel == "copy" and mode not in self.copy:
                self.copy[mode] = rate
            if mode == "dirty" and variant.kernel != "copy":
                line["equal_copy"] = round(self.equal(variant.bytes) / float(np.median(times)) * 100, 1)
            line |= {
                f"{mode}_us": round(1e6 * float(np.median(times)), 2),
                f"{mode}_best_us": round(1e6 * float(times.min()), 2),
                f"{mode}_gbs": round(rate / 1e9, 1),
                f"{mode}_percent": round(100 * rate / self.copy[mode], 1),
            }
        print(json.dumps(line), flush=True)

    def constant(self, name: str, what: Any) -> int:
        size, dtype, _ = what
        key = str(what)
        if name in self.held and self.held[name][0] == key:
            return self.held[name][1]
        if name in self.held:
            core.free(self.held.pop(name)[1])
        address = core.allocate(size * dtype.itemsize)
        word = np.full(2, 1e-8, dtype).view(np.uint8)[: dtype.itemsize]
        d = core.driver()
        if dtype.itemsize == 4:
            core.check(d.cuMemsetD32(address, int(word.view(np.uint32)[0]), size), "fill")
        else:
            core.check(d.cuMemsetD16(address, int(word.view(np.uint16)[0]), size), "fill")
        self.held[name] = (key, address)
        return address


def main() -> None:
    chosen = [a for a in sys.argv[1:] if not a.startswith("-")] or list(FAMILIES)
    if "--compile" in sys.argv:
        compile_all(chosen)
        return
    sweep = Sweep()
    for family in dict.fromkeys(["copy", *chosen]):
        for variant in FAMILIES[family]():
            try:
                sweep.run(variant)
            except Exception as error:
                print(json.dumps({"kernel": variant.kernel, "case": variant.case, "variant": variant.label, "error": str(error)[:300]}), flush=True)


if __name__ == "__main__":
    main()
