"""The report's page: its data are the log's values, its text is the log's, and it needs no network.

`browser` tests open it in headless Chromium and ask the page what it drew.
"""

import html
import html.parser
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq_nb.report.html import MOST_POINTS
from llmq_nb.report.jsonl import JsonlLog
from llmq_nb.report.metrics import (
    DeviceFacts,
    DeviceMetrics,
    EvalMetrics,
    HealthMetrics,
    StepMetrics,
    TensorHealth,
)
from llmq_nb.report.plot import plot_runs
from llmq_nb.report.runs import load_run
from tests.e2e.runs import Cli

TOML = '[run]\nname = "{name}"\nseed = 42\n\n[optimizer]\nlearning_rate = {rate}\n'


def facts(index: int, **changes: Any) -> DeviceFacts:
    values: dict[str, Any] = dict(
        index=index, power=400.0 + index, power_limit=700.0, sm_clock=1980 - index,
        memory_clock=3200, temperature=60 + index, utilization=1.0, memory=(3 + index) << 30,
        throttled=(), pcie_sent=1e9, pcie_received=2.5e9,
    )  # fmt: skip
    return DeviceFacts(**(values | changes))


def make_run(folder: Path, steps: int = 6, *, loss=lambda s: 4.0 / s, rate: float = 1e-3) -> Path:
    """A log with every kind of record; step 4 is left out."""
    with JsonlLog(folder / "log.jsonl") as log:
        log.cmd(["train", "c.toml"])
        log.config(TOML.format(name=json.dumps(folder.name)[1:-1], rate=rate))
        log.info("device: <H200>", planned_bytes=2 << 30, parameters=1234567, device_name="H200",
                 peak_tokens_per_second=1000.0)  # fmt: skip
        for step in range(1, steps + 1):
            log.step(
                StepMetrics(
                    step=step, loss=loss(step), grad_norm=1.0 / step, learning_rate=rate * step,
                    tokens=100, supervised=90, lse_max=3.0 + step, seconds=36.0,
                    tokens_per_second=100.0 * step, skipped=step == 4,
                    non_finite_tensor="model.norm.weight" if step == 4 else None,
                )
            )  # fmt: skip
            if step % 2 == 0 and steps < 100:
                log.evaluation(EvalMetrics(step=step, loss=step + 0.5, tokens=7, seconds=1.0))
                gpus = (facts(0), facts(1, throttled=("power cap",) if step == 4 else ()))
                log.device(DeviceMetrics(step=step, devices=gpus))
        tensors = tuple(
            TensorHealth(name=name, layer=layer, format="e4m3", absmax=1.5,
                         underflowed=0.01 * (layer + 1), saturated=0.001)
            for layer in range(2) for name in ("qkv.input", "qkv.weight")
        )  # fmt: skip
        log.health(HealthMetrics(step=steps, lse_max=1.0, tensors=tensors))
        log.checkpoint(steps, folder / "checkpoints" / "x", 0.5)
    return folder


class Page(html.parser.HTMLParser):
    """What a browser would find: links, cells by table, text by element, the embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text: dict[str, list[str]] = {}
        self.stack: list[str] = []
        self.kind = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = {k: v or "" for k, v in attrs}
        self.links += [v for k, v in values.items() if k in ("src", "href", "xlink:href", "data")]
        if tag == "table":
            self.kind = values["class"]
        if tag == "tr":
            self.tables.setdefault(self.kind, []).append([])
        if tag in ("td", "th"):
            self.tables[self.kind][-1].append("")
        if tag not in ("meta", "input", "br"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, tag

    def handle_data(self, data):
        self.text.setdefault(self.stack[-1] if self.stack else "", []).append(data)
        if self.stack and self.stack[-1] in ("td", "th"):
            self.tables[self.kind][-1][-1] += data


def page_of(*runs: Path, over: Any = "steps") -> tuple[str, Page, dict[str, Any]]:
    out = runs[0].parent / "page.html"
    plot_runs(runs, out, over=over)
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert page.stack == []
    return text, page, json.loads(page.text["script"][0])


def panels(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Curves by panel and label."""
    return {p["title"]: {c["label"]: c for c in p["curves"]} for p in data["panels"]}


