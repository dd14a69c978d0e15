"""Small scatter plots as inline SVG, with a logarithmic y axis and a linear x axis.

Colours are classes of the page's style, so that they follow its theme. A plot is not wider than a phone, where its
letters can be read as they are.
"""

from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 400, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 22, 48
# Of a row of the legend and of a letter, and the least distance of two numbers at the x axis.
ROW, LETTER, APART = 18, 7.2, 22


@dataclass
class Series:
    """Points (x, y, text shown on hover) of one name and colour, a class of the page's style."""

    name: str
    colour: str
    points: list = field(default_factory=list)


def scatter(series, x_label, y_label, x_range, line=None, least=1e-18):
    """An SVG plot of series; y is logarithmic, and values below `least` are drawn at `least`.

    Parameters
    ----------
    series : list of Series
    x_label, y_label : str
    x_range : (int, int)
        Lowest and highest x.
    line : (float, str), optional
        The value and the name of a dashed horizontal line.
    least : float
    """
    values = [max(y, least) for s in series for _, y, _ in s.points] + ([line[0]] if line and line[0] > 0 else [])
    low, high = floor(log10(min(values))), ceil(log10(max(values)) + 1e-9)
    high = max(high, low + 1)
    names, rows = legend(series)
    top, height = TOP + ROW * rows, HEIGHT + ROW * rows

    def across(x):
        first, last = x_range
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - first + 0.5) / (last - first + 1)

    def up(y):
        return height - BOTTOM - (height - top - BOTTOM) * (log10(max(y, least)) - low) / (high - low)

    parts = [*axes(x_label, y_label, x_range, range(low, high + 1), across, up, height)]
    if line and line[0] > 0:
        parts.append(level(line, up(line[0])))
    for s in series:
        parts += [mark(across(x), up(y), s.colour, text) for x, y, text in s.points]
    parts += names
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(y_label)} against {escape(x_label)}">'
        f"{''.join(parts)}</svg>"
    )


def axes(x_label, y_label, x_range, powers, across, up, height):
    """Grid, ticks and labels."""
    step = max(1, len(powers) // 8)
    for n in powers:
        if (n - powers[0]) % step == 0:
            y = up(10.0**n)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{n:+03d}</text>'
    for x in range(x_range[0], x_range[1] + 1, ceil(APART * (x_range[1] - x_range[0] + 1) / (WIDTH - LEFT - RIGHT))):
        yield f'<text x="{across(x):.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{x}</text>'
    middle = (up(10.0 ** powers[0]) + up(10.0 ** powers[-1])) / 2
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>'
    yield f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'


def level(line, y):
    """A dashed horizontal line with its name at the right."""
    return (
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{WIDTH - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end">{escape(line[1])}</text>'
    )


def mark(x, y, colour, text):
    """One point."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{colour}"><title>{escape(text)}</title></circle>'


def legend(series):
    """The names of the series at the top, and the number of their rows."""
    x, row, parts = LEFT, 1, []
    for s in series:
        width = 34 + LETTER * len(s.name)
        if x > LEFT and x + width > WIDTH:
            x, row = LEFT, row + 1
        y = ROW * row
        parts.append(
            f'<circle cx="{x + 5:.1f}" cy="{y - 4}" r="4" class="{s.colour}"/>'
            f'<text x="{x + 14:.1f}" y="{y}">{escape(s.name)}</text>'
        )
        x += width
    return parts, row
