"""`memory.policy = "auto"` in a run: what is chosen, from what is free on this device now.

The choice becomes part of the resolved config, which is saved with the run and its checkpoints: a
resumed run keeps it, however much is free by then.
"""

from collections.abc import Callable

from llmq_nb.config import Config
from llmq_nb.config_file import parse_config
from llmq_nb.core.errors import UserError
from llmq_nb.core.host import available_bytes, pinnable_bytes
from llmq_nb.core.sizes import format_bytes
from llmq_nb.model.config import ModelConfig
from llmq_nb.plan.fit import changes, setting_of
from llmq_nb.plan.limits import PYTHON, WSL_PINNED, host_room, room_now, under_wsl
from llmq_nb.plan.measured import SAID, with_measured_link
from llmq_nb.plan.rates import H200, Rates, rates_of
from llmq_nb.plan.search import Search
from llmq_nb.plan.shards import crosses
from llmq_nb.train.checkpoint import Checkpoint


def resolve_memory(
    config: Config,
    model: ModelConfig,
    kind: str,
    checkpoint: Checkpoint | None,
    announce: Callable[[str], None],
    *,
    batch_bytes: int,
) -> Config:
    """The config with the levers chosen; itself where the policy is "manual".

    kind: of the engine. batch_bytes: host memory of the loader's batches.

    Raises UserError where nothing fits.
    """
    if config.memory.policy != "auto":
        return config
    if checkpoint is not None:
        saved = parse_config(checkpoint.state["config"], where=str(checkpoint.path))
        chosen = setting_of(saved).applied(config)
        same = saved.batch.seq_len == config.batch.seq_len
        if same and _sequences(saved) == _sequences(config) and not crosses(chosen):
            announce("memory: as the checkpoint's run chose")
            return chosen
    if kind == "cuda":
        planned, limit, host, rates = _on_gpu(config, batch_bytes)
    else:
        planned, limit, host, rates = config, _host_bytes() - batch_bytes, 0, H200
    search = Search(planned, model, rates, kind="cuda" if kind == "cuda" else "cpu")
    choice = search.choose(limit, host)
    if choice is None:
        least = search.smallest(host)
        raise UserError(
            f"no setting fits: the least takes {format_bytes(least.total)}, there are"
            f" {format_bytes(max(limit, 0))}",
            where="memory.policy",
            mend="llmq-nb plan shows what takes it",
        )
    resolved = choice.setting.applied(config)
    chosen = ", ".join(changes(config, choice.setting)) or "the setting as it is"
    pinned = f", {format_bytes(choice.host_total)} pinned" if choice.host_total else ""
    why = f", {SAID}" if pinned and rates.host_link.measured else ""
    announce(f"memory: auto chose {chosen} ({format_bytes(choice.total)}{pinned}{why})")
    return resolved


def _on_gpu(config: Config, batch_bytes: int) -> tuple[Config, int, int | None, Rates]:
    """(the config as the engine will have it, bytes for its allocation and to pin, the card's
    rates)."""
    from llmq_nb.core.device import open_device
    from llmq_nb.train.engine_cuda import with_fp8_units

    device = open_device((config.parallel.devices or (0,))[0])
    try:
        rates = rates_of(device.name)
    except UserError:  # the order of settings hardly depends on the card
        rates = H200
    rates = with_measured_link(rates, device.name)
    available = pinnable_bytes()
    host = host_room(config, None if available is None else available - batch_bytes - PYTHON)
    if host is not None:
        host //= config.ranks_each
    if under_wsl():
        host = WSL_PINNED if host is None else min(host, WSL_PINNED)
    planned = with_fp8_units(config, device)
    room = room_now(config, device.free_bytes()) // config.ranks_per_device
    return planned, room, 0 if device.integrated else host, rates


def _host_bytes() -> int:
    """Free host memory; where the system is silent, no limit."""
    found = available_bytes()
    return 1 << 62 if found is None else found


def _sequences(config: Config) -> int:
    """Of an optimizer step."""
    return config.batch.micro_batch * config.batch.grad_accumulation
