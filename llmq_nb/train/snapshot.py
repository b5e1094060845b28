"""What a checkpoint of a run holds, and back: parts by Hugging Face name, and the state.

    master, m, v        one array for each Hugging Face tensor (rows of our fused ones)
    m_scale             float32 scales of an e4m3 first moment, by our name: they span fused rows

The padded rows of the vocabulary are not saved: they are zero and stay zero.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import Config
from llmq_nb.config_file import to_toml
from llmq_nb.core.errors import UserError
from llmq_nb.core.tensor import Tensor
from llmq_nb.data.loader import Position
from llmq_nb.data.store import TokenSource
from llmq_nb.model.config import Llama3Rope, ModelConfig
from llmq_nb.model.parameters import Parameter
from llmq_nb.train.checkpoint import Checkpoint, read_checkpoint
from llmq_nb.train.eager import Engine as Readable
from llmq_nb.train.engine import Engine
from llmq_nb.train.initial import copy_to_weights

PARTS = ("master", "m", "v")
POLICY = ("recent", "left_out", "rollbacks")
"""Fields of Progress that the policies of `[log]` need to act again as they did."""


@dataclasses.dataclass(slots=True)
class Progress:
    """How far a run is. step: optimizer steps done. updates: those that changed the weights.

    recent: losses of the last steps, where spikes are looked for. left_out: (step, its loss) of
    spikes whose steps are made without an update. rollbacks: times the run went back.
    """

    step: int = 0
    updates: int = 0
    position: Position = dataclasses.field(default_factory=Position)
    recent: tuple[float, ...] = ()
    left_out: tuple[tuple[int, float], ...] = ()
    rollbacks: int = 0


def parts(engine: Readable) -> dict[str, Iterable[tuple[str, NDArray[Any]]]]:
    """Streams of (name, array), read from the device one tensor at a time."""
    out: dict[str, Iterable[tuple[str, NDArray[Any]]]] = {
        part: _views(engine, part) for part in PARTS
    }
    if engine.states[0].m_scale is not None:
        out["m_scale"] = _scales(engine)
    return out


def part_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of each part, for the check of free space before a run."""
    out = {part: sum(getattr(s, part).nbytes for s in engine.states) for part in PARTS}
    out["m_scale"] = sum(s.m_scale.nbytes for s in engine.states if s.m_scale is not None)
    return out


def _views(engine: Readable, part: str) -> Iterator[tuple[str, NDArray[Any]]]:
    for state in engine.states:
        array = engine.read(getattr(state, part))
        for view in state.parameter.views:
            yield view.hf_name, array[view.start : view.stop]


def _scales(engine: Readable) -> Iterator[tuple[str, NDArray[Any]]]:
    for state in engine.states:
        if state.m_scale is not None:
            yield state.parameter.name, engine.read(state.m_scale)


def run_state(
    config: Config,
    model: ModelConfig,
    progress: Progress,
    train: TokenSource,
    tuning: dict[str, int],
) -> dict[str, Any]:
    """The JSON state beside the parts."""
    return {
        "model": dataclasses.asdict(model),
        "config": to_toml(config),
        "updates": progress.updates,
        "position": dataclasses.asdict(progress.position),
        "policy": {key: getattr(progress, key) for key in POLICY},
        "windows": _windows(config, train),
        "tuning": tuning,
    }


def _windows(config: Config, train: TokenSource) -> dict[str, Any]:
    """What the windows of the training data and their order depend on, by key of the config."""
    return {
        "batch.seq_len": config.batch.seq_len,
        "data.packing": config.data.packing,
        "data.seed": config.data.seed,
        "data.train": f"a store of {len(train)} tokens",
    }


def check_same_windows(checkpoint: Checkpoint, config: Config, train: TokenSource) -> None:
    """Raise UserError where the checkpoint's position means nothing in this run's data."""
    ours = _windows(config, train)
    for key, saved in checkpoint.state.get("windows", {}).items():
        if ours[key] != saved:
            raise UserError(
                f"the checkpoint's run had {saved!r}, this one has {ours[key]!r}",
                where=key,
                mend="set it as it was, or start a new run with model.path = that run's export",
            )


def saved_model(checkpoint: Checkpoint) -> ModelConfig:
    """The shape of the model in a checkpoint."""
    fields = dict(checkpoint.state["model"])
    if fields["rope_scaling"] is not None:
        fields["rope_scaling"] = Llama3Rope(**fields["rope_scaling"])
    for key in ("bos_ids", "eos_ids"):
        fields[key] = tuple(fields[key])
    return ModelConfig(**fields)


def open_checkpoint(path: Path, model: ModelConfig) -> Checkpoint:
    """A complete checkpoint of this model. UserError names the first difference in shape."""
    checkpoint = read_checkpoint(path)
    saved = saved_model(checkpoint)
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(model, field.name), getattr(saved, field.name)
        if ours != theirs:
            raise UserError(
                f"checkpoint of another model ({field.name} {theirs}, this run has {ours})",
                where=str(path),
                mend="choose another run.name, or --resume none to start anew",
            )
    return checkpoint


def restore(engine: Engine, checkpoint: Checkpoint) -> Progress:
    """Put a checkpoint's parts into the engine; returns how far it was."""
    for part in PARTS:
        tensors = checkpoint.tensors(part)
        for state in engine.states:
            _restore(engine, getattr(state, part), state.parameter, tensors, checkpoint.path / part)
    if engine.states[0].m_scale is not None:
        scales = checkpoint.tensors("m_scale")
        for state in engine.states:
            assert state.m_scale is not None
            engine.write(state.m_scale, scales[state.parameter.name])
    for state in engine.states:
        copy_to_weights(engine, state)
    saved = checkpoint.state
    policy = saved.get("policy", {"recent": (), "left_out": (), "rollbacks": 0})
    return Progress(
        step=checkpoint.step,
        updates=saved["updates"],
        position=Position(**saved["position"]),
        recent=tuple(policy["recent"]),
        left_out=tuple((step, loss) for step, loss in policy["left_out"]),
        rollbacks=policy["rollbacks"],
    )


def clear_moments(engine: Engine) -> None:
    """The optimizer's states as they are before the first step: zero."""
    for state in engine.states:
        for tensor in (state.m, state.v, state.m_scale):
            if tensor is not None:
                engine.write(tensor, np.zeros(tensor.shape, tensor.dtype.numpy))


def _restore(
    engine: Engine,
    tensor: Tensor,
    parameter: Parameter,
    tensors: Mapping[str, NDArray[Any]],
    where: Path,
) -> None:
    array = np.zeros(tensor.shape, tensor.dtype.numpy)
    for view in parameter.views:
        if view.hf_name not in tensors:
            raise UserError(f"missing tensor {view.hf_name}", where=str(where))
        saved = tensors[view.hf_name]
        if saved.dtype != array.dtype:
            part = where.name
            raise UserError(
                f"{part} is stored as {saved.dtype}, this run keeps {array.dtype}",
                where=str(where),
                mend=f"set optimizer.{part} as the run had it",
            )
        array[view.start : view.stop] = saved
    engine.write(tensor, array)


def fused(parameter: Parameter, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """A parameter in our layout from its Hugging Face tensors; padded rows are zero."""
    first = tensors[parameter.views[0].hf_name]
    out = np.zeros(parameter.shape, first.dtype)
    for view in parameter.views:
        out[view.start : view.stop] = tensors[view.hf_name]
    return out
