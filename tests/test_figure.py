"""README's table of step rates is the one that bench.figure makes of bench/steps.toml, and the
figure draws every row of it."""

from pathlib import Path

from bench import figure

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_has_the_table() -> None:
    assert figure.table() in README.read_text(encoding="utf-8")


def test_the_figure_shows_every_rate() -> None:
    _, steps = figure.load()
    panels = figure.draw().axes
    assert len(panels) == len(figure.FORMATS)
    for axes, matmul in zip(panels, figure.FORMATS, strict=True):
        texts = [t.get_text() for t in axes.texts]
        chosen = [s for s in steps if s.matmul == matmul]
        assert [t.get_text() for t in axes.get_xticklabels()] == [s.title for s in chosen]
        wanted = [figure.thousands(rate) for s in chosen for rate in s.rates.values()]
        assert texts[::2] == wanted
        assert all(t.endswith(" %") for t in texts[1::2])
