"""The cpu engine: every operation of `llmq_nb.model.ops` in NumPy, with the cuda engine's rounding points."""

from llmq_nb.model.engine_cpu.ops import CpuOps

__all__ = ["CpuOps"]
