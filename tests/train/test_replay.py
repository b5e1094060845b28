"""replay: the log's bits again, and the first bad tensor by name, layer and micro-step.

What the checker takes for an operation's outputs is compared with what operations really change.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq_nb import Trainer, load_config
from llmq_nb.core.errors import UserError
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.engine_cpu import CpuOps
from llmq_nb.model.ops import Ops
from llmq_nb.train import replay as module
from llmq_nb.train.checking import OUTPUTS
from llmq_nb.train.replay import replay
from llmq_nb.train.run import run
from tests.e2e.runs import Cli, hashes, listing, make_run, read_log, write_model

CHANGES: dict[str, dict[str, Any]] = {
    "batch": {"grad_accumulation": 2},
    "checkpoint": {"every": 4},
    "schedule": {"steps": 6},
}
SILENT = {"set_scalars", "clear_absmax", "clear_weight_absmax", "refresh_weights", "update_weight"}
SILENT |= {"fill_normal", "read", "write"}
SILENT |= {"updated", "accumulate", "combine_norms", "combine_absmax", "cached_attention"}
"""Operations that write no tensor of a step, or what several ranks add up, or text alone needs."""


pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, checkpoints after four and six."""
    folder = make_run(tmp_path_factory.mktemp("finished"), CHANGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(load_config("config.toml")) == 0
    return folder


@pytest.fixture
def folder(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished run, as the working directory."""
    monkeypatch.chdir(finished)
    return finished


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("step", [1, 2, 4, 5, 6])
def test_a_good_step_has_the_logs_bits(step: int, folder: Path) -> None:
    before = hashes(folder), listing(folder)
    found = replay(Path("out"), step, silent)
    assert found.bad is None and found.same_bits is True
    record = [r for r in read_log(folder / "out") if r["log"] == "step"][step - 1]
    assert (found.metrics.loss, found.metrics.grad_norm) == (record["loss"], record["grad_norm"])
    assert found.begin == {1: 0, 2: 0, 4: 0, 5: 4, 6: 4}[step]
    assert (hashes(folder), listing(folder)) == before


FAULTS = [  # operation, output, which call in the step, kind, tensor, layer, micro-step
    ("embedding", 0, 1, "activation", "block/residual.0", 0, 0),
    ("rmsnorm", 0, 2, "activation", "block/attn_in.0", 0, 1),
    ("residual_rmsnorm", 1, 2, "activation", "block/attn_in.1", 1, 0),
    ("rope", 0, 2, "activation", "block/qkv.1", 1, 0),
    ("attention", 1, 4, "activation", "block/lse.1", 1, 1),
    ("linear", 0, 4, "activation", "block/down", 0, 0),
    ("linear", 0, 8, "activation", "block/down", 1, 0),
    ("linear", 0, 9, "activation", "head/logits", None, 0),
    ("linear_swiglu", 0, 4, "activation", "block/act.1", 1, 1),
    ("linear_swiglu", 1, 3, "activation", "block/gate_up.0", 0, 1),
    ("cross_entropy", 0, 2, "activation", "head/logits", None, 1),
    ("cross_entropy", 1, 1, "activation", "head/loss", None, 0),
    ("linear_backward", 0, 1, "gradient of an activation", "g/norm_in", None, 0),
    ("rmsnorm_backward", 0, 1, "gradient of an activation", "g/residual", None, 0),
    ("linear_swiglu_backward", 0, 1, "gradient of an activation", "g/gate_up", 1, 0),
    ("attention_backward", 0, 2, "gradient of an activation", "g/heads", 0, 0),
    ("rope_backward", 0, 3, "gradient of an activation", "g/heads", 1, 1),
    ("linear_swiglu_backward", 2, 1, "gradient", "gradients/model.layers.1.mlp.down", 1, 0),
    ("linear_backward", 2, 9, "gradient", "gradients/model.layers.0.self_attn.qkv", 0, 0),
    ("rmsnorm_backward", 1, 8, "gradient", "gradients/model.layers.1.", 1, 1),
    ("embedding_backward", 0, 2, "gradient", "gradients/model.embed_tokens", None, 1),
    ("adamw", 0, 3, "master weight", "master/", 0, None),
    ("adamw", 1, 3, "weight", "weights/", 0, None),
    ("adamw", 2, 3, "first moment", "m/", 0, None),
    ("adamw", 3, 3, "second moment", "v/", 0, None),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f[0]}-{f[1]}-{f[2]}")
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_the_first_bad_tensor(
    fault: tuple[Any, ...], value: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, output, call, kind, tensor, layer, micro_step = fault
    real, calls = getattr(CpuOps, name), [0]

    def poisoned(self: CpuOps, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.scalars.update // 2 == 4:  # step 5
            calls[0] += 1
            if calls[0] == call:
                args[output].data.reshape(-1)[5:7] = value

    monkeypatch.setattr(CpuOps, name, poisoned)
    found = replay(Path("out"), 5, silent)
    bad = found.bad
    assert bad is not None and calls[0] >= call
    assert bad.tensor.startswith(tensor), bad
    assert (bad.kind, bad.layer, bad.micro_step) == (kind, layer, micro_step)
    assert bad.operation == name and not bad.read
    assert bad.value == str(float(value)) and bad.count == 2
    flat = int(np.ravel_multi_index(bad.element, bad_shape(folder, bad.tensor, bad.size)))
    assert flat == 5
    assert replay(Path("out"), 4, silent).bad is None


def bad_shape(folder: Path, name: str, size: int) -> tuple[int, ...]:
    with Trainer(load_config("config.toml"), announce=silent) as trainer:
        engine: Any = trainer.engine
        shape = engine.tensors[name].shape
    return shape if int(np.prod(shape)) == size else (size // shape[-1], *shape[1:])


def test_a_bad_weight_is_blamed_on_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the product that read it."""
    real = module.watch

    names = [p for p in weight_names(folder) if "layers.1" in p and "gate_up" in p]
    assert len(names) == 1
    suffix = names[0]

    def poison(trainer: Trainer) -> Any:
        state = next(s for s in trainer.engine.states if s.parameter.name == suffix)
        state.weight.data[3, 4] = np.inf
        return real(trainer)

    monkeypatch.setattr(module, "watch", poison)
    bad = replay(Path("out"), 6, silent).bad
    assert bad is not None and bad.read and bad.tensor == f"weights/{suffix}"
    assert (bad.kind, bad.layer, bad.element) == ("weight", 1, (3, 4))
    assert bad.operation == "linear_swiglu" and bad.micro_step == 0


def weight_names(folder: Path) -> list[str]:
    with Trainer(load_config("config.toml"), announce=silent) as trainer:
        return [s.parameter.name for s in trainer.engine.states]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "recompute", "ffn", "fp8"])
