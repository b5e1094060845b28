"""Sizes in bytes as people write them."""

import re

from llmq_nb.core.errors import UserError

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str, *, where: str) -> int:
    """ "15GiB", "2 GB" or "1000000" in bytes. Raises UserError naming `where`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", text)
    if match is None or match[2] not in UNITS:
        raise UserError(f"size {text!r}", where=where, mend="write for example 15GiB or 500MB")
    return int(float(match[1]) * UNITS[match[2]])


def format_bytes(nbytes: int) -> str:
    """With three digits and a binary unit: 15.0 GiB."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
