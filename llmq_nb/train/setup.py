"""From a config to what a run needs: the model's shape, the device, the data, the number of steps.

Everything a person can get wrong is found here, before memory is taken or a file is written.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from llmq_nb.comm.cluster import Cluster
from llmq_nb.config import Config
from llmq_nb.core.driver import Driver, find_driver, missing_packages
from llmq_nb.core.errors import UserError
from llmq_nb.core.host import check_host_memory
from llmq_nb.data.loader import Loader, Position
from llmq_nb.data.packing import Packing
from llmq_nb.data.store import TokenSource, TokenStore, check_tokenizer, check_vocabulary
from llmq_nb.data.tokenize import tokenize, tokenize_split
from llmq_nb.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_info
from llmq_nb.io.hf_config import CONFIG_NAME, read_model_config, unread_keys
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.families import preset
from llmq_nb.plan.buffers import make_plan
from llmq_nb.plan.shards import crosses

CUDA_HEAD_DIMS = (64, 128)
"""Head dimensions of the attention kernels."""
BATCH_BYTES = 12
"""Of a token in a step's batch: token, target, segment start. The loader makes the next one."""
Announce = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """Which device a run takes. reason: one line for the person. hint: how to use an idle GPU."""

    kind: str
    reason: str
    hint: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """The shape, the folder it came from (None for a preset) and whether its weights are loaded."""

    model: ModelConfig
    folder: Path | None
    pretrained: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """Opened stores. tokenizer: what decodes them."""

    train: TokenSource
    validation: TokenSource | None
    tokenizer: Tokenizer


def resolve_model(config: Config, announce: Announce) -> ModelSource:
    """Read `model.path` as a folder with config.json, or else as the name of a preset."""
    path, init = Path(config.model.path).expanduser(), config.model.init
    if path.is_dir() or path.name == CONFIG_NAME:
        model = read_model_config(path, seq_len=config.batch.seq_len)
        for key in unread_keys(path):
            announce(f"config.json: key {key!r} is not known here and was left out")
        folder = path if path.is_dir() else path.parent
        has_weights = any(folder.glob("*.safetensors"))
        pretrained = init == "pretrained" or (init == "auto" and has_weights)
    else:
        if os.sep in config.model.path:
            raise UserError(
                f"no such folder: {path}",
                where="model.path",
                mend="give a folder with config.json, or a preset's name",
            )
        model, folder, pretrained = preset(config.model.path), None, False
        if init == "pretrained":
            mend = "model.path must be a folder with weights for init = 'pretrained'"
            raise UserError(f"preset {config.model.path!r} has no weights", mend=mend)
    if config.batch.seq_len > model.max_position:
        raise UserError(
            f"seq_len {config.batch.seq_len}",
            where="batch.seq_len",
            mend=f"the model has {model.max_position} positions",
        )
    outside = [i for i in config.precision.bf16_layers if not -model.L <= i < model.L]
    if outside:
        where = "precision.bf16_layers"
        raise UserError(f"layer {outside[0]}", where=where, mend=f"the model has {model.L} layers")
    return ModelSource(model, folder, pretrained)


def choose_device(config: Config, find: Callable[[], Driver | None] = find_driver) -> Device:
    """The device of `run.device`."""
    found = find()
    asked = config.run.device
    if asked == "cpu":
        return Device("cpu", "device: cpu, as run.device says")
    if found is None:
        if asked == "cuda":
            mend = "install NVIDIA's driver, or set run.device to auto or cpu"
            raise UserError("no NVIDIA GPU or driver", where="run.device", mend=mend)
        return Device("cpu", "device: cpu (no NVIDIA GPU or driver was found)")
    gpu = f"{found.devices[0]} (driver for CUDA {found.cuda})"
    missing = missing_packages(found)
    if missing:
        hint = f"GPU found: {gpu}; to use it: pip install -e '.[{found.extra}]'"
        if asked == "cuda":
            raise UserError(f"{', '.join(missing)} not installed", where="run.device", mend=hint)
        return Device("cpu", f"device: cpu ({', '.join(missing)} not installed)", hint)
    return Device("cuda", f"device: {gpu}")


def settle_device(config: Config, device: Device, model: ModelConfig) -> Device:
    """The device that can train this model: `auto` falls back to the cpu where the GPU cannot."""
    if device.kind != "cuda":
        return device
    error = _cuda_obstacle(config, model)
    if error is None:
        return device
    if config.run.device == "cuda":
        raise error
    why = f"{error.what}{': ' + error.mend if error.mend else ''}"
    return Device("cpu", f"device: cpu ({device.reason.removeprefix('device: ')} is idle; {why})")