def test_every_logged_value_is_in_its_panel(tmp_path):
    _, _, data = page_of(make_run(tmp_path / "a"))
    shown = panels(data)
    x: dict[str, list[float]] = {
        "steps": [1, 2, 3, 4, 5, 6],
        "tokens": [100, 200, 300, 400, 500, 600],
    }
    x["hours"] = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]
    loss = shown["Loss [nats per token]"]
    assert loss["a"] == {"x": x, "y": [4, 2, 1.33333, 1, 0.8, 0.666667], "run": 0, "label": "a"}
    validation = loss["a, validation"]
    assert validation["y"] == [2.5, 4.5, 6.5] and validation["x"]["tokens"] == [200, 400, 600]
    wanted = {
        "Learning rate": [0.001, 0.002, 0.003, 0.004, 0.005, 0.006],
        "Gradient norm before clipping": [1, 0.5, 0.333333, 0.25, 0.2, 0.166667],
        "Speed [tokens/s]": [100, 200, 300, 400, 500, 600],
        "Model FLOP utilisation [%]": [10, 20, 30, 40, 50, 60],
        "Largest lse of the logits": [4, 5, 6, 7, 8, 9],
        "FP8 underflow, worst tensor [%]": [2],
        "FP8 saturation, worst tensor [%]": [0.1],
        "GPU memory in use [GiB]": [4, 4, 4],
        "GPU power [W]": [801, 801, 801],
        "GPU clock [MHz]": [1979, 1979, 1979],
        "GPU temperature [°C]": [61, 61, 61],
        "GPU throttled [% of samples]": [0, 100, 0],
    }
    assert {title: shown[title]["a"]["y"] for title in wanted} == wanted
    pcie = shown["PCIe [GB/s]"]
    assert pcie["a received"]["y"] == [5, 5, 5] and pcie["a sent"]["y"] == [2, 2, 2]
    assert pcie["a sent"]["dotted"] and "dotted" not in pcie["a received"]
    assert set(shown) == {*wanted, "Loss [nats per token]", "PCIe [GB/s]"}


def test_panels_without_figures_are_left_out(tmp_path):
    with JsonlLog(tmp_path / "a" / "log.jsonl") as log:
        step = StepMetrics(
            step=1, loss=math.nan, grad_norm=1.0, learning_rate=0.0, tokens=1, supervised=1,
            lse_max=math.nan, seconds=1.0, tokens_per_second=1.0,
        )  # fmt: skip
        log.step(step)
    _, page, data = page_of(tmp_path / "a")
    titles = [p["title"].split(" ")[0] for p in data["panels"]]
    assert titles == ["Loss", "Learning", "Gradient", "Speed"]
    assert panels(data)["Loss [nats per token]"]["a"]["y"] == [None]
    assert "config" not in page.tables and "map" not in page.tables


