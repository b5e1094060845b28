"""Rates of the host link that `llmq-nb bench offload` measured on this machine.

One file for a GPU model in the kernel cache's folder, beside the products' choices.
"""

import dataclasses
import json
import math
from pathlib import Path

from llmq_nb.kernels.cache import cache_folder, write_atomically
from llmq_nb.plan.link import Link
from llmq_nb.plan.rates import Rates

SAID = "from rates measured on this machine"


def link_file(device_name: str) -> Path:
    """Where the rates of a GPU model are kept."""
    name = "".join(c if c.isalnum() else "-" for c in device_name)
    return cache_folder() / f"link-{name}.json"


def keep_link(device_name: str, link: Link) -> Path:
    """Write the rates, in place of older ones; the file."""
    file = link_file(device_name)
    write_atomically(file, json.dumps(dataclasses.asdict(link), indent=1).encode())
    return file


def with_measured_link(rates: Rates, device_name: str) -> Rates:
    """The rates, with the link that was measured here for this GPU model, if one was."""
    try:
        found = json.loads(link_file(device_name).read_text(encoding="utf-8"))
        figures = {key: float(value) for key, value in found.items() if key != "measured"}
        link = Link(**figures, measured=True)
    except (OSError, ValueError, AttributeError, TypeError):  # none yet, or a torn file
        return rates
    if not all(0 < value < math.inf for value in figures.values()):
        return rates
    return dataclasses.replace(rates, host_link=link)
