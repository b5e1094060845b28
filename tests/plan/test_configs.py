"""Every config of configs/ loads and plans; those that name a card fit it: device, reserve, host.

Limits are those of the issues, not the files': 15.0 GiB of a 16 GB card, 23.0 of 24 GB, 4 of 4 GB.
What a published run or an issue asks for is stated here again.
"""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from llmq_nb.config_file import load_config
from llmq_nb.data.chat import ChatRenderer
from llmq_nb.data.tokenizer import ByteTokenizer
from llmq_nb.model.families import preset
from llmq_nb.plan.limits import LIMIT_RESERVE
from llmq_nb.plan.rates import H200
from llmq_nb.plan.report import Machine, make_report
from llmq_nb.plan.search import Search
from llmq_nb.plan.sizes import run_plan
from tests.e2e.runs import ROOT

GIB = 1 << 30
FILES = sorted((ROOT / "configs").glob("*.toml"))
# device GiB, pinned GiB, and GiB of the machine's memory
FITS = {
    "llama-2-7b-1x24gb-gsm8k": (23.0, 52, 62),
    "qwen2.5-0.5b-1x4gb": (4.0, 4, 8),
    "qwen2.5-0.5b-1x8gb-finetune": (7.0, 1, 15),
    "qwen2.5-0.5b-1x24gb-pretrain": (23.0, 1, 15),
    "qwen2.5-1.5b-1x24gb-pretrain": (23.0, 1, 15),
    "qwen2.5-7b-1x16gb-64gb-host": (15.0, 52, 62),
    "qwen2.5-7b-1x16gb-finetune": (15.0, 64, 96),
    "qwen2.5-7b-1x80gb-finetune": (78.0, 1, 31),
    "qwen2.5-14b-1x24gb": (23.0, 115, 124),
    "qwen2.5-14b-1x24gb-finetune": (23.0, 115, 124),
    "qwen2.5-32b-4x24gb-finetune": (23.0, 320, 357),
}
OFFLOAD = {"batch.seq_len": 1024, "precision.matmul": "e4m3"}
ASKED: dict[str, dict[str, Any]] = {
    "qwen2.5-7b-1x16gb-finetune": {**OFFLOAD, "batch.micro_batch": 16},
    "qwen2.5-7b-1x16gb-64gb-host": {**OFFLOAD, "batch.micro_batch": 16},
    "qwen2.5-14b-1x24gb": {**OFFLOAD, "batch.micro_batch": 8},
    "qwen2.5-0.5b-1x4gb": {**OFFLOAD, "batch.micro_batch": 8},
    # LLMQ's paper: GSM8K
    "llama-2-7b-1x24gb-gsm8k": {
        "schedule.epochs": 2,
        "schedule.steps": None,
        "schedule.warmup_steps": 10,
        "schedule.final_fraction": 0.25,
        "batch.seq_len": 2048,
        "optimizer.learning_rate": 2e-5,
        "tokens": 32768,
    },
    "qwen2.5-14b-1x24gb-finetune": {
        "schedule.epochs": 1,
        "schedule.steps": None,
        "schedule.warmup_steps": 20,
        "schedule.final_fraction": 0.0,
        "batch.seq_len": 512,
        "optimizer.learning_rate": 6e-6,
        "tokens": 96 * 512,
    },
    # LLMQ's published run on four cards
    "qwen2.5-32b-4x24gb-finetune": {
        "batch.micro_batch": 32,
        "batch.grad_accumulation": 4,
        "batch.seq_len": 1024,
        "parallel.devices": (0, 1, 2, 3),
        "parallel.shard_weights": True,
        "parallel.shard_gradients": True,
        "tokens": 32 * 4 * 4 * 1024,
    },
}
FINETUNED = re.compile(r"finetune|gsm8k")


def loaded(file):
    """A model that must be downloaded is planned by the preset of its name."""
    config = load_config(file)
    name = re.split(r"-\dx\d", file.stem)[0] if "/" in config.model.path else config.model.path
    return config, preset(name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_config_loads_and_plans(file):
    config, model = loaded(file)
    assert run_plan(config, model, "cuda").total > 0
    named = re.search(r"-\dx\d+gb", file.stem) is not None
    assert named == (file.stem in FITS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_head_says_job_data_and_memory(file):
    """And fine-tuning trains whole conversations, of a model that was downloaded."""
    head = file.read_text(encoding="utf-8").partition("\n\n")[0]
    assert all(line.startswith("# ") for line in head.splitlines())
    if file.stem == "quickstart":
        return
    assert re.search(r"# Data: .*(first use|train-chat)", head, re.DOTALL)
    assert re.search(r"\d+(\.\d+)? (GiB|are planned)", head)
    config, _ = loaded(file)
    assert ("/" in config.model.path) == (FINETUNED.search(file.stem) is not None)
    if FINETUNED.search(file.stem):
        assert config.data.format == "chat" and config.data.packing == "pack"


@pytest.mark.parametrize("name", FITS)
def test_what_is_named_after_a_card_fits_it(name):
    """Counted here from the buffers; then the verdict of `plan`."""
    config, model = loaded(ROOT / f"configs/{name}.toml")
    device, pinned, machine = FITS[name]
    plan = run_plan(config, model, "cuda")
    assert plan.total + LIMIT_RESERVE <= device * GIB
    assert plan.host_total * config.world_size <= pinned * GIB
    there = Machine("cuda", 80 * GIB, machine * GIB, "on the card", H200)
    report = make_report(config, model, there, Search(config, model, H200))
    assert report.fits and report.free >= 0 and (report.host_free or 0) >= 0


@pytest.mark.parametrize("name", ASKED)
def test_what_was_asked_for(name):
    config, _ = loaded(ROOT / f"configs/{name}.toml")
    for key, value in ASKED[name].items():
        section, _, field = key.partition(".")
        if key == "tokens":
            assert config.tokens_per_step == value
        else:
            assert getattr(getattr(config, section), field) == value, key


def test_the_head_of_gsm8k_makes_its_data():
    """Its command and its chat template, as they stand there: all of an answer is trained."""
    head = (ROOT / "configs/llama-2-7b-1x24gb-gsm8k.toml").read_text().partition("\n\n")[0]
    found = re.search(r'python -c "(.*?)" \\', head, re.DOTALL)
    assert found is not None
    code = found[1].replace("\n#     ", "\n")
    line = json.dumps({"question": "How?", "answer": "So\n#### 3"}) + "\n"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=line, capture_output=True, text=True, check=True)
    messages = json.loads(done.stdout)["messages"]

    class Templated(ByteTokenizer):
        chat_template: str | None = "\n".join(re.findall(r"^#     (\{.*)$", head, re.MULTILINE))

    ids, mask = ChatRenderer(Templated()).render(messages)
    end = ByteTokenizer.eos_id
    assert ids.tolist() == [*b"Question: How?\nAnswer: So\n#### 3", end]
    assert ids[mask].tolist() == [*b"So\n#### 3", end]
