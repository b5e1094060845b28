"""Export: a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    OUT/config.json  generation_config.json  model.safetensors (or shards and their index)
        tokenizer files as they are  .llmq_nb_export (what we wrote)

Everything goes to a staging folder beside OUT, is fsynced and then renamed, so OUT is complete or
absent. Tensors leave one parameter at a time: memory is one parameter and its rounded copy.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.core.files import (
    atomic_file,
    check_space,
    fsync_path,
    json_bytes,
    nearest_existing,
)
from llmq_nb.io.config_json import model_config_json
from llmq_nb.io.export_fp8 import fp8_codes, fp8_scale, quantization_json
from llmq_nb.io.hf_config import write_model_config
from llmq_nb.io.safetensors_io import TensorSpec, write_sharded
from llmq_nb.io.weights import SCALE_SUFFIX
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import Parameter, RowView, model_parameters

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
GENERATION_NAME = "generation_config.json"
MARKER_NAME = ".llmq_nb_export"
"""Lists our files: a folder that holds nothing else may be replaced by a new export."""
DEFAULT_SHARD_SIZE = 5 * 10**9
_SLACK = 4 << 20
"""Bytes kept free beyond the payload: headers, JSON files, file-system blocks."""


def export_model(
    out_dir: str | os.PathLike[str],
    config: ModelConfig,
    get: Callable[[Parameter], NDArray[Any]],
    *,
    dtype: DType = DType.BF16,
    tokenizer: str | os.PathLike[str] | Mapping[str, bytes] | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    generation: Mapping[str, Any] | None = None,
    fp8: Mapping[str, np.float32] | None = None,
) -> Path:
    """Write the model to `out_dir` and return its path.

    get: the parameter's array in our shape (padded vocabulary, fused rows), called once for each in
        forward order; rounded to nearest into `dtype` (fp32 or bf16).
    fp8: absmax of the parameters that become e4m3 codes (`io.export_fp8`), for dtype bf16. `get` is
        then called for the others first.
    tokenizer: a folder whose tokenizer files are copied, a `tokenizer.json`, or the files by name.
    generation: keys for generation_config.json; None takes the file beside the tokenizer if there
        is one. Token ids default to the config's.
    UserError before anything is written: foreign files in `out_dir`, folder not writable, too
    little disk, no tokenizer there, a shape that transformers lacks. MachineError if a write fails.
    """
    if dtype not in (DType.BF16, DType.FP32):
        raise UserError(f"export as {dtype}", mend="choose bf16 or fp32")
    if fp8 and dtype is not DType.BF16:
        raise UserError("FP8 weights beside FP32", mend="choose bf16 for the other tensors")
    if max_shard_size < 1:
        raise UserError(f"max_shard_size {max_shard_size}", mend="must be positive [bytes]")
    out = Path(os.path.realpath(out_dir))
    model_config_json(config, dtype)  # its errors come before any file
    copies = _tokenizer_files(tokenizer)
    if generation is None and isinstance(tokenizer, str | os.PathLike):
        generation = _generation_beside(Path(tokenizer))
    settings = _generation(config, generation or {})
    fp8 = fp8 or {}
    specs, owner = _plan(config, dtype, fp8)
    check_target(out)
    # an old export stays until the new one is complete, so its bytes do not count as free
    payload = sum(s.nbytes for s in specs) + sum(map(len, copies.values()))
    mend = "free some, or choose another disk"
    check_space(out.parent, payload + _SLACK, "the export", mend=mend)
    with _staging(out) as stage:
        quantization = quantization_json(config, fp8) if fp8 else None
        write_model_config(config, stage, dtype, quantization)
        _write_json(stage / GENERATION_NAME, settings)
        for name, data in copies.items():
            with atomic_file(stage / name) as file:
                file.write(data)
        read = _OneAtATime(get, owner, dtype, fp8)
        write_sharded(stage, specs, read, max_shard_size=max_shard_size)
        files = sorted(path.name for path in stage.iterdir())
        _write_json(stage / MARKER_NAME, {"files": files})
    return out


class _OneAtATime:
    """Hugging Face tensor by name from fused parameters, holding the latest one only."""

    def __init__(
        self,
        get: Callable[[Parameter], NDArray[Any]],
        owner: dict[str, tuple[Parameter, RowView]],
        dtype: DType,
        fp8: Mapping[str, np.float32],
    ) -> None:
        self._get, self._owner, self._dtype, self._fp8 = get, owner, dtype, fp8
        self._name, self._array = "", None

    def __call__(self, hf_name: str) -> NDArray[Any]:
        parameter, view = self._owner[hf_name]
        if hf_name != view.hf_name:
            return fp8_scale(self._fp8[parameter.name])
        if self._array is None or self._name != parameter.name:
            self._array = None  # freed before the next one is made
            array = self._get(parameter)
            if array.shape != parameter.shape:
                raise ValueError(f"{parameter.name} is {array.shape}, not {parameter.shape}")
            if parameter.name in self._fp8:
                array = fp8_codes(array, self._fp8[parameter.name])
            self._name, self._array = parameter.name, array
        array = self._array[view.start : view.stop]
        return array if parameter.name in self._fp8 else array.astype(self._dtype.numpy, copy=False)


def _plan(
    config: ModelConfig, dtype: DType, fp8: Mapping[str, np.float32]
) -> tuple[list[TensorSpec], dict[str, tuple[Parameter, RowView]]]:
    """Tensors in forward order, and the parameter and rows that each comes from."""
    specs, owner = [], {}
    for p in model_parameters(config):
        for view in p.views:
            shape = (view.stop - view.start, *p.shape[1:])
            stored = DType.E4M3 if p.name in fp8 else dtype
            specs.append(TensorSpec(view.hf_name, stored.numpy, shape))
            owner[view.hf_name] = (p, view)
            if p.name in fp8:
                scale = view.hf_name + SCALE_SUFFIX
                specs.append(TensorSpec(scale, DType.FP32.numpy, ()))
                owner[scale] = (p, view)
    return specs, owner


def _tokenizer_files(
    source: str | os.PathLike[str] | Mapping[str, bytes] | None,
) -> Mapping[str, bytes]:
    """Content of each tokenizer file by its name in the export."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_file() and path.name != "tokenizer.json":
        return {"tokenizer.json": path.read_bytes()}
    folder = path.parent if path.is_file() else path
    files = (folder / name for name in TOKENIZER_FILES)
    found = {file.name: file.read_bytes() for file in files if file.is_file()}
    if not found:
        raise UserError(f"no tokenizer files in {folder}", mend="expected tokenizer.json there")
    return found


