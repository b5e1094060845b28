"""Copies joined where they may be, and refusals before anything is pinned."""

import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.core.tensor import Tensor
from llmq_nb.offload import pinned
from llmq_nb.offload.host_gradients import HostGradients
from llmq_nb.offload.host_residuals import HostResiduals
from llmq_nb.offload.host_weights import HostWeights, Staged
from llmq_nb.offload.pinned import check_pinnable, take_pages
from llmq_nb.offload.transfer import Copy, ImmediateTransfer, copies_of

GIB = 1 << 30


def at(address: int, nbytes: int) -> Tensor:
    return Tensor("t", (nbytes,), DType.E4M3, address)


def test_neighbours_in_both_places_are_one_copy():
    pairs = [(at(1000, 100), at(5000, 100)), (at(1200, 56), at(5200, 56))]
    assert copies_of(pairs) == (Copy(1000, 5000, 256),)


def test_what_lies_apart_in_either_place_stays_apart():
    cases = [
        [(at(1000, 100), at(5000, 100)), (at(1200, 56), at(5100, 56))],  # other padding
        [(at(1000, 100), at(5000, 100)), (at(1400, 56), at(5400, 56))],  # more than padding
        [(at(1000, 100), at(5000, 100)), (at(900, 56), at(4900, 56))],  # backwards
    ]
    for pairs in cases:
        want = tuple(Copy(d.data, h.data, d.nbytes) for d, h in pairs)
        assert copies_of(pairs) == want


def test_addresses_of_arrays_are_their_own():
    a, b = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    device, host = (Tensor("t", (8,), DType.FP32, x) for x in (b, a))
    transfer = ImmediateTransfer()
    transfer.to_device(copies_of([(device.rows(2, 6), host.rows(2, 6))]), done=None)
    assert b.tolist() == [0, 0, 2, 3, 4, 5, 0, 0]


def staged(turn: int) -> Staged:
    return Staged("weights", turn, at(0, 0), ())


def test_a_unit_that_is_not_released_is_noticed():
    weights = HostWeights(None, {0: staged(0), 2: staged(0)}, ImmediateTransfer())  # type: ignore
    weights.gather(0)
    with pytest.raises(AssertionError, match="in use"):
        weights.gather(2)
    with pytest.raises(AssertionError, match="still held"):
        weights.finish()
    gradients = HostGradients(None, {0: staged(0)}, ImmediateTransfer())  # type: ignore
    gradients.get(0)
    with pytest.raises(AssertionError, match="still held"):
        gradients.finish()
    residuals = HostResiduals([at(0, 0)], {}, ImmediateTransfer())
    residuals.keep(0)
    with pytest.raises(AssertionError, match="still held"):
        residuals.finish()
    for store in (weights, gradients, residuals):
        store.reset()
        assert store.idle


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 10_000, 12_288])
def test_all_of_a_chunk_is_cleared_and_nothing_else(nbytes, monkeypatch):
    monkeypatch.setattr(pinned, "PIECE", 4096)
    memory = np.full(20_000, 7, np.uint8)
    take_pages(memory.ctypes.data + 100, nbytes)
    want = np.full(20_000, 7, np.uint8)
    want[100 : 100 + nbytes] = 0
    np.testing.assert_array_equal(memory, want)


def test_host_memory_is_refused_in_one_line():
    check_pinnable(8 * GIB, None, None)
    check_pinnable(8 * GIB, 8 * GIB, 8 * GIB)
    with pytest.raises(UserError) as error:
        check_pinnable(8 * GIB, 6 * GIB, 64 * GIB)
    assert "2.00 GiB short" in str(error.value) and "memory.host_limit 6.00 GiB" in str(error.value)
    with pytest.raises(UserError) as error:
        check_pinnable(8 * GIB, 9 * GIB, 5 * GIB)
    text = str(error.value)
    assert "host pinned memory" in text and "needs 8.00 GiB, available 5.00 GiB" in text
    assert "container" in text and "\n" not in text
