"""How fast a card does each kind of work: measured on an H200, predicted for the others.

Sustained rates of whole training steps, at the power limit: below the peaks of `mfu`, and below
what one kernel alone reaches. A prediction is a card's datasheet times the factors named here; it
says which of two settings is faster, and the speed to some 20 %.

Source   H200: measured on 2026-11-30 in the experiments before this project: cuBLASLt at the shapes
         of Qwen2.5 (products and LM head), wgmma attention kernels, a copy kernel. Other cards:
         NVIDIA's data sheets and white papers; memory that CUDA shows: LLMQ's README and driver
         listings.
"""

import dataclasses
from typing import Literal

from llmq_nb.core.errors import UserError
from llmq_nb.plan.link import Link, symmetric
from llmq_nb.plan.mfu import PEAKS, card_of

Curve = tuple[tuple[int, float], ...]
"""(size, rate) in rising order of size; straight lines between, constant outside."""
Build = Literal["hopper", "gaming", "professional", "unified"]


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """TFLOP/s by hidden size C or sequence length T, and GB/s.

    attention: by head_dim, forward and backward; causal, half of the square counted. fp8: None
    without FP8 units. bandwidth: read + written by a streaming kernel. host_link: to and from
    pinned host memory. measured: False where it is a prediction.
    """

    card: str
    bf16: Curve
    fp8: Curve | None
    head: Curve
    attention: dict[int, tuple[Curve, Curve]]
    bandwidth: float
    host_link: Link
    measured: bool = False


STREAMING = 0.92
"""Share of a copy's bandwidth that a good memory-bound kernel reaches."""
H200 = Rates(
    card="H200",
    bf16=((896, 600.0), (1536, 670.0), (2048, 680.0), (3584, 685.0)),
    fp8=((896, 1070.0), (1536, 1230.0), (2048, 1245.0), (3584, 1265.0)),
    head=((896, 640.0), (1536, 692.0), (2048, 690.0), (3584, 690.0)),
    attention={
        64: (((1024, 330.0),), ((1024, 240.0),)),
        128: (
            ((1024, 375.0), (2048, 515.0), (4096, 554.0)),
            ((1024, 250.0), (2048, 395.0), (4096, 420.0)),
        ),
    },
    bandwidth=STREAMING * 4250,
    host_link=symmetric(50.0),
    measured=True,
)
"""FP8 with fast accumulation; without: `PROMOTED`."""
PROMOTED = 0.95
"""Rate of FP8 products whose sums are promoted to FP32, over fast accumulation, on Hopper."""


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """mib: memory that CUDA shows [MiB]. bandwidth: datasheet [GB/s]. host_link: pinned [GB/s]."""

    mib: int
    bandwidth: float
    host_link: float
    build: Build


SHOWN = 0.967
"""Of the memory that a card is sold with, what CUDA shows (RTX 5060 Ti: 15,848 of 16,384 MiB)."""
GEN4, GEN5 = 21.0, 50.0
"""PCIe x16 to pinned host memory, one direction [GB/s]."""


def _sold(gib: int) -> int:
    """MiB shown by a card whose listing was not found."""
    return int(SHOWN * gib * 1024)


