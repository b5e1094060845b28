"""What one optimizer step and one evaluation tell: the values that every report is made from."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step, over all micro-batches, ranks and machines."""

    step: int
    """Optimizer steps done, this one included: the first has 1, and checkpoint n follows step n."""
    loss: float
    """Mean loss of the supervised tokens [nats per token]; NaN if there were none."""
    grad_norm: float
    """Global L2 norm of the gradients before clipping."""
    learning_rate: float
    """Rate that the update was made with."""
    tokens: int
    """Tokens of the step, supervised or not."""
    supervised: int
    """Tokens that count in the loss."""
    lse_max: float
    """Largest log sum exp of the logits of any token."""
    seconds: float
    """Wall time of the step [s]."""
    tokens_per_second: float
    """tokens / seconds."""
    skipped: bool = False
    """The update was left out: no supervised token, or a gradient that is not finite."""
    non_finite_tensor: str | None = None
    """The first tensor whose gradient is not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalMetrics:
    """One evaluation on the validation store."""

    step: int
    """Optimizer steps done before it."""
    loss: float
    """Mean loss of the supervised tokens [nats per token]."""
    tokens: int
    """Supervised tokens it was measured on."""
    seconds: float
    """Wall time [s]."""
