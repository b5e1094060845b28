"""Attention forward and backward in TFLOP/s, causal (half the square counted): forward 2 B H T T D,
backward 5 B H T T D; beside PyTorch's flash and cuDNN backends where torch is installed.

    python -m bench.bench_attention [--case 1.5B/4096 ...] [--tiles] [--swath 8 32 128]

Each figure is the median of 20 single launches after 5 warm-ups, the L2 cache as the launch before
left it (a layer's kernels find their inputs there too). --tiles times every tile shape of every
kernel, --swath (MiB) the order of blocks. PyTorch's times contain its host path and allocations.
One JSON line a figure.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.core import device as core
from llmq_nb.kernels import (
    attention,
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_dkdv,
    attention_hopper_tiles,
    attention_tiles,
)
from llmq_nb.kernels.attention import Tiles, attention_backward_flops, attention_flops

WARM_UPS, RUNS = 5, 20


@dataclass(frozen=True, slots=True)
class Case:
    B: int
    T: int
    H: int
    G: int
    D: int
    document: int = 0
    """Tokens of each document; 0: one document a sequence."""


def cases() -> dict[str, Case]:
    """The shapes of issue 3 (heads of the 0.5B and 1.5B models), 12 key/value heads, documents."""
    found: dict[str, Case] = {}
    for T in (1024, 2048, 4096):
        found[f"1.5B/{T}"] = Case(8, T, 12, 2, 128)
        found[f"0.5B/{T}"] = Case(8, T, 14, 2, 64)
        found[f"mha/{T}"] = Case(8, T, 12, 12, 128)
    found["1.5B/1024x32"] = Case(32, 1024, 12, 2, 128)
    found["0.5B/1024x32"] = Case(32, 1024, 14, 2, 64)
    found["1.5B/4096/documents"] = Case(8, 4096, 12, 2, 128, document=600)
    found["1.5B/4095"] = Case(8, 4095, 12, 2, 128)
    return found


class Ours:
    """One case's buffers, and the launches on them."""

    def __init__(self, bench: Bench, case: Case) -> None:
        B, T, H, G, D = case.B, case.T, case.H, case.G, case.D
        bf16 = ml_dtypes.bfloat16
        self.bench, self.case = bench, case
        self.qkv = bench.random((B, T, H + 2 * G, D), bf16)
        self.dqkv = bench.empty(B * T * (H + 2 * G) * D * 2)
        self.dout = bench.random((B, T, H, D), bf16)
        self.out, self.lse = bench.empty(B * T * H * D * 2), bench.empty(B * H * T * 4)
        self.stats = bench.empty(attention.attention_scratch_bytes(B, T, H))
        step = case.document or T
        starts = np.tile((np.arange(T) // step * step).astype(np.int32), (B, 1))
        self.starts = bench.put(starts)
        self.shape: dict[str, Any] = {"B": B, "T": T, "H": H, "G": G, "D": D}

    def forward(self, tiles: Tiles | None = None) -> None:
        attention.attention_launch(
            self.out, self.lse, self.qkv, self.starts, **self.shape, tiles=tiles,
            stream=self.bench.stream,
        )  # fmt: skip

    def backward(self, tiles: Tiles | None = None) -> None:
        attention.attention_backward_launch(
            self.dqkv, self.stats, self.dout, self.out, self.lse, self.qkv, self.starts,
            **self.shape, tiles=tiles, stream=self.bench.stream,
        )  # fmt: skip


def seconds(bench: Bench, launch: Callable[[], None]) -> np.ndarray:
    times = []
    for _ in range(WARM_UPS + RUNS):
        core.record_event(bench.events[0], bench.stream)
        launch()
        core.record_event(bench.events[1], bench.stream)
        times.append(core.elapsed_seconds(*bench.events))
    return np.array(times[WARM_UPS:])


def report(name: str, case: str, what: str, times: np.ndarray, flops: int, **more: Any) -> None:
    low, middle, high = np.percentile(times, [25, 50, 75])
    line = {
        "kernel": name, "case": case, "what": what, **more, "us": round(middle * 1e6, 1),
        "tflop_per_s": round(flops / middle / 1e12, 1),
        "quartiles": [round(flops / high / 1e12, 1), round(flops / low / 1e12, 1)],
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def time_ours(bench: Bench, name: str, case: Case, options: list[tuple[str, Tiles | None]]) -> None:
    ours = Ours(bench, case)
    shape = case.B, case.T, case.H, case.D
    for label, tiles in options:
        ours.forward(tiles)
        forward = seconds(bench, lambda tiles=tiles: ours.forward(tiles))
        backward = seconds(bench, lambda tiles=tiles: ours.backward(tiles))
        report("forward", name, label, forward, attention_flops(*shape))
        report("backward", name, label, backward, attention_backward_flops(*shape))


def time_torch(torch: Any, name: str, case: Case) -> None:
    """PyTorch's backends on views of one packed buffer."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

    B, T, H, G, D = case.B, case.T, case.H, case.G, case.D
    qkv = torch.randn(B, T, H + 2 * G, D, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in qkv.split([H, G, G], dim=2))
    dout = torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def timed(run: Callable[[], Any]) -> np.ndarray:
        times = []
        for _ in range(WARM_UPS + RUNS):
            events[0].record()
            run()
            events[1].record()
            events[1].synchronize()
            times.append(events[0].elapsed_time(events[1]) / 1e3)
        return np.array(times[WARM_UPS:])

    attend = torch.nn.functional.scaled_dot_product_attention
    run = lambda: attend(q, k, v, is_causal=True, enable_gqa=H != G)  # noqa: E731
    for label, backend in (
        ("torch flash", SDPBackend.FLASH_ATTENTION), ("torch cuDNN", SDPBackend.CUDNN_ATTENTION)
    ):  # fmt: skip
        with sdpa_kernel([backend]):
            try:
                out = run()
                forward = timed(run)
                backward = timed(
                    lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                )
            except RuntimeError as error:
                print(json.dumps({"case": name, "what": label, "error": str(error)[:200]}))
                continue
        report("forward", name, label, forward, attention_flops(B, T, H, D))
        report("backward", name, label, backward, attention_backward_flops(B, T, H, D))


def options(D: int, cc: tuple[int, int], every: bool) -> list[tuple[str, Tiles | None]]:
    """Labelled tile shapes: the default, mma.sync beside wgmma, and with `every` each candidate."""
    found: list[tuple[str, Tiles | None]] = [("default", attention.default_tiles(D, cc))]
    if cc == attention_hopper_tiles.CC:
        found = [("wgmma", None), ("mma.sync", attention.default_tiles(D, (8, 0)))]
    if every:
        found += [(str(tiles), tiles) for tiles in attention.candidate_tiles(D)]
    return found


@contextlib.contextmanager
def swath(mebibytes: int) -> Iterator[None]:
    before = attention_tiles.SWATH_BYTES
    attention_tiles.SWATH_BYTES = mebibytes << 20
    yield
    attention_tiles.SWATH_BYTES = before


@contextlib.contextmanager
def shapes(forward: int, dkdv: int, dq: tuple[int, int]) -> Iterator[None]:
    """Other warpgroup counts of the wgmma kernels, D = 64."""
    tables: list[dict[int, Any]] = [
        attention_hopper.CONSUMERS,
        attention_hopper_dkdv.CONSUMERS,
        attention_hopper_backward.SHAPES,
    ]
    before = [table[64] for table in tables]
    for table, value in zip(tables, (forward, dkdv, dq), strict=True):
        table[64] = value
    yield
    for table, value in zip(tables, before, strict=True):
        table[64] = value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", default=list(cases()), choices=list(cases()))
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--swath", nargs="*", type=int, default=[])
    parser.add_argument("--no-wgmma", action="store_true")
    parser.add_argument("--waves", action="store_true", help="wgmma, a block for every item")
    parser.add_argument("--shapes", action="store_true", help="wgmma at D = 64")
    arguments = parser.parse_args()
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        torch = None
    with Bench("attention") as bench:
        cc = (8, 0) if arguments.no_wgmma else bench.device.cc
        for name in arguments.case:
            case = cases()[name]
            kept = len(bench.addresses)
            time_ours(bench, name, case, options(case.D, cc, arguments.tiles))
            for size in arguments.swath:
                with swath(size):
                    time_ours(bench, name, case, [(f"swath {size} MiB", None)])
            if arguments.waves:
                attention_hopper_tiles.PERSISTENT = False
                time_ours(bench, name, case, [("not persistent", None)])
                attention_hopper_tiles.PERSISTENT = True
            if arguments.shapes and case.D == 64:
                for other in ((2, 2, (2, 128)), (3, 3, (2, 64))):
                    with shapes(*other):
                        time_ours(bench, name, case, [(f"shapes {other}", None)])
            for address in bench.addresses[kept:]:
                core.free(address)
            del bench.addresses[kept:]
            if torch is not None and not case.document:
                time_torch(torch, name, case)


if __name__ == "__main__":
    main()
