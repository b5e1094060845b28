"""One run, as a TOML file says it: the sections, their keys, their defaults (stated only here).

Every key is documented at its field. `llmq_nb.config_file` reads and writes the files. Anything
that can be derived is a method, never a field; `None` means "derive", and the field says how.
"""

import dataclasses
import math
from typing import Literal

from llmq_nb.core.errors import UserError


def check(condition: bool, what: str, key: str, mend: str) -> None:
    """Raise the UserError of a value that is out of range."""
    if not condition:
        raise UserError(what, where=key, mend=mend)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    name: str = "run"
    """Names the run in logs and trackers."""
    out_dir: str = "runs/{name}"
    """Folder for checkpoints, logs and exports; `{name}` is the run's name."""
    seed: int = 42
    """Seed of the initial weights, stochastic rounding and sampling."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes the GPU where one can be used and says in one line which it took and why."""
    cuda_graphs: Literal["auto"] | bool = "auto"
    """Replay recorded CUDA graphs; false launches the same work eagerly (same bits)."""

    def __post_init__(self) -> None:
        check(bool(self.name), "empty name", "run.name", "give the run a name")
        plain = not {"/", "\0"} & set(self.name) and self.name not in (".", "..")
        check(plain, f"{self.name!r}", "run.name", "it names a folder: no slashes; see run.out_dir")
        check(0 <= self.seed < 2**32, f"{self.seed}", "run.seed", "0 to 4294967295")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    path: str
    """A folder with config.json (and weights), or the name of a preset such as `qwen2.5-0.5b`."""
    init: Literal["auto", "random", "pretrained"] = "auto"
    """auto: pretrained where the folder has weights, random for presets and folders without."""

    def __post_init__(self) -> None:
        check(bool(self.path), "empty path", "model.path", "a folder or the name of a preset")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    train: str
    """Token store to train on (`.zarr`); made from `sources` on first use."""
    validation: str | None = None
    """Token store for evaluation; made from 5 % of the same documents."""
    sources: tuple[str, ...] = ()
    """Files or globs to tokenize on first use; `${stdlib}` is this Python's standard library."""
    tokenizer: str | None = None
    """`bytes`, a tokenizer.json, or its folder; None: the model folder's, else bytes."""
    format: Literal["auto", "text", "jsonl", "parquet", "chat", "llmq-bin", "llmc-bin"] = "auto"
    """Format of the sources."""
    packing: Literal["stream", "pack"] = "stream"
    """stream cuts windows from the text; pack puts whole documents into windows (fine-tuning) and
    cuts only those that are longer than one."""
    seed: int = 1234
    """Seed of the order of the windows."""

    def __post_init__(self) -> None:
        check(bool(self.train), "empty path", "data.train", "the path of a token store")
        check(0 <= self.seed < 2**32, f"{self.seed}", "data.seed", "0 to 4294967295")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    micro_batch: int = 4
    """Sequences per rank per forward pass."""
    grad_accumulation: int = 1
    """Micro-batches per optimizer step."""
    seq_len: int = 1024
    """Tokens per sequence."""

    def __post_init__(self) -> None:
        for key in ("micro_batch", "grad_accumulation", "seq_len"):
            value = getattr(self, key)
            check(value >= 1, f"{value}", f"batch.{key}", "must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Storage of weights, activations and gradients."""
    matmul: Literal["bf16", "e4m3"] | None = None
    """Format of the block products' inputs; None: the same as `dtype`."""
    gradient: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of the activation gradients in FP8 products."""
    gradient_accumulation: Literal["bf16", "fp32"] | None = None
    """Storage of the weight gradients; None: the same as `dtype`."""
    bf16_layers: tuple[int, ...] = ()
    """Layers whose products stay in BF16 when `matmul` is FP8; negative counts from the end."""
    fast_accumulation: bool = False
    """FP8 products without the periodic promotion to FP32 (Ada and Hopper)."""
    fp8_units: Literal["auto", "hardware", "emulate"] = "auto"
    """emulate: BF16 products of the FP8 codes, the same numbers on cards without FP8 units."""

    def __post_init__(self) -> None:
        check(
            self.dtype == "bf16" or self.matmul is None,
            f"matmul = {self.matmul!r} with dtype = 'fp32'",
            "precision.matmul",
            "FP8 and BF16 products need dtype = 'bf16'",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    learning_rate: float = 1e-3
    """Peak learning rate."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled, on matrices and embeddings; none on norms and biases."""
    max_grad_norm: float = 1.0
    """Global L2 norm above which gradients are scaled down; inf never clips."""
    z_loss: float = 0.0
    """Weight of lse^2 in the loss."""
    master: Literal["fp32", "bf16"] = "fp32"
    """Storage of the copy that the optimizer updates."""
    m: Literal["fp32", "bf16", "e4m3"] = "fp32"
    """Storage of the first moment; e4m3 has one scale for each 128 values."""
    v: Literal["fp32", "bf16"] = "fp32"
    """Storage of the second moment."""

    def __post_init__(self) -> None:
        ok = self.epsilon > 0  # a row without a gradient would become 0 / 0
        check(ok, f"{self.epsilon}", "optimizer.epsilon", "must be above 0")
        for key in ("learning_rate", "epsilon", "weight_decay", "z_loss"):
            value = getattr(self, key)
            ok = value >= 0 and math.isfinite(value)
            check(ok, f"{value}", f"optimizer.{key}", "must be 0 or more and finite")
        for key in ("beta1", "beta2"):
            value = getattr(self, key)
            check(0 <= value < 1, f"{value}", f"optimizer.{key}", "must be in [0, 1)")
        ok = self.max_grad_norm > 0
        check(ok, f"{self.max_grad_norm}", "optimizer.max_grad_norm", "must be above 0 (or inf)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    kind: Literal["cosine", "linear", "wsd"] = "cosine"
    """Decay after warm-up; wsd is constant until its cooldown."""
    steps: int | None = None
    """Optimizer steps; None: `epochs` passes over the data."""
    epochs: float | None = None
    """Passes over the data; None (and no `steps`): 1."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0, the first step's rate, to the peak."""
    cooldown_steps: int = 0
    """Last steps, in which the rate falls to the floor as 1 - sqrt (any kind)."""
    final_fraction: float = 0.1
    """Floor, as a fraction of the peak; the last step has it exactly."""

    def __post_init__(self) -> None:
        both = self.steps is not None and self.epochs is not None
        check(not both, "steps and epochs", "schedule", "set only one of the two")
        check(
            self.steps is None or self.steps >= 1, f"{self.steps}", "schedule.steps", "at least 1"
        )
        ok = self.epochs is None or 0 < self.epochs < math.inf
        check(ok, f"{self.epochs}", "schedule.epochs", "must be above 0 and finite")
        for key in ("warmup_steps", "cooldown_steps"):
            value = getattr(self, key)
            check(value >= 0, f"{value}", f"schedule.{key}", "must be 0 or more")
        ok = 0 <= self.final_fraction <= 1
        check(ok, f"{self.final_fraction}", "schedule.final_fraction", "must be in [0, 1]")


Recompute = Literal["norm", "swiglu", "ffn", "qkv", "attention", "block"]
Offload = Literal["m", "v", "master", "quants", "gradients", "residual"]
Disk = Literal["m", "v"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    device_limit: str | None = None
    """Most device memory that the process may take, for example "15GiB"; None: what is free."""
    host_limit: str | None = None
    """Most pinned host memory; None: what the machine allows."""
    policy: Literal["manual", "auto"] = "manual"
    """auto picks the fastest combination of the levers below that fits."""
    recompute: tuple[Recompute, ...] = ()
    """Activations that backward computes again instead of keeping."""
    offload: tuple[Offload, ...] = ()
    """Buffers that live in pinned host memory."""
    disk: tuple[Disk, ...] = ()
    """Optimizer states that live on the disk of the run's folder, in a file that ends with the run.
    Each update reads and writes them: slow, for what host memory cannot hold."""
    transfer: Literal["auto", "copy", "zero_copy"] = "auto"
    """How offloaded optimizer states reach the GPU; beside `disk` always zero_copy."""
    write_combined: bool = False
    """Pin it past the host's caches: `llmq-nb bench offload` shows whether the link gains; pinning
    and checkpoints take longer."""
    keep_quants: bool = True
    """Keep the FP8 weights between steps; false requantises them from the master copy."""
    head_chunks: int = 1
    """Slices in which the LM head runs; the logits of one slice exist at a time."""

    def __post_init__(self) -> None:
        ok = self.head_chunks >= 1
        check(ok, f"{self.head_chunks}", "memory.head_chunks", "must be at least 1")
        both = [state for state in self.disk if state in self.offload]
        what = f"{both} is in memory.offload too"
        check(not both, what, "memory.disk", "a state has one place: leave it out of one of them")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    devices: tuple[int, ...] | None = None
    """Device of each rank of a machine; several ranks may share one. None: every GPU (one rank on
    the cpu)."""
    machines: int = 1
    """Machines with such devices, a process on each. A run has as many as mpirun or srun starts."""
    shard_weights: bool = False
    shard_gradients: bool = False
    gather: Literal["auto", "memcpy", "nccl"] = "auto"
    """Transport of the weight gathers."""
    reduce: Literal["auto", "memcpy", "nccl"] = "auto"
    """Transport of the gradient reductions."""
    peer_copies: Literal["auto", "off"] = "auto"
    """Copy from GPU to GPU where the machine can; off: always through pinned host memory."""

    def __post_init__(self) -> None:
        ok = self.devices is None or (len(self.devices) > 0 and min(self.devices) >= 0)
        check(ok, f"{self.devices}", "parallel.devices", "device numbers, one for each rank")
        check(self.machines >= 1, f"{self.machines}", "parallel.machines", "must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 100
    """Optimizer steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Newest checkpoints to keep; 0 keeps all."""
    major_every: int = 0
    """Checkpoints at multiples of this many steps are never deleted; 0: none."""

    def __post_init__(self) -> None:
        for key in ("every", "keep", "major_every"):
            value = getattr(self, key)
            check(value >= 0, f"{value}", f"checkpoint.{key}", "must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    every: int = 100
    """Optimizer steps between evaluations; 0: only at the end."""
    steps: int = 20
    """Micro-batches of one evaluation; 0 takes the whole validation store."""

    def __post_init__(self) -> None:
        for key in ("every", "steps"):
            value = getattr(self, key)
            check(value >= 0, f"{value}", f"eval.{key}", "must be 0 or more")


Tracker = Literal["tensorboard", "wandb", "trackio"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    every: int = 1
    """Optimizer steps between two step records."""
    trackers: tuple[Tracker, ...] = ()
    """Writers beside log.jsonl; each needs its extra."""
    health_every: int = 0
    """Optimizer steps between two FP8 health records; 0: none."""
    device_every: int = 10
    """Optimizer steps between two records of the GPUs' power, clocks, memory and PCIe; 0: none."""
    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """What a NaN or infinite gradient norm does: stop the run, skip that step's update, or go back
    to the newest checkpoint and on with the data after the bad step's."""
    spike: Literal["off", "stop", "skip", "rollback"] = "off"
    """What a jump of the loss does. Its update is made by then: skip goes back to the newest
    checkpoint and makes the steps again without that one, rollback goes on with later data."""
    spike_deviations: float = 6.0
    """A jump: a loss this many deviations above the median of the last steps (train/policy.py)."""
    rollbacks: int = 10
    """Most times that a run goes back to a checkpoint; then it stops."""
    sample: str | None = None
    """A prompt whose continuation is printed at the end of the run; None: none."""

    def __post_init__(self) -> None:
        check(self.every >= 1, f"{self.every}", "log.every", "must be at least 1")
        ok = 0 < self.spike_deviations < math.inf
        check(ok, f"{self.spike_deviations}", "log.spike_deviations", "must be above 0 and finite")
        for key in ("health_every", "device_every", "rollbacks"):
            value = getattr(self, key)
            check(value >= 0, f"{value}", f"log.{key}", "must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run. Frozen: a change is a new value (`dataclasses.replace`)."""

    model: ModelSection
    data: DataConfig
    run: RunConfig = RunConfig()
    batch: BatchConfig = BatchConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()

    @property
    def world_size(self) -> int:
        """Ranks of all machines."""
        return self.parallel.machines * self.ranks_each

    @property
    def ranks_each(self) -> int:
        """Ranks of a machine: one for each entry of `parallel.devices`, once that is settled."""
        return len(self.parallel.devices or (0,))

    @property
    def ranks_per_device(self) -> int:
        """The most ranks that share a device."""
        devices = self.parallel.devices or (0,)
        return max(devices.count(device) for device in devices)

    @property
    def out_dir(self) -> str:
        """The run's folder."""
        return self.run.out_dir.replace("{name}", self.run.name)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step on all ranks, padding included."""
        b = self.batch
        return b.micro_batch * b.seq_len * b.grad_accumulation * self.world_size
