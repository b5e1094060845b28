"""Sizes in bytes, against the powers written out."""

import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.core.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("15GiB", 15 * 2**30), ("1.5 GiB", 3 * 2**29), ("64GB", 64 * 10**9), (" 512MiB ", 2**29),
        ("10 KB", 10_000), ("3TiB", 3 * 2**40), ("7B", 7), ("1000", 1000), ("0", 0),
        ("0.5TB", 5 * 10**11),
    ],
)  # fmt: skip
def test_sizes_are_read(text, value):
    assert parse_bytes(text, where="x") == value


@pytest.mark.parametrize("text", ["GiB", "-1GiB", "1e3GiB", "15Gib/s", "", "15 iB", "15 apples"])
def test_other_text_is_refused(text):
    with pytest.raises(UserError, match="in memory.x: write for example 15GiB"):
        parse_bytes(text, where="memory.x")


@pytest.mark.parametrize("text", ["16", " 15.5 ", "999"])
def test_a_few_bytes_lack_a_unit(text):
    with pytest.raises(UserError, match=f"in --x: give its unit: {text.strip()}GiB"):
        parse_bytes(text, where="--x")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (15 * 2**30, "15.0 GiB"),
        (2**43, "8.00 TiB"),
        (10_234 * 2**10, "9.99 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2000 * 2**40, "2000 TiB"),
    ],
)
def test_sizes_are_written(nbytes, text):
    assert format_bytes(nbytes) == text
