"""Small scatter plots as inline SVG, with a logarithmic y axis and a linear x axis."""

from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 34, 44


@dataclass
class Series:
    """Points (x, y, text shown on hover) of one colour and name."""

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

    def across(x):
        first, last = x_range
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - first + 0.5) / (last - first + 1)

    def up(y):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (log10(max(y, least)) - low) / (high - low)

    parts = [*axes(x_label, y_label, x_range, range(low, high + 1), across, up)]
    if line and line[0] > 0:
        parts.append(level(line, up(line[0])))
    for s in series:
        parts += [mark(across(x), up(y), s.colour, text) for x, y, text in s.points]
    parts += legend(series)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} against {escape(x_label)}">'
        f"{''.join(parts)}</svg>"
    )


def axes(x_label, y_label, x_range, powers, across, up):
    """Grid, ticks and labels."""
    step = max(1, len(powers) // 8)
    for n in powers:
        if (n - powers[0]) % step == 0:
            y = up(10.0**n)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{n:+03d}</text>'
    for x in range(x_range[0], x_range[1] + 1):
        yield f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x}</text>'
    middle = (HEIGHT - BOTTOM + TOP) / 2
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    yield f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'


def level(line, y):
    """A dashed horizontal line with its name at the right."""
    return (
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{WIDTH - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end">{escape(line[1])}</text>'
    )


def mark(x, y, colour, text):
    """One point."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(text)}</title></circle>'


def legend(series):
    """The names of the series, in a row at the top."""
    x = LEFT
    for s in series:
        yield f'<circle cx="{x + 5}" cy="14" r="4" fill="{s.colour}"/><text x="{x + 14}" y="18">{escape(s.name)}</text>'
        x += 34 + 6.6 * len(s.name)
