"""Weights of a Hugging Face folder: found, checked by their headers, read a parameter at a time.

    WeightFiles     which file holds which tensor: model.safetensors, or an index and its shards
    (e4m3 weights with one scale each, `<name>_scale_inv`, are read as BF16)
    check_weights   every tensor there, none too many, every shape right; no data is read
    load_weights    the same checks, then (parameter, array), fused from the Hugging Face views

Nothing is left uninitialised and nothing is skipped in silence: a missing or an unknown tensor is
an error. Two kinds of surplus are known: rotary buffers of old files are ignored, and the
`lm_head.weight` of a tied model must equal the embedding.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.io.safetensors_io import INDEX_SUFFIX, SafetensorsFile, TensorSpec
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import Parameter, model_parameters

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model" + INDEX_SUFFIX
SCALE_SUFFIX = "_scale_inv"
"""Follows the name of a weight that is stored as e4m3 codes: its scale, weight ~= codes * scale."""
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"

_BUFFER = re.compile(r".*\brotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
"""Constants that old versions of transformers saved with the weights."""
_READABLE = frozenset({DType.FP32.numpy, DType.BF16.numpy, np.dtype(np.float16)})


class WeightFiles:
    """The safetensors files of a folder as one mapping from tensor names.

    UserError if there are none, if a shard is missing or broken, or if index and shards disagree.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._file_of: dict[str, SafetensorsFile] = {}
        if not self.folder.is_dir():
            raise UserError(f"no such model folder {self.folder}")
        if (self.folder / SINGLE_NAME).is_file():
            self._add(SafetensorsFile(self.folder / SINGLE_NAME))
        elif (self.folder / INDEX_NAME).is_file():
            self._add_shards(self.folder / INDEX_NAME)
        else:
            raise self._no_files()

    def _no_files(self) -> UserError:
        if list(self.folder.glob("model-*-of-*.safetensors")):
            what, mend = f"no {INDEX_NAME}", "it lists the shards: copy it too"
        elif list(self.folder.glob("*.bin")) + list(self.folder.glob("*.pth")):
            what = f"no {SINGLE_NAME}"
            mend = "pickled weights are not read: save them as safetensors with transformers"
        else:
            what, mend = f"no {SINGLE_NAME} and no {INDEX_NAME}", "is this a model folder?"
        return UserError(what, where=str(self.folder), mend=mend)

    def _add(self, file: SafetensorsFile) -> None:
        self._file_of.update(dict.fromkeys(file.specs, file))

    def _add_shards(self, index: Path) -> None:
        weight_map = _weight_map(index)
        shards = sorted(set(weight_map.values()))
        for name in shards:
            if Path(name).name != name:
                raise UserError(f"shard name '{name}'", where=str(index), mend="must be a name")
            if not (self.folder / name).is_file():
                mend = f"one of {len(shards)} shards: copy or download it"
                raise UserError(f"missing shard {name}", where=str(self.folder), mend=mend)
        for name in shards:
            file = SafetensorsFile(self.folder / name)
            for tensor in file.specs:
                if weight_map.get(tensor) != name:
                    raise UserError(
                        f"tensor {tensor} of {name} is not listed there",
                        where=str(index),
                        mend="index and shards are of two exports: copy the folder again",
                    )
            self._add(file)
        if absent := sorted(set(weight_map) - set(self._file_of)):
            raise UserError(
                f"tensor {absent[0]} is not in its shard {weight_map[absent[0]]}",
                where=str(self.folder),
                mend="index and shards are of two exports: copy the folder again",
            )

    def names(self) -> list[str]:
        """Every tensor but the scales of codes, sorted."""
        scales = {name + SCALE_SUFFIX for name in self._file_of}
        return sorted(set(self._file_of) - scales)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor; BF16 of codes. KeyError if there is none of that name."""
        spec = self._file_of[name].specs[name]
        scaled = self._scale_spec(name)
        if spec.dtype == DType.E4M3.numpy and scaled is not None and scaled.shape in ((), (1,)):
            return TensorSpec(name, DType.BF16.numpy, spec.shape)
        return spec

    def _scale_spec(self, name: str) -> TensorSpec | None:
        file = self._file_of.get(name + SCALE_SUFFIX)
        return None if file is None else file.specs[name + SCALE_SUFFIX]

    def path(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._file_of[name].path

    def read_into(self, name: str, out: NDArray[Any]) -> None:
        """Fill `out` (stored shape, any float dtype); a copy is made only to convert."""
        file = self._file_of[name]
        if self._scale_spec(name) is not None:
            scale = self._file_of[name + SCALE_SUFFIX].read(name + SCALE_SUFFIX)
            values = file.read(name).astype(np.float32) * scale.astype(np.float32).reshape(())
            out[...] = values.astype(DType.BF16.numpy)  # the value that transformers makes of it
        elif out.dtype == file.specs[name].dtype and out.flags.c_contiguous:
            file.read_into(name, out)
        else:
            out[...] = file.read(name).astype(out.dtype)

    def equal(self, a: str, b: str, chunk: int = 1 << 24) -> bool:
        """Whether two tensors have the same values (bytes, `chunk` at a time, if of one dtype)."""
        one, two = self.spec(a), self.spec(b)
        if one.shape != two.shape:
            return False
        if one.dtype != two.dtype:
            x, y = np.empty(one.shape, np.float32), np.empty(one.shape, np.float32)
            self.read_into(a, x)
            self.read_into(b, y)
            return np.array_equal(x, y)
        pairs = zip(
            self._file_of[a].chunks(a, chunk), self._file_of[b].chunks(b, chunk), strict=True
        )
        return all(x == y for x, y in pairs)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("weight_map must map names to names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        mend = 'expected {"weight_map": {tensor: file}}'
        raise UserError(f"unreadable index ({error})", where=str(index), mend=mend) from error
    return weight_map


def check_weights(folder: str | os.PathLike[str], config: ModelConfig) -> WeightFiles:
    """Check every tensor's presence, shape and dtype from the headers alone.

    UserError names the first fault and counts the others like it.
    """
    files = WeightFiles(folder)
    expected = {
        view.hf_name: (view.stop - view.start, *p.shape[1:])
        for p in model_parameters(config)
        for view in p.views
    }
    found = set(files.names())
    surplus = {HEAD} if config.tied else set()
    unknown = sorted(n for n in found - set(expected) - surplus if not _BUFFER.match(n))
    missing = sorted(set(expected) - found)
    if missing:
        raise UserError(
            f"missing tensor {missing[0]}{_and_more(missing)}",
            where=str(files.folder),
            mend=_missing_mend(missing, found),
        )
    if unknown:
        mend = "config.json describes another model, or a feature that is not implemented"
        what = f"unexpected tensor {unknown[0]}{_and_more(unknown)}"
        raise UserError(what, where=str(files.path(unknown[0])), mend=mend)
    if config.tied and HEAD in found:
        expected[HEAD] = expected[TABLE]
    for name, shape in expected.items():
        spec = files.spec(name)
        if spec.shape != shape:
            what = f"tensor {name} has shape {list(spec.shape)}"
            mend = f"config.json asks for {list(shape)}"
            raise UserError(what, where=str(files.path(name)), mend=mend)
        if spec.dtype not in _READABLE:
            what = f"tensor {name} is stored as {spec.dtype}"
            mend = "quantised weights are not read: use the BF16 checkpoint"
            raise UserError(what, where=str(files.path(name)), mend=mend)
    return files


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _missing_mend(missing: list[str], found: set[str]) -> str:
    if missing == [HEAD]:
        return 'if the head is the embedding, config.json needs "tie_word_embeddings": true'
    if any(name.startswith("model.") and name[6:] in found for name in missing):
        return "saved without its LM head (no 'model.' prefix): save the ForCausalLM model"
    return "the folder is incomplete, or config.json describes another model"


def load_weights(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    parameters: Sequence[Parameter] | None = None,
    *,
    dtype: DType | None = None,
) -> Iterator[tuple[Parameter, NDArray[Any]]]:
    """(parameter, array of its shape) in the order given (default: all, forward order).

    Arrays are C-contiguous and the caller's to keep; one is in memory at a time; vocabulary
    padding is zero. dtype: None keeps BF16 and FP32 as stored (float16, and views that differ,
    become float32, exactly); else rounded to nearest. All checks are done before this returns, so
    UserError comes first.
    """
    files = check_weights(folder, config)
    if config.tied and HEAD in files.names() and not files.equal(HEAD, TABLE):
        raise UserError(
            f"{HEAD} differs from {TABLE}",
            where=str(files.folder),
            mend='the model is not tied: set "tie_word_embeddings": false in config.json',
        )
    chosen = model_parameters(config) if parameters is None else parameters
    return ((p, read_parameter(files, p, dtype)) for p in chosen)


def read_parameter(
    files: WeightFiles, parameter: Parameter, dtype: DType | None = None
) -> NDArray[Any]:
    """One parameter, its views read straight into their rows."""
    stored = {files.spec(view.hf_name).dtype for view in parameter.views}
    if dtype is not None:
        kind = dtype.numpy
    else:
        kind = DType.BF16.numpy if stored == {DType.BF16.numpy} else DType.FP32.numpy
    out = np.zeros(parameter.shape, kind)  # pages that are padding stay untouched
    for view in parameter.views:
        files.read_into(view.hf_name, out[view.start : view.stop])
    return out
