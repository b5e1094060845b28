"""What `bench.fit` measures with: its candidates, its verdict, and the model that it writes."""

import dataclasses
from typing import Any

import numpy as np

from bench import fit_auto, fit_exact, fit_pretrained, fit_runs
from llmq_nb.io.hf_config import read_model_config
from llmq_nb.io.weights import load_weights
from llmq_nb.model.families import preset
from llmq_nb.model.parameters import model_parameters
from llmq_nb.plan.fit import Setting
from llmq_nb.plan.rates import H200
from llmq_nb.plan.search import Search
from llmq_nb.plan.sizes import run_plan

GIB = 1 << 30


def test_candidates_fit_differ_and_begin_with_the_choice():
    model, limit, host = "qwen2.5-0.5b", 4 * GIB, 3 * GIB
    search = Search(fit_auto.base(model, "4GiB"), preset(model), H200)
    named = fit_auto.candidates(search, limit, host, seed=3)
    choice = search.choose(limit, host)
    assert choice is not None and named[0] == ("highest", choice.setting)
    assert [kind for kind, _ in named].count("random") == 12 and len(named) == 24
    assert len({setting for _, setting in named}) == 24
    for _, setting in named:
        plan = run_plan(setting.applied(search.config), preset(model), "cuda")
        assert plan.total <= limit and plan.host_total <= host
        assert setting.micro_batch * setting.grad_accumulation == fit_auto.SEQUENCES
    times = [search.seconds(s) for kind, s in named if kind == "highest"]
    assert times == sorted(times) and min(search.seconds(s) for _, s in named) == times[0]


def test_the_verdict_is_about_the_choice_and_the_best_of_what_was_measured():
    named = [("highest", Setting(n, 32 // n)) for n in (4, 8)] + [("random", Setting(1, 32))]

    def judged(*seconds: float) -> dict[str, Any]:
        rows = [
            (kind, setting, {"seconds": t, "predicted": 1.1})
            for (kind, setting), t in zip(named, seconds, strict=False)
        ]
        return fit_auto.judge("m", "15GiB", named, rows)

    found = judged(1.04, 1.0, 2.2)
    assert found["within_5_percent"] and found["choice_over_best"] == 1.04
    assert found["best"]["micro_batch"] == 8 and found["measured"] == 3
    assert found["prediction_error"] == (-0.5, 0.1)
    assert not judged(1.06, 1.0)["within_5_percent"]


def test_a_written_model_is_loaded(tmp_path):
    """As a download is: in shards, every tensor there, norms 1."""
    small = fit_exact.SMALL
    fit_pretrained.SHARD_BYTES, before = 8_000_000, fit_pretrained.SHARD_BYTES
    try:
        total = fit_pretrained.write_model(tmp_path / "model", small)
    finally:
        fit_pretrained.SHARD_BYTES = before
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    model = read_model_config(tmp_path / "model", seq_len=128)
    assert model == small
    seen = 0
    for parameter, array in load_weights(tmp_path / "model", model):
        values = array.astype(np.float32)
        seen += array.nbytes
        if parameter.kind == "norm":
            assert (values == 1).all()
        else:
            assert abs(values.std() / small.init_std - 1) < 0.02, parameter.name
    assert seen == total == 2 * sum(int(np.prod(p.shape)) for p in model_parameters(small))


def test_the_promises_are_held_to_their_margins():
    mib = 1 << 20
    figures = {
        "plan_bytes": 10 << 30, "plan_host_bytes": 1000 * mib, "asked_bytes": 10 << 30,
        "pinned_bytes": 1019 * mib, "ring_bytes": 0, "tensor_map_bytes": 0,
    }  # fmt: skip
    planned = 10 * 1024 + 640
    assert all(v for v in fit_runs.held(figures, planned - 127).values())
    assert not fit_runs.held(figures, planned + 129)["process_in_margin"]
    assert not fit_runs.held({**figures, "pinned_bytes": 1021 * mib}, planned)["pinned_in_margin"]
    assert not fit_runs.held({**figures, "asked_bytes": 1}, planned)["allocation_exact"]
    config = dataclasses.replace(fit_exact.CASES["e4m3"][1])
    assert fit_runs.uncapped(config).memory.offload == ()
