"""Loader throughput, end to end: `next_step` until an epoch is through.

    llmq-nb bench data, or python -m bench.bench_data [--tokens 40000000] [--seq-len 1024]

Writes a synthetic store (byte-like ids, document lengths of 1 to 4000), then reads it through the
loader in each mode, shuffled, and in order for evaluation. The first shuffle buffer is read before
the clock starts. Goal: 20 M tokens/s on two cores.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llmq_nb.data.loader import Loader, eval_batches
from llmq_nb.data.packing import Mode
from llmq_nb.data.store import TokenizerInfo, TokenStore
from llmq_nb.data.store_writer import StoreWriter


def run(
    *,
    tokens: int = 40_000_000,
    seq_len: int = 1024,
    micro_batch: int = 8,
    grad_accumulation: int = 4,
    vocab_size: int = 259,
    repeats: int = 3,
    folder: str | Path | None = None,
) -> dict[str, Any]:
    """Measure; returns the options and, for each way of reading, the median of `repeats`.

    tokens_per_s: by the clock. cpu_ns_per_token: of all threads, whatever else the machine does.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary, "bench.zarr")
        cost = {"write": _cost(lambda: _write(path, tokens, vocab_size))}
        store = TokenStore(path)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        shape = {"seq_len": seq_len, "micro_batch": micro_batch}
        modes: tuple[Mode, ...] = ("stream", "pack")
        for mode in modes:
            costs = [_load(store, mode, grad_accumulation, **shape) for _ in range(repeats)]
            cost[mode] = _median(costs)
        costs = [_cost(lambda: _evaluate(store, **shape)) for _ in range(repeats)]
        cost["eval"] = _median(costs)
    return {
        "tokens": tokens,
        "vocab_size": vocab_size,
        "grad_accumulation": grad_accumulation,
        "bytes_per_token": round(size / tokens, 3),
        "tokens_per_s": {name: round(1 / clock) for name, (clock, _) in cost.items()},
        "cpu_ns_per_token": {name: round(cpu * 1e9, 1) for name, (_, cpu) in cost.items()},
        **shape,
    }


def _median(costs: list[tuple[float, float]]) -> tuple[float, float]:
    clock, cpu = np.median(costs, axis=0).tolist()
    return clock, cpu


def _cost(work: Callable[[], int]) -> tuple[float, float]:
    """Seconds by the clock and of processor time, both per token; `work` returns its tokens."""
    clock, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return (time.perf_counter() - clock) / tokens, (time.process_time() - cpu) / tokens


def _write(path: Path, tokens: int, vocab_size: int) -> int:
    rng = np.random.default_rng(0)
    info = TokenizerInfo(name="bench", sha256="0" * 64, vocab_size=vocab_size, eos_id=0)
    # Squared: frequent ids and rare ones, so that compression has something to do.
    stock = (rng.random(2**22) ** 2 * vocab_size).astype(np.int32)
    with StoreWriter(path, info) as writer:
        left = tokens
        while left:
            length = min(int(rng.integers(1, 4000)), left)
            start = int(rng.integers(0, len(stock) - length))
            writer.append(stock[start : start + length])
            left -= length
    return tokens


def _load(
    store: TokenStore, mode: Mode, grad_accumulation: int, *, seq_len: int, micro_batch: int
) -> tuple[float, float]:
    with Loader(
        store,
        seq_len=seq_len,
        micro_batch=micro_batch,
        grad_accumulation=grad_accumulation,
        seed=0,
        packing=mode,
        token_order=True,
    ) as loader:
        loader.next_step()
        steps = max(loader.windows_per_epoch // (micro_batch * grad_accumulation) - 1, 1)
        return _cost(lambda: sum(loader.next_step().tokens.size for _ in range(steps)))


def _evaluate(store: TokenStore, *, seq_len: int, micro_batch: int) -> int:
    return sum(batch.tokens.size for batch in eval_batches(store, micro_batch, seq_len))
