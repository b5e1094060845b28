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
    if not match[2] and 0 < float(match[1]) < 1000:  # "16": nobody means 16 bytes
        raise UserError(f"size {text!r}", where=where, mend=f"give its unit: {text.strip()}GiB")
    return int(float(match[1]) * UNITS[match[2]])


def format_bytes(nbytes: int) -> str:
    """At least three digits and a binary unit: 15.0 GiB, 4.37 MiB, 1023 B."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, power = nbytes / 1024, 0
    while size >= 1023.5 and power < 3:  # what would round to 1024 takes the next unit
        size, power = size / 1024, power + 1
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {'KMGT'[power]}iB"
