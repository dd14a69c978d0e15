"""Figures of the site can be read on a phone and in either theme, and are those of the files."""

import re
import sys
from itertools import combinations

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))
FIGURES = sorted((ROOT / "docs" / "figures").iterdir())
COLUMN = 328  # pixels of the text on a phone of 360 pixels
PIXELS = 4 / 3  # a point
TEXT = re.compile(r"scale\(([\d.]+) -[\d.]+\)")
COLOUR = re.compile(r"(?:fill|stroke): (#\w{6})")


def contrast(colour, other):
    """Of two colours as '#rrggbb', as WCAG defines it."""

    def luminance(text):
        parts = [int(text[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted(map(luminance, (colour, other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_figure(path):
    """Vectors, with text of 11 pixels on a phone, and no colour that white or furo's dark background swallows."""
    assert path.suffix == ".svg"
    text = path.read_text()
    width = float(re.search(r'width="([\d.]+)pt"', text)[1])
    shown = min(COLUMN, width * PIXELS) / width
    assert min(100 * float(size) for size in TEXT.findall(text)) * shown >= 11
    colours = set(COLOUR.findall(text))
    assert colours
    assert min(contrast(colour, page) for colour in colours for page in ("#ffffff", "#131416")) > 3


@pytest.fixture(scope="module")
def plots():
    pytest.importorskip("matplotlib")
    import plots

    return plots


def test_names(plots):
    assert {path.stem for path in FIGURES} == set(plots.FIGURES_BY_NAME)


@pytest.mark.parametrize("name", [path.stem for path in FIGURES])
def test_labels_are_whole_and_apart(plots, name, monkeypatch):
    text, drawn = plots.settled().Text, {}
    draw = text.draw

    def watched(self, renderer):
        if self.get_visible() and self.get_text().strip():
            drawn[self] = self.get_window_extent(renderer).padded(-1)
        draw(self, renderer)

    figure = plots.FIGURES_BY_NAME[name](plots.settled())
    monkeypatch.setattr(text, "draw", watched)
    figure.canvas.draw()
    assert len(drawn) > 5
    for label, box in drawn.items():
        assert figure.bbox.containsx(box.x0) & figure.bbox.containsx(box.x1), f"{label.get_text()!r} is cut"
    for (one, first), (other, second) in combinations(drawn.items(), 2):
        assert not first.overlaps(second), f"{one.get_text()!r} is printed over {other.get_text()!r}"


def test_figures_are_those_of_the_files(plots, monkeypatch, tmp_path):
    """Drawn anew, they have the same numbers of marks; paths of letters depend on matplotlib's version."""
    monkeypatch.setattr(plots, "FIGURES", tmp_path)
    monkeypatch.setattr(plots, "ROOT", tmp_path)
    plots.main([])
    for path in FIGURES:
        new = (tmp_path / path.name).read_text()
        assert re.findall(r"<use ", new) == re.findall(r"<use ", path.read_text()), f"run python bench/plots.py {path}"