CARDS: dict[str, Card] = {
    "GeForce RTX 3060": Card(_sold(12), 360, GEN4, "gaming"),
    "GeForce RTX 3090": Card(24123, 936, GEN4, "gaming"),
    "RTX A6000": Card(_sold(48), 768, GEN4, "professional"),
    "A100": Card(_sold(80), 2039, GEN4, "professional"),
    "GeForce RTX 4060 Ti": Card(_sold(16), 288, GEN4 / 2, "gaming"),
    "GeForce RTX 4070 Ti SUPER": Card(_sold(16), 672, GEN4, "gaming"),
    "GeForce RTX 4090": Card(24080, 1008, GEN4, "gaming"),
    "L4": Card(_sold(24), 300, GEN4, "professional"),
    "L40S": Card(_sold(48), 864, GEN4, "professional"),
    "RTX 6000 Ada": Card(_sold(48), 960, GEN4, "professional"),
    "GeForce RTX 5060 Ti": Card(15848, 448, GEN5 / 2, "gaming"),
    "GeForce RTX 5070 Ti": Card(_sold(16), 896, GEN5, "gaming"),
    "GeForce RTX 5080": Card(_sold(16), 960, GEN5, "gaming"),
    "GeForce RTX 5090": Card(32117, 1792, GEN5, "gaming"),
    "RTX PRO 6000 Blackwell Max-Q": Card(97887, 1792, GEN5, "professional"),
    "RTX PRO 6000 Blackwell": Card(97887, 1792, GEN5, "professional"),
    "GB10": Card(_sold(128), 273, 273, "unified"),
    "H100 PCIe": Card(_sold(80), 2039, GEN5, "hopper"),
    "H100": Card(_sold(80), 3350, GEN5, "hopper"),
    "H200": Card(_sold(141), 4800, GEN5, "hopper"),
    "B200": Card(_sold(180), 8000, GEN5, "professional"),
}
"""By the names of `PEAKS`."""

PRODUCTS: dict[Build, tuple[float, float]] = {
    "hopper": (685 / 989.4, 1265 / 1978.9),
    "gaming": (0.92, 0.85),
    "professional": (0.65, 0.60),
    "unified": (0.85, 0.80),
}
"""Sustained over peak, BF16 and FP8, of a wide model's products.

Gaming cards have tensor units at half rate and reach it (cuBLAS 167 of 165 on an RTX 4090); cards
with full-rate units end at their power limit, as the H200 does (L40S: 230 of 362).
"""
ATTENTION = (0.70, 0.55)
"""Forward and backward over the sustained BF16 products, without wgmma (mma.sync kernels)."""
COPY = 4250 / 4800
"""A copy kernel's bandwidth over the datasheet's, as on the H200."""


def rates_of(device_name: str) -> Rates:
    """The rates of a device by its name. UserError for a card that is not in the table."""
    # people leave the words out
    for name in (device_name, f"GeForce {device_name}", f"GeForce RTX {device_name}"):
        try:
            card = card_of(name)
        except UserError:
            continue
        return H200 if card == "H200" else predicted(card)
    mend = f"choose {_names()}; for another card the nearest one, with --device-memory"
    raise UserError(f"the rates of {device_name!r} are not known", mend=mend)


def _names() -> str:
    return ", ".join(name.removeprefix("GeForce ") for name in CARDS)


def predicted(name: str) -> Rates:
    """The rates of a row of CARDS, from its datasheet."""
    card, peak = CARDS[name], PEAKS[name]
    bf16_share, fp8_share = PRODUCTS[card.build]
    bf16 = peak.bf16 * bf16_share
    fp8 = None if peak.fp8 is None else _scaled(H200.fp8 or (), peak.fp8 * fp8_share)
    if card.build == "hopper":  # the same kernels at another clock
        share = peak.bf16 / PEAKS["H200"].bf16
        attention: dict[int, tuple[Curve, Curve]] = {
            D: (_times(forward, share), _times(backward, share))
            for D, (forward, backward) in H200.attention.items()
        }
    else:
        forward, backward = (((1024, bf16 * share),) for share in ATTENTION)
        attention = {D: (forward, backward) for D in H200.attention}
    return Rates(
        card=name,
        bf16=_scaled(H200.bf16, bf16),
        fp8=fp8,
        head=_scaled(H200.head, bf16),
        attention=attention,
        bandwidth=STREAMING * COPY * card.bandwidth,
        host_link=symmetric(card.host_link),
    )


def is_unified(rates: Rates) -> bool:
    """Whether the GPU has no memory of its own: offload would free nothing."""
    card = CARDS.get(rates.card)
    return card is not None and card.build == "unified"


def at(curve: Curve, size: int) -> float:
    """The curve's rate at a size."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in zip(curve, curve[1:], strict=False):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return curve[-1][1]


def _times(curve: Curve, factor: float) -> Curve:
    return tuple((size, rate * factor) for size, rate in curve)


def _scaled(curve: Curve, last: float) -> Curve:
    """The curve's form, ending at the rate `last`."""
    return _times(curve, last / curve[-1][1])
