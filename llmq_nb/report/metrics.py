"""What a step, its FP8 health and an evaluation tell: the values that every report is made from."""

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
    """The update was left out: no supervised token, a gradient that is not finite, a spike."""
    non_finite_tensor: str | None = None
    """The first tensor whose gradient is not finite."""
    spike: bool = False
    """The loss jumped; with `skipped`: the step was made again without its update."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorHealth:
    """How one tensor of one micro-batch (a weight: of the step) fits its FP8 format."""

    name: str
    """The product and the operand of it: `gate_up.input`, `.weight` or `.gradient`."""
    layer: int
    format: str
    """e4m3 or e5m2."""
    absmax: float
    """Largest magnitude, which the scale puts on the format's largest value."""
    underflowed: float
    """Share of its elements whose code is zero although they are not."""
    saturated: float
    """Share of its elements with the format's largest code; the absmax itself is always one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HealthMetrics:
    """What the numbers of one step looked like, every `log.health_every` steps."""

    step: int
    """Optimizer steps done, the measured one included."""
    lse_max: float
    """Largest log sum exp of the logits of any token of the step."""
    tensors: tuple[TensorHealth, ...]
    """All operands of FP8 products; none where the products are not FP8."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What one GPU does at one moment; None where the card or its driver does not tell."""

    index: int
    """Of the run's devices, from 0."""
    power: float | None
    power_limit: float | None
    """[W]"""
    sm_clock: int | None
    memory_clock: int | None
    """[MHz]"""
    temperature: int | None
    """[degrees Celsius]"""
    utilization: float | None
    """Share of the time with a kernel running."""
    memory: int | None
    """Memory in use on the card, by whatever process [bytes]."""
    throttled: tuple[str, ...] | None
    """Why its clocks are below their highest."""
    pcie_sent: float | None
    pcie_received: float | None
    """By the GPU [bytes/s]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMetrics:
    """The run's GPUs, every `log.device_every` steps."""

    step: int
    """Optimizer steps done when it was asked for."""
    devices: tuple[DeviceFacts, ...]


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
