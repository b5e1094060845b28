"""The cpu engine: the operations of `model.ops` in NumPy, with the GPU's rounding points."""

from llmq_nb.model.engine_cpu.ops import CpuOps

__all__ = ["CpuOps"]
