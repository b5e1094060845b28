"""How tensors are cut over ranks, and what is cut.

The optimizer's states always are. `parallel.shard_weights` cuts the blocks' matrices and their FP8
codes too, `parallel.shard_gradients` all gradients; what lives on the host is always cut, one copy
for all ranks. A shard is a run of the flattened fused tensor: every rank has a place of the same
size, a multiple of 1024 elements, and the last shards are short or empty.
"""

import math

from llmq_nb.config import Config
from llmq_nb.model.fp8 import keeps_quants
from llmq_nb.model.parameters import Parameter
from llmq_nb.plan.places import cuts_weights, offloads_quants

SHARD_MULTIPLE = 1024
"""Elements: eight groups of an e4m3 moment, and whole Philox words."""
LINKS = 3
"""Of each rank: for weights, for gradients, and for what is shared at the update."""
STAGING_BYTES = 16 << 20
"""Pinned for a link and an ordered pair of ranks whose GPUs cannot copy from each other."""
RECEIVED = 1 << 23
"""Most elements of one rank's gradients that are received at once: 16 MiB of BF16."""


def shard_elements(size: int, ranks: int) -> int:
    """Elements of every rank's place for its shard; the whole tensor for one rank."""
    if ranks == 1:
        return size
    return -(-size // (ranks * SHARD_MULTIPLE)) * SHARD_MULTIPLE


def shard_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """(first element, the one behind the last) of a rank's shard; equal where it is empty."""
    own = shard_elements(size, ranks)
    return min(rank * own, size), min((rank + 1) * own, size)


def elements(parameter: Parameter) -> int:
    """Elements of a parameter, padded rows included."""
    return math.prod(parameter.shape)


def shards_weight(config: Config, parameter: Parameter) -> bool:
    """Whether a parameter's weights are cut, to be gathered where products read them."""
    return cuts_weights(config) and parameter.layer is not None and parameter.kind == "matrix"


def shards_quants(config: Config) -> bool:
    """Whether the kept codes of FP8 weights are cut."""
    cut = cuts_weights(config) or offloads_quants(config)
    return config.world_size > 1 and keeps_quants(config) and cut


def crosses(config: Config) -> bool:
    """Whether weights or codes would come from other machines in every micro-step: refused."""
    return config.parallel.machines > 1 and (cuts_weights(config) or shards_quants(config))


def received_elements(largest: int, ranks: int) -> int:
    """Elements a rank takes from each rank at once, of shards of tensors of up to `largest`."""
    return min(RECEIVED, shard_elements(largest, ranks))
