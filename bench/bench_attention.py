"""Attention forward and backward in TFLOP/s, causal (half the square counted): forward 2 B H T T D,
backward 5 B H T T D; beside PyTorch's flash and cuDNN backends where torch is installed.

    python -m bench.bench_attention [--case 1.5B/4096 ...] [--tiles [dkdv ...]] [--compile]

A figure is the median of RUNS replays of a CUDA graph of LAUNCHES launches, each divided by
LAUNCHES, ours and PyTorch's: no host path and no launch gap inside. The L2 cache is as the launch
before left it (a layer's kernels find their inputs there too). --tiles times every candidate of
those kernels (of all), and the backward with each dkdv; --compile first fills the kernel cache in
parallel processes. One JSON line a figure (bench.attention_table makes the README's table of them).
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.core import device as core
from llmq_nb.core.graph import capture
from llmq_nb.kernels import attention, attention_backward
from llmq_nb.kernels.attention import attention_backward_flops, attention_flops
from llmq_nb.kernels.attention_choice import KERNELS
from llmq_nb.kernels.attention_hopper_tiles import CC
from llmq_nb.kernels.attention_launch import (
    Tiles,
    candidates,
    default_tiles,
    launch_dkdv,
    launch_dq,
    launch_forward,
)
from llmq_nb.kernels.attention_tiles import AttentionShape, Problem
from llmq_nb.kernels.launch import preparing

LAUNCHES, WARM_UPS, RUNS = 10, 2, 9


@dataclass(frozen=True, slots=True)
class Case:
    B: int
    T: int
    H: int
    G: int
    D: int
    document: int = 0
    """Tokens of each document; 0: one document a sequence."""
    random: bool = False
    """Documents of that length on average, exponentially distributed."""

    def starts(self) -> np.ndarray:
        """segment_start (B, T)."""
        t = np.broadcast_to(np.arange(self.T), (self.B, self.T))
        if self.random:
            border = np.random.default_rng(0).random(t.shape) < 1 / self.document
            return np.maximum.accumulate(np.where(border, t, 0), axis=1).astype(np.int32)
        step = self.document or self.T
        return (t // step * step).astype(np.int32)


def cases() -> dict[str, Case]:
    """The shapes of issue 3 (heads of the 0.5B and 1.5B models), 12 key/value heads; documents of
    600 tokens, each or on average."""
    found: dict[str, Case] = {}
    for T in (1024, 2048, 4096):
        found[f"1.5B/{T}"] = Case(8, T, 12, 2, 128)
        found[f"0.5B/{T}"] = Case(8, T, 14, 2, 64)
        found[f"mha/{T}"] = Case(8, T, 12, 12, 128)
    found["1.5B/1024x32"] = Case(32, 1024, 12, 2, 128)
    found["0.5B/1024x32"] = Case(32, 1024, 14, 2, 64)
    found["1.5B/4096/documents"] = Case(8, 4096, 12, 2, 128, document=600)
    for name in ("1.5B/4096", "1.5B/1024x32", "0.5B/1024x32", "mha/4096"):
        found[f"{name}/random"] = replace(found[name], document=600, random=True)
    found["1.5B/4095"] = Case(8, 4095, 12, 2, 128)
    return found


class Ours:
    """One case's buffers, and the launches on them."""

    def __init__(self, bench: Bench, case: Case) -> None:
        B, T, H, G, D = case.B, case.T, case.H, case.G, case.D
        bf16 = ml_dtypes.bfloat16
        self.bench, self.case, self.kept = bench, case, len(bench.addresses)
        self.qkv = bench.random((B, T, H + 2 * G, D), bf16)
        self.dqkv = bench.empty(B * T * (H + 2 * G) * D * 2)
        self.dout = bench.random((B, T, H, D), bf16)
        self.out, self.lse = bench.empty(B * T * H * D * 2), bench.empty(B * H * T * 4)
        self.stats = bench.empty(attention.attention_scratch_bytes(B, T, H))
        stride = (H + 2 * G) * D * 2
        self.problem = Problem(B, T, H, G, D, stride, stride, bench.put(case.starts()))
        self.flops = {
            "forward": attention_flops(B, T, H, D),
            "backward": attention_backward_flops(B, T, H, D),
            "statistics": 0,
            "dkdv": 4 * attention_flops(B, T, H, D) // 2,
            "dq": 3 * attention_flops(B, T, H, D) // 2,
        }

    def close(self) -> None:
        for address in self.bench.addresses[self.kept :]:
            core.free(address)
        del self.bench.addresses[self.kept :]

    def launch(self, kernel: str, tiles: Tiles) -> None:
        """forward, backward (its three kernels), statistics, dkdv or dq."""
        p, stream = self.problem, self.bench.stream
        row = p.D * 2
        q, k, v = (self.qkv + n * row for n in (0, p.H, p.H + p.G))
        if kernel == "forward":
            launch_forward(self.out, self.lse, q, k, v, p, tiles, stream)
        if kernel in ("statistics", "backward"):
            attention_backward.statistics_launch(
                self.stats, self.out, self.dout, self.lse, B=p.B, T=p.T, H=p.H, D=p.D,
                stream=stream,
            )  # fmt: skip
        if kernel in ("dkdv", "backward"):
            dk, dv = self.dqkv + p.H * row, self.dqkv + (p.H + p.G) * row
            launch_dkdv(
                dk, dv, p.kv_stride, self.stats, self.dout, (q, k, v), p, tiles.dkdv, stream
            )
        if kernel in ("dq", "backward"):
            launch_dq(self.dqkv, p.q_stride, self.stats, self.dout, (q, k, v), p, tiles.dq, stream)

    def seconds(self, kernel: str, tiles: Tiles) -> np.ndarray:
        """Of one launch, RUNS times."""
        self.launch(kernel, tiles)  # loads it and copies tensor maps
        core.synchronize_stream(self.bench.stream)

        def work() -> None:
            for _ in range(LAUNCHES):
                self.launch(kernel, tiles)

        graph = capture(self.bench.stream, work, name=kernel)
        times = []
        for _ in range(WARM_UPS + RUNS):
            core.record_event(self.bench.events[0], self.bench.stream)
            graph.launch(self.bench.stream)
            core.record_event(self.bench.events[1], self.bench.stream)
            times.append(core.elapsed_seconds(*self.bench.events) / LAUNCHES)
        graph.close()
        return np.array(times[WARM_UPS:])