def test_figures_health_config_and_events(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", rate=2e-3)]
    _, page, _ = page_of(*runs)
    head, first, second = page.tables["figures"]
    row = dict(zip(head, first, strict=True))
    loaded = load_run(runs[0], "a")
    assert {k: row[k] for k in loaded.summary} == loaded.summary
    assert row["parameters"] == "1,234,567" and row["planned memory"] == "2.00 GiB"
    assert row["device"] == "H200" and row["MFU (median)"] == "35.0 %"
    assert row["memory in use, most"] == "4.00 GiB" and row["updates left out"] == "1"
    assert row["throttled by (samples)"] == "power cap 1"
    assert second[0] == "b"
    under = [["", "0", "1"], ["qkv.input", "1", "2"], ["qkv.weight", "1", "2"]]
    over = [["", "0", "1"], ["qkv.input", "0.1", "0.1"], ["qkv.weight", "0.1", "0.1"]]
    assert page.tables["map"] == [*under, *over] * 2
    assert page.tables["config"] == [
        ["key", "a", "b"], ["run.name", '"a"', '"b"'], ["optimizer.learning_rate", "0.001", "0.002"]
    ]  # fmt: skip
    pre = "".join(page.text["pre"])
    assert all((r / "log.jsonl").is_file() and f'name = "{r.name}"' in pre for r in runs)
    what = [row[2] for row in page.tables["events"]]
    assert what.count("$ llmq-nb train c.toml") == 2 and "device: <H200>" in what
    assert "no update: the gradient of model.norm.weight is not finite" in what


@pytest.mark.parametrize("name", ["a<b>&c", "</script><img src=x onerror=1>", "\u2028'\"ä"])
def test_names_are_text_wherever_they_stand(name, tmp_path):
    """The slash cannot be in a folder's name, so the name comes by the data as well."""
    run = make_run(tmp_path / name.replace("/", "_"))
    text, page, data = page_of(run)
    assert data["runs"][0]["name"] == run.name
    assert "".join(page.text["h1"]) == run.name
    assert "img" not in page.tables and "<img" not in text
    assert len(page.text["script"]) == 2
    assert page.links == []


def test_the_page_needs_nothing_else(tmp_path):
    text, page, _ = page_of(make_run(tmp_path / "a"))
    assert page.links == [] and "@import" not in text and "url(" not in text.replace("url(#", "")
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and policy[1].startswith("default-src 'none';")
    assert "-src" not in policy[1].replace("default-src", "").replace("style-src", "").replace(
        "script-src", ""
    )


def test_a_long_curve_keeps_its_spikes(tmp_path):
    """5003 steps in at most 1000 points: their means, and the extremes beside them."""
    rng = np.random.default_rng(0)
    y = rng.normal(3, 0.1, 5004)
    y[1234], y[777] = 50.0, math.nan
    _, _, data = page_of(make_run(tmp_path / "a", 5003, loss=lambda s: float(y[s])))
    curve = panels(data)["Loss [nats per token]"]["a"]
    assert len(curve["y"]) == len(curve["x"]["steps"]) == len(curve["s"]) == MOST_POINTS
    assert max(curve["high"]) == 50.0
    assert min(curve["low"]) == pytest.approx(np.nanmin(y[1:]), rel=1e-5)
    assert np.all(np.diff(curve["x"]["steps"]) > 0)
    # all points are there: the mean of the means, weighted by what is in each
    edges = np.unique(np.linspace(0, 5003, MOST_POINTS + 1).astype(int))
    pieces = np.split(y[1:], edges[1:-1])
    np.testing.assert_allclose(curve["y"], [np.nanmean(p) for p in pieces], rtol=1e-5)


def test_the_same_runs_give_the_same_bytes(tmp_path):
    run = make_run(tmp_path / "a")
    assert page_of(run)[0] == page_of(run)[0]


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / n / "run") for n in "ab"]
    _, page, data = page_of(*runs)
    names = [str(r.resolve()) for r in runs]
    assert [run["name"] for run in data["runs"]] == names
    assert [row[0] for row in page.tables["figures"][1:]] == names
    assert data["runs"][0]["colour"] != data["runs"][1]["colour"]


def test_the_command(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "a")
    result = cli("report", "a", "--png", "x.png", cwd=tmp_path)
    assert result.code == 0, result.err
    assert result.out == "wrote a/report.html\nwrote x.png\n"
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert cli("plot", "a", "--out", "y.html", cwd=tmp_path).code == 0
    assert (tmp_path / "y.html").read_bytes() == (run / "report.html").read_bytes()
    refused = cli("report", "a", "--out", "b.txt", cwd=tmp_path)
    assert refused.code == 2 and ".html" in refused.error and not (tmp_path / "b.txt").exists()


