"""What a step and an evaluation tell. Stated in report/, which may not import train/."""

from llmq_nb.report.metrics import EvalMetrics, StepMetrics

__all__ = ["EvalMetrics", "StepMetrics"]
