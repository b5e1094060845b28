"""config.py and config_file.py: round trips through TOML, strictness, overrides, ranges.

Oracle for the round trip: dataclass equality with the value that was written; for the errors: the
text that a person reads.
"""

import dataclasses
import math
import re
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq_nb import config as c
from llmq_nb.config_file import load_config, parse_config, to_toml
from llmq_nb.core.errors import UserError

MINIMAL = '[model]\npath = "qwen2.5-0.5b"\n[data]\ntrain = "a.zarr"\n'
BASE = c.Config(model=c.ModelSection(path="qwen2.5-0.5b"), data=c.DataConfig(train="a.zarr"))


def parse(text: str = "", *overrides: str) -> c.Config:
    return parse_config(MINIMAL + text, where="run.toml", overrides=overrides)


def refused(text: str = "", *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(text, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# every section with other values than the defaults, so that a key that is not written is seen
CHANGED = [
    c.RunConfig(name='a "b" \\ \x7f', out_dir="o/é", seed=7, device="cpu", cuda_graphs=False),
    c.ModelSection(path="models/x", init="pretrained"),
    c.DataConfig(
        train="t.zarr",
        validation="v.zarr",
        sources=("${stdlib}/*.py", "b\t.txt"),
        tokenizer="tok",
        format="chat",
        packing="pack",
        seed=0,
    ),
    c.BatchConfig(micro_batch=1, grad_accumulation=3, seq_len=128),
    c.PrecisionConfig(
        dtype="bf16",
        matmul="e4m3",
        gradient="e5m2",
        gradient_accumulation="fp32",
        bf16_layers=(0, -1),
        fast_accumulation=True,
        fp8_units="emulate",
    ),
    c.OptimizerConfig(
        learning_rate=1e-05,
        beta1=0.0,
        beta2=0.999,
        epsilon=1e-16,
        weight_decay=0.0,
        max_grad_norm=math.inf,
        z_loss=1e-4,
        master="bf16",
        m="e4m3",
        v="bf16",
    ),
    c.ScheduleConfig(kind="wsd", steps=9, warmup_steps=1, cooldown_steps=2, final_fraction=1 / 3),
    c.MemoryConfig(
        device_limit="15.5GiB",
        host_limit="64GB",
        policy="auto",
        recompute=("norm", "block"),
        offload=("m", "residual"),
        transfer="zero_copy",
        keep_quants=False,
        head_chunks=8,
    ),
    c.ParallelConfig(
        devices=(0, 0, 1), shard_weights=True, shard_gradients=True, gather="nccl", reduce="memcpy"
    ),
    c.CheckpointConfig(every=0, keep=0, major_every=5),
    c.EvalConfig(every=0, steps=0),
    c.LogConfig(
        every=2,
        trackers=("tensorboard", "wandb"),
        health_every=3,
        non_finite="skip",
        sample="Once\nupon ]",
    ),
]


@pytest.mark.parametrize("section", CHANGED, ids=lambda s: type(s).__name__)
def test_section_round_trips(section):
    name = next(n for n, t in typing.get_type_hints(c.Config).items() if t is type(section))
    config = dataclasses.replace(BASE, **{name: section})
    text = to_toml(config)
    assert parse_config(text, where="x") == config
    table = text.split(f"[{name}]\n")[1].split("\n\n")[0]
    written = [line.split(" = ")[0] for line in table.splitlines()]
    assert written == [
        f.name for f in dataclasses.fields(section) if getattr(section, f.name) is not None
    ]


def test_every_section_is_in_the_table_of_changed_sections():
    assert {type(s) for s in CHANGED} == set(typing.get_type_hints(c.Config).values())


def test_only_keys_whose_default_is_none_may_be_none():
    """to_toml leaves None out, so reading it back must give None."""
    for part in typing.get_type_hints(c.Config).values():
        hints = typing.get_type_hints(part)
        for field in dataclasses.fields(part):
            optional = type(None) in typing.get_args(hints[field.name])
            assert optional == (field.default is None), f"{part.__name__}.{field.name}"


def test_defaults_round_trip():
    assert parse_config(to_toml(BASE), where="x") == BASE == parse()


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=("Cs",)), min_size=1),
    rate=st.floats(min_value=0, allow_infinity=False, allow_nan=False),
    layers=st.lists(st.integers(-(2**70), 2**70), max_size=4),
)
def test_any_text_float_and_integer_round_trips(text, rate, layers):
    config = dataclasses.replace(
        BASE,
        run=c.RunConfig(name="run", out_dir=text),
        data=c.DataConfig(train=text, sources=(text, text)),
        optimizer=c.OptimizerConfig(learning_rate=rate),
        precision=c.PrecisionConfig(bf16_layers=tuple(layers)),
    )
    assert parse_config(to_toml(config), where="x") == config