PROBE = """
<script>
const out = [];
const look = () => out.push([...document.querySelectorAll("figure")].map((f) => ({
  title: f.querySelector("figcaption").firstChild.textContent,
  curves: [...f.querySelectorAll("path.curve")].map(
    (p) => [p.getAttribute("stroke"), p.getAttribute("d")]),
  texts: [...f.querySelectorAll("svg text")].map((t) => t.textContent),
})));
const change = (node, set) => { set(node); node.dispatchEvent(new Event("change")); };
look();
change(document.querySelector("select"), (s) => { s.value = "tokens"; });
look();
change(document.querySelectorAll("#controls input")[1], (b) => { b.checked = false; });
look();
change(document.querySelector("#panel0 input"), (b) => { b.checked = true; });
look();
const svg = document.querySelector("#panel0 svg"), box = svg.getBoundingClientRect();
const at = (type, x) =>
  svg.dispatchEvent(new PointerEvent(type, { clientX: box.left + x * box.width }));
at("pointermove", 0.5);
const tip = document.querySelector("#panel0 .tip").innerText;
at("pointerdown", 0.3); at("pointermove", 0.5); at("pointerup", 0.6);
look();
const pre = document.createElement("pre");
pre.id = "probe";
pre.textContent = JSON.stringify({ out, tip, state: state.view });
document.body.append(pre);
</script>
"""


def browse(page: Path) -> dict[str, Any]:
    """The page's answer to PROBE, out of the DOM that Chromium ends with."""
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"))
    browser = shutil.which("chromium")
    assert browser is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,2000"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [browser, *options, profile, "--dump-dom", probed.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def points(d: str) -> np.ndarray:
    return np.array([[float(v) for v in p.split(" ")] for p in re.split("[ML]", d)[1:]])


@pytest.mark.browser
def test_in_a_browser(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", loss=lambda s: 1.0 * s)]
    _, _, data = page_of(*runs)
    answer = browse(tmp_path / "page.html")
    first, tokens, hidden, log, zoomed = answer["out"]
    assert [p["title"] for p in first] == [p["title"] for p in data["panels"]]
    colours = [run["colour"] for run in data["runs"]]
    loss = first[0]["curves"]  # a, its validation, b, its validation
    assert [c[0] for c in loss] == [colours[0], colours[0], colours[1], colours[1]]
    drawn = np.concatenate([points(d) for _, d in loss])
    steps, values = np.arange(1, 7), np.array([[4 / s for s in range(1, 7)], range(1, 7)])
    evals = np.array([2.5, 4.5, 6.5])
    x = np.concatenate([steps, steps[1::2], steps, steps[1::2]])
    y = np.concatenate([values[0], evals, values[1], evals])
    # one straight line from value to pixel, y downwards, over all curves of the panel
    for axis, expected, sign in ((0, x, 1), (1, y, -1)):
        slope, offset = np.polyfit(expected, drawn[:, axis], 1)
        assert sign * slope > 0
        np.testing.assert_allclose(slope * expected + offset, drawn[:, axis], atol=0.11)
    assert {"1", "2", "3", "4", "5", "6", "optimizer steps"} <= set(first[0]["texts"])
    assert {"100", "600", "tokens"} <= set(tokens[0]["texts"])
    assert [c[0] for c in hidden[0]["curves"]] == [colours[0]] * 2
    falling = points(log[0]["curves"][0][1])
    slope, offset = np.polyfit(np.log(values[0]), falling[:, 1], 1)
    np.testing.assert_allclose(slope * np.log(values[0]) + offset, falling[:, 1], atol=0.11)
    low, high = answer["state"]
    assert 100 < low < 300 < high < 600
    assert "tokens: " in answer["tip"] and "a: 1" in answer["tip"] and "b:" not in answer["tip"]
    assert "600" not in zoomed[0]["texts"]