def settle_ranks(config: Config, device: Device, cluster: Cluster) -> Config:
    """The config with the devices and machines that the run has: by default every GPU.

    Raises UserError where the machines are not alike.
    """
    p = config.parallel
    devices = p.devices or (0,)
    if p.devices is None and device.kind == "cuda":
        from llmq_nb.core.device import device_count

        devices = tuple(range(device_count()))
    if p.machines > 1 and not cluster.several:
        what, mend = f"machines = {p.machines}, and one process", "start it with mpirun or srun"
        raise UserError(what, where="parallel.machines", mend=mend)
    cluster.same("device", device.kind, "set run.device, or mend what keeps the GPU idle")
    mend = "name as many on each: parallel.devices, CUDA_VISIBLE_DEVICES"
    cluster.same("ranks", len(devices), mend)
    return dataclasses.replace(
        config, parallel=dataclasses.replace(p, devices=devices, machines=cluster.size)
    )


def inference_kind(config: Config, model: ModelConfig) -> Literal["cpu", "cuda"]:
    """Where a model that only runs forward should run: the GPU where it can.

    A run's `device = "cuda"` is no demand here: its checkpoint may be on another machine.
    """
    if config.run.device == "cuda":
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, device="auto"))
    device = settle_device(config, choose_device(config), model)
    return "cuda" if device.kind == "cuda" else "cpu"


def _cuda_obstacle(config: Config, model: ModelConfig) -> UserError | None:
    """Why the GPU cannot train this model in this version, or None."""
    if model.D not in CUDA_HEAD_DIMS:
        mend = f"the GPU's attention has {' and '.join(map(str, CUDA_HEAD_DIMS))}"
        return UserError(f"head_dim {model.D}", where="run.device", mend=mend)
    try:
        from llmq_nb.core.device import open_device
        from llmq_nb.train.engine_cuda import with_fp8_units

        with_fp8_units(config, open_device((config.parallel.devices or (0,))[0]))
    except UserError as error:
        return error
    except Exception as error:  # whatever a broken driver answers, the cpu still trains
        return UserError(f"the driver failed ({error})", where="run.device", mend="llmq-nb doctor")
    return None


def check_supported(config: Config, device: Device) -> None:
    """Refuse by name what this device's engine cannot do yet."""
    p = config.parallel
    for key in ("gather", "reduce"):
        if getattr(p, key) == "nccl":
            mend = "this version copies between GPUs itself: set it to auto"
            raise UserError(f"{key} = 'nccl'", where=f"parallel.{key}", mend=mend)
    if config.world_size > 1 and "gradients" in config.memory.offload and not p.shard_gradients:
        what = "offload = ['gradients', ...] on several ranks"
        mend = "set parallel.shard_gradients = true: the host keeps the shards of sums"
        raise UserError(what, where="memory.offload", mend=mend)
    if config.world_size > 1 and config.memory.disk:
        what = f"disk = {list(config.memory.disk)} on several ranks"
        raise UserError(what, where="memory.disk", mend="it works on one rank: leave it out")
    if p.machines > 1:
        _check_machines(config, device)
    if device.kind == "cpu" and config.memory.offload:
        mend = "the cpu engine's memory is host memory already: leave it out"
        raise UserError(
            f"offload = {list(config.memory.offload)}", where="memory.offload", mend=mend
        )


def _check_machines(config: Config, device: Device) -> None:
    """Refuse what would send weights between machines in every micro-step."""
    p = config.parallel
    if crosses(config):
        what, where = f"offload = {list(config.memory.offload)}", "memory.offload"
        if p.shard_weights:
            what, where = "shard_weights = true", "parallel.shard_weights"
        mend = "products would read weights of other machines: leave it out"
        raise UserError(f"{what} on several machines", where=where, mend=mend)
    if device.kind == "cuda" and config.ranks_per_device > 1:
        what = f"devices = {list(p.devices or ())} on several machines"
        raise UserError(what, where="parallel.devices", mend="NCCL wants a GPU for each rank")


def check_same_files(cluster: Cluster, source: ModelSource, tokens: str, windows: int) -> None:
    """Raise UserError where machines do not read the same data or weights."""
    mend = "all machines must see the same files: a folder that they share, or equal copies"
    cluster.same("data.train", f"{tokens} in {windows} windows", mend)
    folder = source.folder if source.pretrained else None
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    cluster.same("weights", [(file.name, file.stat().st_size) for file in files], mend)


