"""docs/steps.png: tokens/s of training steps beside LLMQ's and PyTorch's, and the MFU of each.

python -m bench.figure            (draws bench/steps.toml; --table prints README's table of it)
"""

import argparse
import dataclasses
import tomllib
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from llmq_nb.core.dtype import DType
from llmq_nb.model.families import preset
from llmq_nb.plan.mfu import peak_of, utilisation

ROOT = Path(__file__).parents[1]
DATA, OUT = ROOT / "bench" / "steps.toml", ROOT / "docs" / "steps.png"
WHO = {"llmq_nb": "llmq-nb", "llmq": "LLMQ (C++/CUDA)", "pytorch": "PyTorch, torch.compile"}
COLOURS = {"llmq_nb": "#0b6e4f", "llmq": "#8a8f98", "pytorch": "#c9a227"}
FORMATS = {"bf16": "BF16 products", "e4m3": "FP8 products (e4m3)"}
WIDTH = 0.27


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One setting; rates [tokens/s] by who, without those that were not measured."""

    model: str
    matmul: str
    rates: dict[str, float]

    @property
    def title(self) -> str:
        return self.model.replace("qwen2.5-", "Qwen2.5-").replace("b", "B")

    def mfu(self, who: str, device: str, seq_len: int) -> float:
        """In percent of the card's dense peaks, by LLMQ's formula."""
        return 100 * utilisation(
            self.rates[who], preset(self.model), seq_len=seq_len, matmul=DType(self.matmul),
            peak=peak_of(device),
        )  # fmt: skip


def load(path: Path = DATA) -> tuple[dict[str, str | int], list[Step]]:
    """(device and seq_len, steps)."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    steps = [
        Step(row["model"], row["matmul"], {who: float(row[who]) for who in WHO if who in row})
        for row in data.pop("step")
    ]
    return data, steps


def thousands(rate: float) -> str:
    """For example 171k, 64.2k."""
    return f"{rate / 1e3:.3g}k"


def table() -> str:
    """README's table."""
    _, steps = load()
    by = {(s.model, s.matmul): s for s in steps}
    lines = [
        "| tokens/s | BF16 | LLMQ | PyTorch | FP8 (fast sums) | LLMQ | PyTorch |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in dict.fromkeys(s.model for s in steps):
        cells = [by[model, "bf16"].title]
        for matmul in FORMATS:
            rates = by[model, matmul].rates
            cells += [thousands(rates[who]) if who in rates else "" for who in WHO]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_format(axes: Axes, steps: list[Step], device: str, seq_len: int) -> None:
    """Bars in percent of LLMQ's tokens/s, which stand above them; MFU inside."""
    for i, step in enumerate(steps):
        for j, (who, rate) in enumerate(step.rates.items()):
            height, x = 100 * rate / step.rates["llmq"], i + (j - 1) * WIDTH
            axes.bar(x, height, WIDTH * 0.92, color=COLOURS[who])
            weight = "bold" if who == "llmq_nb" else "normal"
            axes.text(
                x, height + 1.5, thousands(rate), ha="center", fontsize=9.5, weight=weight,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
            mfu = f"{step.mfu(who, device, seq_len):.0f} %"
            axes.text(x, 4, mfu, ha="center", fontsize=9.5, color="white")
    axes.axhline(100, color="#8a8f98", linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(steps)), [s.title for s in steps])
    axes.set_title(FORMATS[steps[0].matmul], fontsize=11, loc="left")
    axes.set_ylim(0, 128)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)


def draw() -> Figure:
    about, steps = load()
    figure = Figure(figsize=(9.6, 5.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharey=True)
    for axes, matmul in zip(panels, FORMATS, strict=True):
        chosen = [s for s in steps if s.matmul == matmul]
        draw_format(axes, chosen, str(about["device"]), int(about["seq_len"]))
    for axes in panels:
        axes.set_ylabel("tokens/s, LLMQ's = 100")
    handles = [panels[0].bar(0, 0, color=COLOURS[who], label=WHO[who]) for who in WHO]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(
        "Training steps on one H200: tokens/s above the bars, model FLOP utilisation in them",
        fontsize=11,
    )
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--table", action="store_true")
    if parser.parse_args().table:
        print(table())
    else:
        draw().savefig(OUT, dpi=150)