def tiles_of(case: Case, bench: Bench) -> dict[str, Tiles]:
    """The default, and mma.sync where that is not the default."""
    shape, device = AttentionShape(case.B, case.T, case.H, case.G, case.D), bench.device
    found = {"default": default_tiles(shape, device.cc, device.multiprocessors)}
    return found | ({"mma.sync": default_tiles(shape, (8, 0))} if device.cc == CC else {})


def others(case: Case, bench: Bench, kernels: Sequence[str]) -> list[tuple[str, Tiles]]:
    """Each candidate for these kernels that is no default, alone, with the kernel it is for."""
    found = []
    for label, default in tiles_of(case, bench).items():
        cc = bench.device.cc if label == "default" else (8, 0)
        for kernel in kernels:
            for shape in candidates(case.D, cc)[kernel].values():
                if shape != getattr(default, kernel):
                    found.append((kernel, replace(default, **{kernel: shape})))
    return found


def report(name: str, case: str, what: str, times: np.ndarray, flops: int) -> None:
    low, middle, high = np.percentile(times, [25, 50, 75])
    line = {
        "kernel": name, "case": case, "what": what, "us": round(middle * 1e6, 1),
        "tflop_per_s": round(flops / middle / 1e12, 1),
        "quartiles": [round(flops / high / 1e12, 1), round(flops / low / 1e12, 1)],
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def time_ours(bench: Bench, name: str, case: Case, kernels: Sequence[str]) -> None:
    """The defaults, and each candidate for these kernels alone."""
    ours = Ours(bench, case)
    tiles = tiles_of(case, bench)
    ours.launch("forward", tiles["default"])  # out and lse for the backward
    for label, chosen in tiles.items():
        for kernel in ours.flops:
            report(kernel, name, label, ours.seconds(kernel, chosen), ours.flops[kernel])
    for kernel, chosen in others(case, bench, kernels):
        for part in (kernel, "backward") if kernel == "dkdv" else (kernel,):
            label = str(getattr(chosen, kernel))
            report(part, name, label, ours.seconds(part, chosen), ours.flops[part])
    ours.close()


# ---- PyTorch -----------------------------------------------------------------------------------
def torch_seconds(torch: Any, stream: Any, run: Callable[[], Any]) -> np.ndarray:
    """Of one call: replays of a graph of LAUNCHES calls, captured on `stream`, which is current."""
    for _ in range(3):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(LAUNCHES):
            run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times = []
    for _ in range(WARM_UPS + RUNS):
        events[0].record(stream)
        graph.replay()
        events[1].record(stream)
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3 / LAUNCHES)
    return np.array(times[WARM_UPS:])


