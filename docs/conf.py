"""Sphinx configuration: `sphinx-build -W --keep-going -b html docs docs/_build/html`."""

import posixpath
import re
import sys
from importlib import metadata
from pathlib import Path

from docutils import nodes

import md4

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "md4"
author = "The md4 developers"
version = release = md4.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "walk"]
exclude_patterns = ["_build", "_ext", "jupyter_execute", "**.ipynb_checkpoints"]
default_role = "py:obj"  # `name` in docstrings: a link where there is such an object, else just code

# Markdown
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Notebooks are run at each build, on the CPU where there is no GPU; those of an unchanged notebook are kept.
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_markdown_format = "myst"  # of output: with tables and equations

# Docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes as a list

# Looks
html_theme = "furo"
html_title = f"md4 {release}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_css_files = ["md4.css"]

# MathJax in one file, from PyPI and not from a server, so that the site can be read without internet. SVG output needs
# no fonts. The package's own extension copies all of MathJax, 24 MB; this takes the 2 MB that are used.
mathjax_path = "tex-svg.js"
mathjax_file = "sphinx-mathjax-offline/static/mathjax/tex-svg.js"
html_static_path = ["_static", str(metadata.distribution("sphinx-mathjax-offline").locate_file(mathjax_file))]

# Characters of a table's cell that is not broken into lines.
SHORT = 20

# Files of the repository that are pages here, by other names.
PAGES = {
    "bench/RESULTS.md": "docs/benchmarks.md",
    "CONTRIBUTING.md": "docs/contributing.md",
}
LINK = re.compile(r"\]\(([^)#:\s]+)")


def relinked(text, folder, page_folder):
    """A text in `folder` of the repository with links that are right on a page in `page_folder`."""

    def link(match):
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if path in PAGES or folder != page_folder:
            return "](" + posixpath.relpath(PAGES.get(path, path), page_folder)
        return match[0]

    return LINK.sub(link, text)


def link_page(app, docname, source):
    folder = posixpath.dirname(f"docs/{docname}")
    source[0] = relinked(source[0], folder, folder)


def link_included(app, path, docname, source):
    folder = posixpath.normpath(posixpath.join("docs", posixpath.dirname(path.as_posix())))
    source[0] = relinked(source[0], "" if folder == "." else folder, "docs")


def mark_short_cells(app, doctree):
    """Cells of tables that hold a number, a name or some code: kept on one line by md4.css."""
    for entry in doctree.findall(nodes.entry):
        text = entry.astext()
        phrase = " " in text and not text[0].isdigit() and not list(entry.findall(nodes.literal))
        if len(text) <= SHORT and not phrase:
            entry["classes"].append("short")


def setup(app):
    app.connect("source-read", link_page)
    app.connect("include-read", link_included)
    app.connect("doctree-read", mark_short_cells)
