"""A directive that draws a walk through files as a column of boxes with arrows, in SVG.

    :::{walk} caption
    file: what is done there
    gpu/paths: the path is chosen
    :::

Files of one package have one colour. In Markdown (elsewhere than HTML) it is a list.
"""

from html import escape

from docutils import nodes
from docutils.parsers.rst import Directive

WIDTH, BOX, HEIGHT, STEP = 700, 190, 30, 46
COLOURS = {
    "contract": "#d9ead3", "engine": "#fff2cc", "gpu": "#dbe8f6", "gpu/kernels": "#f6d9d5", "shells": "#e8ddf2",
}  # fmt: skip


def colour(file):
    """That of the longest package name that a file begins with."""
    found = [name for name in COLOURS if file.startswith(name)]
    return COLOURS[max(found, key=len)] if found else "#eeeeee"


def drawn(rows, caption):
    """The SVG of (file, what) rows."""
    height = STEP * len(rows) + 8
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width:{WIDTH}px" role="img" '
        f'aria-label="{escape(caption)}" font-family="sans-serif" font-size="13" xmlns="http://www.w3.org/2000/svg">'
    ]
    for n, (file, what) in enumerate(rows):
        y = 4 + STEP * n
        if n:
            parts.append(
                f'<path d="M {BOX // 2} {y - STEP + HEIGHT} V {y - 5} m -4 -3 l 4 6 l 4 -6" fill="none" '
                'stroke="currentColor"/>'
            )
        parts.append(
            f'<rect x="1" y="{y}" width="{BOX}" height="{HEIGHT}" rx="5" fill="{colour(file)}" stroke="#555"/>'
            f'<text x="{BOX // 2}" y="{y + 20}" text-anchor="middle" fill="#111">{escape(file)}</text>'
            f'<text x="{BOX + 14}" y="{y + 20}" fill="currentColor">{escape(what)}</text>'
        )
    return "".join(parts) + "</svg>"


class Walk(Directive):
    """See the module."""

    has_content, required_arguments, final_argument_whitespace = True, 1, True

    def run(self):
        rows = [tuple(part.strip() for part in line.split(":", 1)) for line in self.content if line.strip()]
        if not rows or any(len(row) != 2 for row in rows):
            raise self.error("each line of a walk is 'file: what is done there'")
        picture = nodes.raw("", drawn(rows, self.arguments[0]), format="html")
        figure = nodes.figure("", picture)
        figure += nodes.caption("", self.arguments[0])
        return [figure]


def setup(app):
    app.add_directive("walk", Walk)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