def _generation(config: ModelConfig, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of generation_config.json; ids of the config where none are given."""
    eos = list(config.eos_ids)
    ids: dict[str, Any] = {
        "bos_token_id": config.bos_ids[0] if config.bos_ids else None,
        "eos_token_id": eos if len(eos) > 1 else (eos[0] if eos else None),
        "pad_token_id": config.pad_id,
    }
    return {**{k: v for k, v in ids.items() if v is not None}, **generation}


def _generation_beside(tokenizer: Path) -> dict[str, Any] | None:
    """The generation_config.json beside a tokenizer, None if there is none."""
    path = (tokenizer if tokenizer.is_dir() else tokenizer.parent) / GENERATION_NAME
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"no JSON object ({error})", where=str(path)) from error


def check_target(out_dir: str | os.PathLike[str]) -> None:
    """`out_dir` must be absent, empty or an export of ours, and its parent writable. UserError."""
    out = Path(os.path.realpath(out_dir))
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file", mend="give a folder")
    if out.is_dir():
        foreign = _foreign(out)
        if foreign is not None:
            mend = "choose a new folder, or empty this one"
            raise UserError(f"'{foreign}' is in {out} and no export wrote it", mend=mend)
    parent = nearest_existing(out.parent)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {parent}", mend="choose another output folder")


def _foreign(out: Path) -> str | None:
    """The first name in `out` that our marker does not list."""
    try:
        ours = set(json.loads((out / MARKER_NAME).read_bytes())["files"]) | {MARKER_NAME}
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    return min((path.name for path in out.iterdir() if path.name not in ours), default=None)


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends; removed if the block fails."""
    stage = out.with_name(f".{out.name}.llmq_nb_staging")
    old = out.with_name(f".{out.name}.llmq_nb_old")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _restore(old, out)
        shutil.rmtree(stage, ignore_errors=True)  # of an export that was killed
        stage.mkdir()
        yield stage
        fsync_path(stage)
        if out.exists():
            out.rename(old)
        stage.rename(out)
        fsync_path(out.parent)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise MachineError(f"export to {out} failed, nothing was changed: {reason}") from error
    finally:
        _restore(old, out)
        shutil.rmtree(stage, ignore_errors=True)


def _restore(old: Path, out: Path) -> None:
    """Between the two renames of a replacement the old export is the only complete one."""
    if old.exists() and not out.exists():
        old.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write(json_bytes(data))
