"""Copies that make up a collective, from where the parts lie."""

from collections.abc import Sequence

from llmq_nb.comm.link import Pull
from llmq_nb.core.tensor import Tensor


def all_gather(target: Tensor, shards: Sequence[Tensor]) -> list[Pull]:
    """Copies of all ranks' shards into a whole tensor, one behind the other as far as it goes."""
    out, place, end = [], target.address, target.address + target.nbytes
    for rank, shard in enumerate(shards):
        nbytes = min(shard.nbytes, end - place)
        if nbytes:
            out.append(Pull(place, shard.address, nbytes, rank, host=shard.host))
        place += nbytes
    return out
