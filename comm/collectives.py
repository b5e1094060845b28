"""Copies that make up a collective, from where the parts lie.

    all-gather          all_gather       every rank's shard into a whole tensor
    reduce-scatter      rows             a run of every rank's tensor, each into a row of one's own;
                                         then a kernel adds the rows up (kernels/accumulate.py)
    small all-reduce    rows             every rank's vector; then each rank combines all of them

A rank may have nothing: a shard without elements makes no copy.
"""

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


def rows(target: Tensor, sources: Sequence[Tensor], *, first: int, count: int) -> list[Pull]:
    """Copies of elements first .. first + count - 1 of each rank's tensor into its row of target.

    target: (ranks, count or more); the first count elements of a row are written.
    """
    stride, start = target.nbytes // target.shape[0], first * target.dtype.itemsize
    nbytes = count * target.dtype.itemsize
    assert nbytes <= stride, f"{count} elements in rows of {target.shape}"
    return [
        Pull(target.address + rank * stride, source.address + start, nbytes, rank, source.host)
        for rank, source in enumerate(sources if nbytes else ())
    ]
