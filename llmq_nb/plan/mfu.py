"""Model FLOP utilisation: the time a step would take at the card's peak, over the time it took.

    seconds per token = 6 P / peak(matmul) + 6 V C / peak(BF16) + 6 L (H D) T / peak(BF16)

P: parameters of the block products. Forward and backward are three products of 2 FLOP; attention
counts half the square (causal). Recomputation is not credited. The three times are added, so with
FP8 products the utilisation weighs each part by its own peak.

Peaks are dense, with FP32 accumulation, at the nominal boost clock; boards that clock higher can
show more than 100 %.

Source   LLMQ's "speed of light" formula (reference: its documentation); NVIDIA's data sheets and
         white papers for the peaks.
"""

import dataclasses

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.model.config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """Dense TFLOP/s with FP32 accumulation. fp8 is None where the card has no FP8 units."""

    bf16: float
    fp8: float | None


PEAKS: dict[str, Peak] = {
    "GeForce RTX 3060": Peak(25.5, None),
    "GeForce RTX 3090": Peak(71.0, None),
    "RTX A6000": Peak(154.8, None),
    "A100": Peak(312.0, None),
    "GeForce RTX 4060 Ti": Peak(44.1, 88.0),
    "GeForce RTX 4070 Ti SUPER": Peak(88.2, 176.0),
    "GeForce RTX 4090": Peak(165.2, 330.3),
    "L4": Peak(121.0, 242.0),
    "L40S": Peak(362.0, 733.0),
    "RTX 6000 Ada": Peak(364.2, 728.5),
    "GeForce RTX 5060 Ti": Peak(47.4, 94.8),
    "GeForce RTX 5070 Ti": Peak(87.9, 175.8),
    "GeForce RTX 5080": Peak(112.6, 225.1),
    "GeForce RTX 5090": Peak(209.5, 419.0),
    "RTX PRO 6000 Blackwell Max-Q": Peak(438.9, 877.9),
    "RTX PRO 6000 Blackwell": Peak(503.8, 1007.6),
    "GB10": Peak(118.9, 237.8),
    "H100 PCIe": Peak(756.0, 1513.0),
    "H100": Peak(989.4, 1978.9),
    "H200": Peak(989.4, 1978.9),
    "B200": Peak(2200.0, 4500.0),
}
"""By part of the driver's device name; the longest that fits counts."""


def peak_of(device_name: str) -> Peak:
    """The peaks of a device. UserError for a card that is not in the table."""
    return PEAKS[card_of(device_name)]


def card_of(device_name: str) -> str:
    """The row of PEAKS that a device's name means. UserError for a card that is not there."""
    words = f" {device_name.replace('NVIDIA', '')} ".replace("-", " ").lower()
    fits = [name for name in PEAKS if f" {name.replace('-', ' ').lower()} " in words]
    if not fits:
        raise UserError(
            f"no peak rates are known for {device_name!r}",
            where="plan/mfu.py",
            mend="add its dense BF16 and FP8 TFLOP/s to PEAKS",
        )
    return max(fits, key=len)


def product_parameters(model: ModelConfig) -> int:
    """Parameters of the block products."""
    layer = model.qkv_rows * model.C + model.C * model.attention_columns + 3 * model.C * model.F
    return model.L * layer


def seconds_per_token(model: ModelConfig, seq_len: int, matmul: DType, peak: Peak) -> float:
    """Least time of a token's forward and backward [s]. matmul: format of the block products."""
    rate = peak.bf16 if not matmul.is_fp8 else peak.fp8
    if rate is None:
        rate = peak.bf16  # FP8 is emulated with BF16 products
    head = 6 * model.V * model.C
    attention = 6 * model.L * model.attention_columns * seq_len
    blocks = 6 * product_parameters(model)
    return (blocks / rate + (head + attention) / peak.bf16) / 1e12


def utilisation(
    tokens_per_second: float,
    model: ModelConfig,
    *,
    seq_len: int,
    matmul: DType,
    peak: Peak,
    devices: int = 1,
) -> float:
    """Share of the peak that a measured rate is, 0 to 1."""
    return tokens_per_second * seconds_per_token(model, seq_len, matmul, peak) / devices


def step_flops(model: ModelConfig, tokens: int, seq_len: int) -> int:
    """FLOP of forward and backward of `tokens`."""
    attention = model.L * model.attention_columns * seq_len
    return 6 * tokens * (product_parameters(model) + model.V * model.C + attention)
