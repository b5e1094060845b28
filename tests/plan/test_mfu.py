"""The utilisation formula against LLMQ's own printed percentages, and the device table."""

import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.model.families import preset
from llmq_nb.plan.mfu import PEAKS, peak_of, step_flops, utilisation


@pytest.mark.parametrize(
    ("model", "devices", "rate", "percent"),
    [("qwen2.5-7b", 1, 4330, 61.5), ("qwen2.5-32b", 4, 3396, 51.6)],
)
def test_llmq_prints_these_percentages_for_the_4090(model, devices, rate, percent):
    share = utilisation(
        rate,
        preset(model),
        seq_len=1024,
        matmul=DType.E4M3,
        peak=peak_of("NVIDIA GeForce RTX 4090"),
        devices=devices,
    )
    assert round(100 * share, 1) == percent


def test_bf16_share_is_the_flops_over_the_peak():
    model = preset("qwen2.5-0.5b")
    share = utilisation(
        100_000, model, seq_len=2048, matmul=DType.BF16, peak=peak_of("NVIDIA H200")
    )
    assert share == pytest.approx(step_flops(model, 100_000, 2048) / 989.4e12, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "GeForce RTX 4070 Ti SUPER"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GB10", "GB10"),
    ],
)
def test_a_devices_name_finds_its_row(name, key):
    assert peak_of(name) is PEAKS[key]


def test_an_unknown_card_is_an_error_by_name():
    with pytest.raises(UserError, match="Radeon"):
        peak_of("Radeon RX 7900")
