"""What the cuda engine refuses before it takes memory, on stand-ins for a GPU."""

import dataclasses
from typing import Any

import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.plan.buffers import Plan
from llmq_nb.plan.limits import LIMIT_RESERVE, RESERVE
from llmq_nb.train.cuda_memory import check_memory, check_offload
from tests.model.harness import make_config

MIB, GIB = 1 << 20, 1 << 30


@dataclasses.dataclass
class Gpu:
    """name, and what the driver says is free once our context exists."""

    free: int
    integrated: bool = False
    name: str = "Test GPU"

    def free_bytes(self) -> int:
        return self.free


def config_with(**memory: Any):
    config = make_config(micro_batch=1, seq_len=16)
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, **memory))


def refused(total: int, free: int, **memory: Any) -> str | None:
    gpu: Any = Gpu(free)
    try:
        check_memory(Plan((), (), total), gpu, config_with(**memory))
    except UserError as error:
        return str(error)
    return None


def test_the_plan_and_a_reserve_must_be_free():
    assert refused(4 * GIB - RESERVE, 4 * GIB) is None
    text = refused(4 * GIB - RESERVE + MIB, 4 * GIB)
    assert text is not None and "1.00 MiB short" in text and "free 4.00 GiB" in text
    assert "memory.offload" in text and "\n" not in text


def test_a_limit_counts_the_context_too():
    limit = {"device_limit": "4GiB"}
    assert refused(4 * GIB - LIMIT_RESERVE, 80 * GIB, **limit) is None
    text = refused(4 * GIB - LIMIT_RESERVE + 2 * MIB, 80 * GIB, **limit)
    assert text is not None and "2.00 MiB short" in text and "memory.device_limit 4.00 GiB" in text


def test_what_is_free_counts_where_it_is_less_than_the_limit():
    limit = {"device_limit": "80GiB"}
    assert refused(4 * GIB - RESERVE, 4 * GIB, **limit) is None
    text = refused(4 * GIB, 4 * GIB, **limit)
    assert text is not None and "256 MiB short" in text and "free 4.00 GiB" in text


def test_offload_is_refused_where_memory_is_shared():
    shared: Any = Gpu(GIB, integrated=True)
    check_offload(config_with(), shared)
    own: Any = Gpu(GIB)
    check_offload(config_with(offload=("m",)), own)
    with pytest.raises(UserError, match=r"\['m'\]: Test GPU shares the host's memory") as error:
        check_offload(config_with(offload=("m",)), shared)
    assert error.value.where == "memory.offload"
