"""Display of md4's objects: small HTML tables for notebooks, and numbers with units.

Nothing here computes integrals, compiles, or accesses a device. A table shows what an object holds already.
"""

from html import escape
from math import ceil

import numpy as np

PADDING = "padding:.1em .7em"
SPDF = "spdfghiklmnoqrtuvwxyz"
UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
# Those facts of a backend that do not change while it works.
SET_UP = ("threads", "device", "arithmetic unit", "memory cap")


def shell_letter(l):
    """Spectroscopic letter of angular momentum `l`, e.g. 'i' for 6."""
    return SPDF[l] if l < len(SPDF) else f"[l={l}]"


def size_text(nbytes):
    """A number of bytes as '1.2 MB', with three digits."""
    for scale, unit in UNITS:
        number = nbytes / scale
        if number >= 0.9995:
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{nbytes:.0f} B"


def least_text(nbytes):
    """As `size_text`, but rounded up: so much is enough."""
    nbytes = ceil(nbytes)
    step = 10 ** max(0, len(str(nbytes)) - 3)
    return size_text(-(-nbytes // step) * step)


def cell(value):
    """A value as escaped text: large integers with grouped digits, floats with three digits."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return f"{value:,}".replace(",", "\N{THIN SPACE}") if abs(value) >= 10000 else str(value)
    if isinstance(value, (float, np.floating)):
        return f"{value:.3g}"
    return escape(str(value))


def style(value):
    """The style of a cell, or of the head above it. Numbers are aligned to the right, and all cells have padding."""
    number = isinstance(value, (int, float, np.number))
    return f' style="{PADDING}{";text-align:right" if number else ""}"'


def table(head, rows, caption=None):
    """An HTML table of `rows`, each as long as `head`; all texts are escaped."""
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    rows = list(rows)
    styles = map(style, rows[0]) if rows else [style("")] * len(head)
    top += "<thead><tr>" + "".join(f"<th{s}>{escape(h)}</th>" for h, s in zip(head, styles)) + "</tr></thead>"
    body = ("<tr>" + "".join(f"<td{style(v)}>{cell(v)}</td>" for v in row) + "</tr>" for row in rows)
    return f"<table>{top}<tbody>{''.join(body)}</tbody></table>"


def facts(pairs):
    """An HTML table of (name, value), with one pair in each line."""
    row = '<tr><th scope="row" style="{0}">{1}</th><td style="{0}">{2}</td></tr>'
    rows = (row.format(f"{PADDING};text-align:left", escape(name), cell(value)) for name, value in pairs)
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def block(title, *parts):
    """A piece of HTML with a title."""
    return f"<div><strong>{escape(title)}</strong>{''.join(parts)}</div>"


def basis_rows(basis):
    """(l, nprim, nctr, number of shells, number of AOs) of each kind of shell of a basis."""
    kinds = np.column_stack([basis.classes[:, 0], basis.nprims, basis.classes[:, 1]])
    found, counts = np.unique(kinds, axis=0, return_counts=True)
    return [
        (shell_letter(l), nprim, nctr, n, n * nctr * basis.ncomp(l))
        for (l, nprim, nctr), n in zip(found.tolist(), counts.tolist())
    ]


def basis_html(basis):
    """The shells of a basis by kind."""
    kind = "spherical" if basis.pure else "Cartesian"
    title = f"Basis: {basis.nshell} {kind} shells, {basis.nao} AOs"
    return block(title, table(("l", "nprim", "nctr", "shells", "AOs"), basis_rows(basis)))


def pairs_name(pairs):
    """Letters of a class of shell pairs, with numbers of contracted functions above one, such as 'd2p'."""
    sides = ((pairs.la, pairs.nctr_a), (pairs.lb, pairs.nctr_b))
    return "".join(shell_letter(l) + (str(n) if n > 1 else "") for l, n in sides)


def pairs_facts(pairs):
    """The contents of a list of shell pairs, as (name, value)."""
    return [
        ("class", pairs_name(pairs)),
        ("shell pairs", len(pairs)),
        ("primitive pairs", pairs.nprim),
        ("most primitive pairs of a shell pair", pairs.max_prim),
        ("function pairs of a shell pair, N_ab", pairs.nab),
        ("Hermite functions of a primitive pair, N_p", pairs.nherm),
        ("host memory", size_text(pairs.nbytes)),
    ]


def pairs_html(pairs):
    """One list of shell pairs."""
    return block("ShellPairs", facts(pairs_facts(pairs)))


def prepared_text(prepared):
    """One line about pairs that are prepared for a backend."""
    forms = ", ".join(f"H as {form} {size_text(h.nbytes)}" for form, h in prepared.whole._h.items())
    return f"PreparedPairs({prepared.pairs!r}, {prepared.backend.name!r}, {forms or 'no H yet'})"


def prepared_html(prepared):
    """Pairs that are prepared for a backend, and the H matrices that are kept."""
    rows = [*pairs_facts(prepared.pairs), ("backend", prepared.backend.name)]
    if prepared.data is not None:
        rows.append(("data of primitive pairs", size_text(prepared.data.nbytes)))
    if prepared.whole is not prepared:
        rows.append(("slice of a list, from pair", prepared.first))
    rows += [(f"H[ab, p], form {form}", size_text(h.nbytes)) for form, h in prepared.whole._h.items()]
    return block("PreparedPairs", facts(rows))


def operator_text(operator):
    """An operator and its parameter."""
    return f"{operator.kind}({operator.parameter:g})" if operator.parameter else operator.kind


def backend_text(backend):
    """A backend on one line: where it computes, and up to how much memory."""
    told = [f"{name} {value}" for name, value in backend.facts() if name in SET_UP]
    return f"{backend.name} ({', '.join(told)})"


def engine_html(engine):
    """Operator, backend and the two basis sets of an engine."""
    rows = [("operator", operator_text(engine.operator)), ("backend", engine.backend.name), *engine.backend.facts()]
    parts = [facts(rows), basis_html(engine.bra_basis)]
    if engine.ket_basis is not engine.bra_basis:
        parts.append(basis_html(engine.ket_basis))
    return block("Engine", *parts)


def list_rows(lists):
    """(class, pairs, primitive pairs, largest and smallest bound, memory of H) of each pair list of a JK object."""
    return [
        (
            pairs_name(this.pairs), len(this), this.pairs.nprim, this.bound.max(initial=0.0),
            this.bound.min(initial=np.inf), size_text(sum(h.nbytes for h in this.prepared.whole._h.values())),
        )
        for this in lists
    ]  # fmt: skip


def jk_html(jk):
    """Basis, options, last build and, if they are made already, the pair lists of a JK object, of its first device."""
    backend, stats = jk.engine.backend, jk.stats
    built = stats.seconds > 0
    rows = [
        ("operator", operator_text(jk._operator(None))),
        ("direct_scf_tol / Hartree", f"{jk.direct_scf_tol:g}"),
        ("backend", backend.name),
        *backend.facts(),
        ("devices and processes that share a build", jk.team.size),
        ("last build / s", stats.seconds if built else "none yet"),
    ]
    if built:
        rows += [("quartets computed", stats.computed), ("quartets skipped", stats.skipped)]
    parts = [facts(rows), basis_html(jk.basis)]
    lists = jk.team.lists
    if lists:
        head = ("class", "pairs", "primitive pairs", "largest bound", "smallest bound", "H kept")
        parts.append(table(head, list_rows(lists), "Pair lists; bounds in Hartree^(1/2)"))
    return block("JK", *parts)