def check_memory(config: Config, model: ModelConfig) -> None:
    """Raise UserError where the cpu engine would not fit into the machine's memory."""
    plan = make_plan(config, model)
    needed = config.ranks_each * (plan.total + plan.host_total)
    check_host_memory(needed + batch_bytes(config))


def batch_bytes(config: Config) -> int:
    """Host memory of this step's batch and the next one's."""
    return 2 * BATCH_BYTES * config.tokens_per_step


def check_writable(folder: Path) -> None:
    """Raise UserError where the folder cannot be made or written; makes nothing."""
    nearest = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    if not nearest.is_dir():
        mend = f"{nearest} is a file: set run.out_dir to a folder"
        raise UserError(f"cannot write to {folder}", where="run.out_dir", mend=mend)
    if not os.access(nearest, os.W_OK | os.X_OK):
        mend = f"{nearest} is not writable: set run.out_dir to another folder"
        raise UserError(f"cannot write to {folder}", where="run.out_dir", mend=mend)


def open_data(
    config: Config, source: ModelSource, announce: Announce, cluster: Cluster | None = None
) -> Data:
    """Open the stores, making them from `data.sources` on first use: the first process does, and
    the others open them then."""
    if cluster is None or not cluster.several:
        return _open_data(config, source, announce)
    if cluster.leads:
        data = _open_data(config, source, announce)
        cluster.gather(None)
        return data
    cluster.gather(None)
    made = dataclasses.replace(config.data, sources=())
    return _open_data(dataclasses.replace(config, data=made), source, announce)


def _open_data(config: Config, source: ModelSource, announce: Announce) -> Data:
    d = config.data
    tokenizer = load_tokenizer(tokenizer_path(config, source))
    train, validation = Path(d.train), None if d.validation is None else Path(d.validation)
    if d.sources:
        if validation is not None and validation.absolute() == train.absolute():
            mend = "name another store, or leave it out"
            raise UserError(f"{d.validation} is data.train", where="data.validation", mend=mend)
        if tokenizer.vocab_size > source.model.V:
            raise UserError(
                f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids",
                where="data.tokenizer",
                mend=f"the model has {source.model.V}: use the model's tokenizer",
            )
        _make_stores(config, tokenizer, train, validation, announce)
    stores = Data(
        TokenStore(train), None if validation is None else TokenStore(validation), tokenizer
    )
    for store in (stores.train, stores.validation):
        if store is not None:
            check_vocabulary(store, source.model.V)
            check_tokenizer(store, tokenizer_info(tokenizer))
    if stores.validation is not None:
        Packing(stores.validation, config.batch.seq_len, d.packing)  # its errors, before training
    return stores


def _make_stores(
    config: Config, tokenizer: Tokenizer, train: Path, validation: Path | None, announce: Announce
) -> None:
    sources, kind = list(config.data.sources), config.data.format
    if validation is None:
        made = [tokenize(sources, train, tokenizer, kind)]
    else:
        made = list(tokenize_split(sources, train, validation, tokenizer, format=kind))
    for store in made:
        verb = "data: found" if store.reused else "data: tokenized"
        announce(f"{verb} {store.path} ({store.documents:,} documents, {store.tokens:,} tokens)")
    if made[0].skipped:  # counted once for all stores
        announce(f"data: {made[0].skipped:,} files skipped (not UTF-8)")


def tokenizer_path(config: Config, source: ModelSource) -> str:
    """`data.tokenizer`, or the model folder's, or bytes."""
    if config.data.tokenizer is not None:
        return config.data.tokenizer
    if source.folder is not None and (source.folder / "tokenizer.json").is_file():
        return str(source.folder)
    return "bytes"


def total_steps(config: Config, windows_per_epoch: int) -> int:
    """Optimizer steps of the run. At least one, however short the data."""
    if config.schedule.steps is not None:
        return config.schedule.steps
    windows = (config.schedule.epochs or 1.0) * windows_per_epoch
    return max(1, int(windows // (config.tokens_per_step // config.batch.seq_len)))


def open_loader(config: Config, store: TokenSource, position: Position) -> Loader:
    """The training loader of all ranks, from `position` on."""
    return Loader(
        store,
        seq_len=config.batch.seq_len,
        micro_batch=config.batch.micro_batch,
        grad_accumulation=config.batch.grad_accumulation,
        world_size=config.world_size,
        seed=config.data.seed,
        packing=config.data.packing,
        position=position,
        token_order=True,
    )
