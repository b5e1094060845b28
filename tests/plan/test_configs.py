"""Every config of configs/ loads, and those that name a card fit it: device with reserve, host.

Limits are those of the issue, not the files': 15.0 GiB of a 16 GB card, 23.0 of 24 GB, 4 of 4 GB.
"""

from pathlib import Path

import pytest

from llmq_nb.config_file import load_config
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
    "qwen2.5-7b-1x16gb-finetune": (15.0, 64, 96),
    "qwen2.5-7b-1x16gb-64gb-host": (15.0, 52, 62),
    "qwen2.5-14b-1x24gb": (23.0, 115, 124),
    "qwen2.5-0.5b-1x4gb": (4.0, 4, 8),
}


def loaded(file: Path):
    """A model that must be downloaded is planned by the preset of its name."""
    config = load_config(file)
    name = file.stem.partition("-1x")[0] if "/" in config.model.path else config.model.path
    return config, preset(name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_config_loads_and_plans(file):
    config, model = loaded(file)
    assert run_plan(config, model, "cuda").total > 0
    assert (file.stem in FITS) == ("-1x" in file.stem)


@pytest.mark.parametrize("name", FITS)
def test_what_is_named_after_a_card_fits_it(name):
    """Counted here from the buffers; then the verdict of `plan`."""
    config, model = loaded(ROOT / f"configs/{name}.toml")
    device, pinned, machine = FITS[name]
    plan = run_plan(config, model, "cuda")
    assert plan.total + LIMIT_RESERVE <= device * GIB
    assert plan.host_total <= pinned * GIB
    there = Machine("cuda", 80 * GIB, machine * GIB, "on the card", H200)
    report = make_report(config, model, there, Search(config, model, H200))
    assert report.fits and report.free >= 0 and (report.host_free or 0) >= 0
    b = config.batch
    assert b.seq_len == 1024 and b.micro_batch == (16 if "7b" in name else 8)
    assert config.precision.matmul == "e4m3"