def test_config_built_with_lists_and_numpy_numbers_is_written_as_toml():
    section = c.OptimizerConfig(learning_rate=np.float64(0.125))
    parallel = c.ParallelConfig(devices=[0, 1])  # pyright: ignore[reportArgumentType]
    batch = c.BatchConfig(seq_len=np.int64(64))  # pyright: ignore[reportArgumentType]
    config = dataclasses.replace(BASE, optimizer=section, parallel=parallel, batch=batch)
    read = parse_config(to_toml(config), where="x")
    assert read.optimizer.learning_rate == 0.125
    assert read.parallel.devices == (0, 1)
    assert read.batch.seq_len == 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[optimizer]\nlearning_rat = 1", "unknown key 'learning_rat' in run.toml [optimizer]:"),
        ("[optimizer]\nlearning_rat = 1", "did you mean 'learning_rate'?"),
        ("[optimizer]\nlr = 1", "did you mean 'learning_rate'?"),
        ("[batch]\nbeta1 = 1", "did you mean '[optimizer] beta1'?"),
        ("[batch]\nxyzzy = 1", "[batch]: valid: micro_batch, grad_accumulation, seq_len"),
        ("[optimiser]\nbeta1 = 1", "unknown section 'optimiser' in run.toml:"),
        ("[optimiser]\nbeta1 = 1", "did you mean 'optimizer'?"),
        ("[batch]\nseq_len = '8'", '"8" in run.toml [batch] seq_len: must be a whole number'),
        ("[batch]\nseq_len = 8.0", "8.0 in run.toml [batch] seq_len: must be a whole number"),
        ("[batch]\nseq_len = true", "true in run.toml [batch] seq_len: must be a whole number"),
        ("[run]\nname = 3", "3 in run.toml [run] name: must be a string"),
        ("[memory]\nkeep_quants = 1", "1 in run.toml [memory] keep_quants: must be true or false"),
        ("[run]\ncuda_graphs = 'on'", "[run] cuda_graphs: must be 'auto' or true or false"),
        ("[schedule]\nkind = 'cosin'", "did you mean 'cosine'?"),
        ("[memory]\nrecompute = ['norm', 'atention', 'qkv']", "did you mean 'attention'?"),
        ("[memory]\nrecompute = 'norm'", "[memory] recompute: must be a list of 'norm' |"),
        ("[optimizer]\nbeta1 = 2024-01-01", '"2024-01-01" in run.toml [optimizer] beta1: must be'),
        ("[[log]]\nevery = 1", "log is a section: [log]"),
        ("[log", "not valid TOML in run.toml"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_mend(text, says):
    assert says in refused(text)


def test_values_far_from_every_choice_get_the_list_alone():
    says = refused("[run]\ndevice = 'gpu'")
    assert says.endswith("must be 'auto' | 'cuda' | 'cpu'")


def test_an_integer_beyond_float_is_refused():
    assert "must be a number" in refused(f"[optimizer]\nlearning_rate = 1{'0' * 400}")


def test_key_outside_of_a_section_names_its_section():
    with pytest.raises(UserError, match=r"unknown section 'seq_len' .* '\[batch\] seq_len'"):
        parse_config("seq_len = 1\n" + MINIMAL, where="run.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[data]\ntrain = "a"', "'path' is missing in x [model]: set model.path"),
        ('[model]\npath = "a"', "'train' is missing in x [data]: set data.train"),
        ('model = "a"', "model = 'a' in x: model is a section: [model]"),
    ],
)
def test_missing_keys_are_named(text, says):
    with pytest.raises(UserError, match=re.escape(says)):
        parse_config(text, where="x")


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("batch.seq_len=64", lambda k: k.batch.seq_len, 64),
        (" batch . seq_len = 64 ", lambda k: k.batch.seq_len, 64),
        ("optimizer.learning_rate=3", lambda k: k.optimizer.learning_rate, 3.0),
        ("optimizer.max_grad_norm=inf", lambda k: k.optimizer.max_grad_norm, math.inf),
        ("schedule.kind=wsd", lambda k: k.schedule.kind, "wsd"),
        ("data.train=runs/x=1.zarr", lambda k: k.data.train, "runs/x=1.zarr"),
        ("run.name='quoted'", lambda k: k.run.name, "quoted"),
        ("run.name=2024", lambda k: k.run.name, "2024"),
        ("run.name=2024-11-30", lambda k: k.run.name, "2024-11-30"),
        ("run.name=true", lambda k: k.run.name, "true"),
        ("run.cuda_graphs=false", lambda k: k.run.cuda_graphs, False),
        ("run.name=1\nx=2", lambda k: k.run.name, "1\nx=2"),
        ('memory.recompute=["norm","qkv"]', lambda k: k.memory.recompute, ("norm", "qkv")),
        ("parallel.devices=[0,0]", lambda k: k.parallel.devices, (0, 0)),
    ],
)
def test_override(override, get, value):
    got = get(parse("", override))
    assert got == value and type(got) is type(value)