def test_outputs_are_what_operations_change(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor that an operation changes is one of its outputs, and every output changes."""
    changes: dict[str, dict[str, Any]] = {"batch": {"grad_accumulation": 2}}
    if kind == "recompute":
        changes["memory"] = {"recompute": ["swiglu", "norm", "qkv"]}
    if kind == "ffn":
        changes["memory"] = {"recompute": ["ffn"]}
    if kind == "fp8":
        changes["precision"] = {"matmul": "e4m3"}
    folder = make_run(tmp_path, changes)
    if kind == "qwen3":
        write_model(
            folder / "model", model_type="qwen3", architectures=["Qwen3ForCausalLM"],
            attention_bias=False,
        )  # fmt: skip
    monkeypatch.chdir(folder)
    changed: dict[str, set[int]] = {}

    class Recorder:
        def __init__(self, ops: Any) -> None:
            self._ops = ops

        def __getattr__(self, name: str) -> Any:
            method = getattr(self._ops, name)
            if not callable(method) or name in ("read", "write"):
                return method

            def call(*args: Any, **kwargs: Any) -> Any:
                tensors = {i: x for i, x in enumerate(args) if isinstance(x, Tensor)}
                before = {i: x.data.tobytes() for i, x in tensors.items()}
                out = method(*args, **kwargs)
                new = {i for i, x in tensors.items() if x.data.tobytes() != before[i]}
                # in place: what is also an input counts by its first place
                first = {i: min(j for j in tensors if tensors[j].data is tensors[i].data)
                         for i in new}  # fmt: skip
                changed.setdefault(name, set()).update(first.values())
                return out

            return call

    with Trainer(load_config("config.toml"), announce=silent) as trainer:
        engine: Any = trainer.engine
        for rank in engine.ranks:
            rank.model.ops = Recorder(rank.model.ops)
        for _ in range(2):
            trainer.step()
    for name, places in changed.items():
        if name in SILENT:
            continue
        if name == "linear_swiglu_backward":  # 1 is room, which may lie where 4 was
            places -= {1, 4}
        assert places <= set(OUTPUTS[name]), name
        # scratch words of a slice of logits aside, every output was written
        assert places == {i for i in OUTPUTS[name]} - missing(name, kind), name
    extra = {
        "qwen3": {"qk_norm", "qk_norm_backward"},
        "recompute": {"swiglu_again"},
        "ffn": {"linear_swiglu_again"},
    }
    never = set().union(*extra.values()) - extra.get(kind, set())
    assert set(changed) - SILENT == set(OUTPUTS) - never


def missing(name: str, kind: str) -> set[int]:
    """Outputs that this model does not have: a family without biases."""
    return {2} if name == "linear_backward" and kind == "qwen3" else set()


def test_every_operation_is_known() -> None:
    methods = {n for n, f in vars(Ops).items() if callable(f) and not n.startswith("_")}
    assert methods - SILENT == set(OUTPUTS)


def test_bad_input(folder: Path, cli: Cli) -> None:
    for argv, words in [
        (("out", "--step", "0"), ["--step", "first step is 1"]),
        (("out", "--step", "7"), ["--step", "6 steps"]),
        (("model", "--step", "1"), ["no run in model", "config.toml"]),
    ]:
        before = hashes(folder), listing(folder)
        result = cli("replay", *argv, cwd=folder)
        assert result.code == 2 and all(word in result.error for word in words), result.error
        assert (hashes(folder), listing(folder)) == before
    with pytest.raises(UserError):
        replay(Path("nowhere"), 1, silent)


POISON = """
import numpy
numpy.seterr(all="ignore")
from llmq_nb.model.engine_cpu import CpuOps
real = CpuOps.linear_swiglu
def linear_swiglu(self, y, gate_up, x, weight):
    real(self, y, gate_up, x, weight)
    if self.scalars.update == 9 and y.name.endswith(".1"):
        y.data[2, 3] = float("inf")
CpuOps.linear_swiglu = linear_swiglu
"""


def test_from_a_stopped_run_to_the_bad_tensor(cli: Cli, tmp_path: Path) -> None:
    """Step 5, its second micro-step, layer 1: what the stopped run could not say."""
    folder = make_run(tmp_path, CHANGES)
    stopped = cli("train", "config.toml", cwd=folder, before=POISON)
    assert stopped.code == 1 and "step 5" in stopped.error and "replay" in stopped.error
    shown = cli("replay", "out", "--step", "5", cwd=folder, before=POISON)
    assert shown.code == 0, shown.err
    assert "from the state after step 4" in shown.out
    assert "first bad tensor: activation block/act.1, layer 1: inf at [2, 3], 1 of" in shown.out
    assert "micro-step 1, written by linear_swiglu" in shown.out and "(the log's bits)" in shown.out
    healthy = cli("replay", "out", "--step", "5", "--json", cwd=folder)
    answer = json.loads(healthy.out)
    assert answer["bad"] is None and answer["same_bits"] is False and answer["begin"] == 4
