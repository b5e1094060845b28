"""What a step and an evaluation tell. Stated in report/, which may not import train/."""

from llmq_nb.report.metrics import EvalMetrics, HealthMetrics, StepMetrics, TensorHealth

__all__ = ["EvalMetrics", "HealthMetrics", "StepMetrics", "TensorHealth"]