def test_later_overrides_win_over_earlier_ones_and_the_file():
    text = "[batch]\nseq_len = 1\nmicro_batch = 9\n"
    config = parse(text, "batch.seq_len=2", "batch.seq_len=3")
    assert (config.batch.seq_len, config.batch.micro_batch) == (3, 9)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seq_len=3", "--set seq_len=3: write --set section.key=value"),
        ("batch.seq_len", "write --set section.key=value"),
        ("batch.=3", "write --set section.key=value"),
        ("batch.seq_len=", '"" in --set batch.seq_len=: must be a whole number'),
        ("batch.seqlen=3", "'seqlen' in --set batch.seqlen=3: did you mean 'seq_len'?"),
        ("batsh.seq_len=3", "'batsh' in --set batsh.seq_len=3: did you mean 'batch'?"),
        ("batch.seq_len=x", '"x" in --set batch.seq_len=x: must be a whole number'),
    ],
)
def test_wrong_override(override, says):
    assert says in refused("", override)


@pytest.mark.parametrize(
    "override",
    [
        "run.name=''", "run.seed=-1", "run.seed=4294967296", "model.path=''", "data.train=''",
        "data.seed=-1", "batch.micro_batch=0", "batch.grad_accumulation=0", "batch.seq_len=-3",
        "optimizer.learning_rate=-1", "optimizer.learning_rate=inf", "optimizer.learning_rate=nan",
        "optimizer.epsilon=nan", "optimizer.weight_decay=-0.1", "optimizer.z_loss=-1e-9",
        "optimizer.beta1=1", "optimizer.beta2=-0.1", "optimizer.beta2=nan",
        "optimizer.max_grad_norm=0", "optimizer.max_grad_norm=nan", "schedule.steps=0",
        "schedule.epochs=0", "schedule.epochs=inf", "schedule.epochs=nan",
        "schedule.warmup_steps=-1", "schedule.cooldown_steps=-1", "schedule.final_fraction=1.1",
        "schedule.final_fraction=nan", "memory.head_chunks=0", "memory.device_limit=15",
        "memory.device_limit=0GiB", "memory.host_limit=15 apples", "parallel.devices=[]",
        "parallel.devices=[0,-1]", "checkpoint.every=-1", "checkpoint.keep=-1",
        "checkpoint.major_every=-1", "eval.every=-1", "eval.steps=-1", "log.every=0",
        "log.health_every=-1",
    ],
)  # fmt: skip
def test_value_out_of_range_names_its_key(override):
    assert f"in run.toml {override.partition('=')[0]}: " in refused("", override)


def test_conflicts_name_both_keys():
    assert "steps and epochs" in refused("", "schedule.steps=1", "schedule.epochs=1")
    says = refused("", "precision.dtype=fp32", "precision.matmul=e4m3")
    assert "dtype = 'fp32'" in says and "precision.matmul" in says


def test_files(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read"):
        load_config(tmp_path / "bytes.toml")
    (tmp_path / "mark.toml").write_text(MINIMAL, encoding="utf-8-sig")
    assert load_config(tmp_path / "mark.toml", ["run.seed=3"]).run.seed == 3


def test_derived_values():
    config = parse("", "run.name=a", "run.out_dir=x/{name}/y", "batch.grad_accumulation=2")
    assert config.out_dir == "x/a/y"
    assert config.tokens_per_step == 4 * 1024 * 2
    config = parse("", "parallel.devices=[0, 0, 1]", "batch.grad_accumulation=2")
    assert config.tokens_per_step == 4 * 1024 * 2 * 3


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "x\0"])
def test_a_runs_name_stays_inside_its_folder(name):
    with pytest.raises(UserError, match="run.name"):
        c.RunConfig(name=name)