def time_torch(torch: Any, name: str, case: Case) -> None:
    """PyTorch's backends on views of one packed buffer. All on one stream: autograd runs a backward
    on its forward's, and a capture refuses work of another."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

    B, T, H, G, D = case.B, case.T, case.H, case.G, case.D
    attend = torch.nn.functional.scaled_dot_product_attention
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        qkv = torch.randn(B, T, H + 2 * G, D, device="cuda", dtype=torch.bfloat16)
        q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in qkv.split([H, G, G], dim=2))
        dout = torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for label, backend in (
            ("torch flash", SDPBackend.FLASH_ATTENTION), ("torch cuDNN", SDPBackend.CUDNN_ATTENTION)
        ):  # fmt: skip
            flops = {"forward": attention_flops, "backward": attention_backward_flops}
            with sdpa_kernel([backend]):
                forward = lambda: attend(q, k, v, is_causal=True, enable_gqa=H != G)  # noqa: E731
                try:
                    out = forward()
                    backward = lambda out=out: torch.autograd.grad(  # noqa: E731
                        out, (q, k, v), dout, retain_graph=True
                    )
                    for kernel, run in (("forward", forward), ("backward", backward)):
                        times = torch_seconds(torch, stream, run)
                        report(kernel, name, label, times, flops[kernel](B, T, H, D))
                except RuntimeError as error:
                    print(json.dumps({"case": name, "what": label, "error": str(error)[:300]}))


# ---- kernel cache ------------------------------------------------------------------------------
def _compile(task: tuple[int, str, Tiles]) -> None:
    D, kernel, tiles = task
    core.open_device(0)
    p = Problem(1, 1, 1, 1, D, 2 * D, 2 * D, 256)
    with preparing():
        if kernel == "forward":
            launch_forward(256, 256, 256, 256, 256, p, tiles, 0)
        elif kernel == "dkdv":
            launch_dkdv(256, 256, 2 * D, 256, 256, (256, 256, 256), p, tiles.dkdv, 0)
        elif kernel == "dq":
            launch_dq(256, 2 * D, 256, 256, (256, 256, 256), p, tiles.dq, 0)


def compile_all(bench: Bench, chosen: list[Case], kernels: Sequence[str]) -> None:
    """Fill the kernel cache, a process a kernel."""
    tasks = {}
    for case in chosen:
        found = [(k, tiles) for tiles in tiles_of(case, bench).values() for k in KERNELS]
        for kernel, tiles in found + others(case, bench, kernels):
            tasks[case.D, kernel, getattr(tiles, kernel)] = (case.D, kernel, tiles)
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        pool.map(_compile, tasks.values(), chunksize=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", default=list(cases()), choices=list(cases()))
    parser.add_argument("--compile-only", action="store_true", help="--compile, and end")
    parser.add_argument("--tiles", nargs="*", choices=KERNELS)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    tiles = list(KERNELS) if arguments.tiles == [] else arguments.tiles or []
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        torch = None
    with Bench("attention") as bench:
        if arguments.compile or arguments.compile_only:
            compile_all(bench, [cases()[name] for name in arguments.case], tiles)
        for name in [] if arguments.compile_only else arguments.case:
            time_ours(bench, name, cases()[name], tiles)
            if torch is not None and not cases()[name].document:
                time_torch(torch, name, cases()[name])


if __name__ == "__main__":
    main()
