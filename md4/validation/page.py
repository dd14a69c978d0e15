"""The page of a `md4.validation.report.Report`: HTML, with its style and plots inside."""

from html import escape

import numpy as np

from md4.support.display import SPDF, facts, table
from md4.validation.svg import Series, scatter

BLUE, ORANGE, RED = "blue", "orange", "red"  # classes of the style
L_AXIS = "L, the sum of the four angular momenta"
STYLE = """
:root{color-scheme:light dark;--back:#fff;--ink:#1c1c1c;--pale:#555;--line:#ddd;--grid:#e6e6e6;
--blue:#2a6fbb;--orange:#c96a12;--red:#b3261e}
@media (prefers-color-scheme:dark){:root{--back:#16181c;--ink:#e4e4e4;--pale:#a8a8a8;--line:#3a3d42;--grid:#33363b;
--blue:#6aa9f0;--orange:#f0a35a;--red:#ff7a70}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back)}
body{margin:0 auto;max-width:60rem;padding:1rem}
h1{font-size:1.5rem;margin:.4rem 0}
h2{font-size:1.15rem;margin:2rem 0 .4rem;border-top:1px solid var(--line);padding-top:1rem}
p{max-width:44rem;margin:.4rem 0}
.verdict{display:inline-block;padding:.1rem .7rem;border-radius:.3rem;color:#fff;font-weight:700}
.pass{background:#1d6f42}.fail{background:#b3261e}.incomplete{background:#8a5a00}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;margin:.5rem 0}
th,td{padding:.15rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th:first-child,td:first-child,td:last-child,th:last-child{text-align:left}
.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}
.facts th{font-weight:400;color:var(--pale);white-space:normal}
thead th{border-bottom:1px solid var(--pale);white-space:normal;vertical-align:bottom}
svg{display:block;width:100%;max-width:34rem;height:auto;font:13px system-ui,sans-serif;fill:var(--ink)}
.grid{stroke:var(--grid)}.level{stroke:var(--pale);stroke-dasharray:5 4}
.blue{fill:var(--blue)}.orange{fill:var(--orange)}.red{fill:var(--red)}
"""
RULED = ("class", "shells", "element", "md4", "md4 - libcint", "md4 - oracle", "libcint - oracle", "nearer")


def page(report):
    """The whole page of a report as one string."""
    verdict = report.verdict
    body = "".join([
        head(report, verdict), section("Classes", *classes(report)), section("Arbitration", *arbitration(report)),
        section("Density fitting", *fitting(report)) if report.fitting else "",
        section("Operators", *operators(report)), section("Contractions", *contractions(report)),
        section("Symmetries", *symmetries(report)), section("Worst cases", *worst(report)),
    ])  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{verdict}: md4 accuracy, {escape(report.title)}</title><style>{STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def section(title, *parts):
    """A titled section."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def wide(text, kind=""):
    """A piece of HTML that may be wider than the screen, with a scroll bar of its own."""
    return f'<div class="wide {kind}">{text}</div>'


def paragraph(text):
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def head(report, verdict):
    """Title, verdict, a sentence on each kind of check, the options, the device, versions, and times."""
    parts = [
        f"<h1>md4: accuracy of this installation</h1><p><span class='verdict {verdict.lower()}'>{verdict}</span></p>",
        *map(paragraph, summary(report)),
        wide(facts([*report.options, *report.device, *times(report)]), "facts"),
    ]
    return "".join(parts)


def times(report):
    """How long all checks took, and the share of it that later calls do not take."""
    first = sum(record.first_seconds for record in (*report.records, *report.fitting))
    return [("wall time / s", report.seconds), ("of it first calls, which compile / s", first)]


def summary(report):
    """Sentences on the classes, the checks, and what was not checked."""
    bad, skipped = report.failed, report.skipped
    made = len(report.checks) - len(skipped)
    quartets, blocks = (sum(r.quartets for r in records) for records in (report.records, report.fitting))
    more = f", {len(report.fitting)} classes of density fitting ({blocks} blocks)" if report.fitting else ""
    yield f"{len(report.records)} classes ({quartets} quartets){more} and {made} other checks; {len(bad)} failed."
    if bad:
        yield "Failed: " + "; ".join(bad) + "."
    if skipped:
        yield f"{len(skipped)} checks were not made: {skipped[0].note}."


def verdict_of(record, rulings, counted="quartets"):
    """The verdict on a record in the table of classes; `counted` is what was compared."""
    if record.disputed == 0:
        return "pass" if record.passed else "FAIL"
    ruled = sum(r.label == record.label and r.exact is not None for r in rulings)
    if record.passed:
        return f"pass: libcint is off ({ruled} of {record.disputed} disputed {counted} judged)"
    return f"FAIL, {record.disputed} {counted}" if ruled else f"FAIL, {record.disputed} {counted} not arbitrated"


def classes(report):
    """Text, plots and table of the classes."""
    yield paragraph(
        "Each class (ab|cd) stands for its eight permutations. An error is relative to the largest element of its "
        "shell quartet; 'floor' counts quartets that are small by cancellation, where rounding sets the error of both "
        "programs. Times are those of the same quartets, the faster one of two calls each, libcint on PySCF's threads "
        "and without its set-up. What md4's first calls took longer, mostly to compile, is in the table above. A few "
        "quartets take as long as a call takes to begin and to end, whatever their class."
    )
    yield error_plot(report)
    yield time_plot(report)
    yield class_table(report.records, report.rulings)


def class_table(records, rulings, counted="quartets"):
    """The table of classes."""
    rows = [
        (r.label, r.quartets, f"{r.max_abs:.1e}", f"{r.max_rel:.1e}", r.floor or "", f"{r.md4_seconds:.4f}",
         f"{r.libcint_seconds:.4f}", verdict_of(r, rulings, counted))
        for r in records
    ]  # fmt: skip
    errors = "largest error / Hartree", "largest relative error"
    return wide(table(("class", counted, *errors, "floor", "md4 / s", "libcint / s", "verdict"), rows))


def fitting(report):
    """The classes of density fitting, and what the oracle says about them."""
    yield paragraph(
        "Integrals over three centres, (ab|P), and over two, (P|Q), with shells P and Q of the auxiliary basis. Errors "
        "and times are those of the classes of four centres, for blocks of three and of two shells."
    )
    yield class_table(report.fitting, report.fitting_rulings, "blocks")
    if report.fitting_rulings:
        yield paragraph("Blocks where md4 and libcint differ beyond tolerance; the oracle computed an element of each.")
        yield wide(table(RULED, ruled_rows(report.fitting_rulings)))


def total_l(record):
    """L of a class, from its label."""
    return sum(SPDF.find(letter) for letter in record.label if letter in SPDF)


def l_range(report):
    """Lowest and highest L."""
    ls = [total_l(r) for r in report.records]
    return min(ls), max(ls)


def error_plot(report):
    """Relative error of each class against L."""
    kinds = {
        "within tolerance": Series("within tolerance", BLUE),
        "libcint off, by the oracle": Series("libcint off, by the oracle", ORANGE),
        "failed": Series("failed", RED),
    }
    for r in report.records:
        name = "failed" if not r.passed else "libcint off, by the oracle" if r.disputed else "within tolerance"
        if np.isfinite(r.max_rel):
            kinds[name].points.append((total_l(r), r.max_rel, f"{r.label} {r.max_rel:.1e}"))
    line = report.tolerance, f"tolerance {report.tolerance:g}"
    series = [s for s in kinds.values() if s.points]
    if not series:
        return ""
    return wide(scatter(series, L_AXIS, "largest relative difference", l_range(report), line, 1e-17))


def time_plot(report):
    """Microseconds for a quartet against L, for both programs."""
    mine, other = Series("md4", BLUE), Series("libcint", ORANGE)
    for r in report.records:
        for s, seconds in ((mine, r.md4_seconds), (other, r.libcint_seconds)):
            value = 1e6 * seconds / r.quartets
            s.points.append((total_l(r), value, f"{r.label} {s.name} {value:.3g} us"))
    return wide(scatter([mine, other], L_AXIS, "microseconds a quartet", l_range(report), least=1e-6))


def ruled_rows(rulings):
    """Rows of the table with the head RULED."""
    for r in rulings:
        q = r.quartet
        errors = ("", "") if r.exact is None else (f"{q.ours - r.exact:.1e}", f"{q.theirs - r.exact:.1e}")
        place = " ".join(map(str, q.shells)), " ".join(map(str, q.element))
        yield r.label, *place, f"{q.ours:.12e}", f"{q.ours - q.theirs:.1e}", *errors, r.who


def arbitration(report):
    """The decisions of the oracle where md4 and libcint differ beyond the tolerance."""
    if not report.rulings:
        yield paragraph("md4 and libcint agree within tolerance in every quartet; nothing to arbitrate.")
        return
    yield paragraph(
        "Where md4 and libcint differ beyond tolerance, the element of the largest difference was computed with 30 "
        "digits by another method, for the two worst quartets of a class at most. Numbers are in Hartree."
    )
    known = [r for r in report.rulings if r.exact is not None]
    right = sum(r.md4_passes(report.tolerance, report.abs_tolerance) for r in known)
    off = sum(r.libcint_error > report.tolerance * r.quartet.largest for r in known)
    yield paragraph(
        f"Of {len(report.rulings)} elements {len(known)} were computed: md4 is within tolerance in {right}, libcint "
        f"beyond it in {off}."
    )
    yield wide(table(RULED, ruled_rows(report.rulings)))


def check_table(checks):
    """A table of checks."""
    rows = [
        (c.name, c.against, c.count, "" if c.passed is None else f"{c.error:.1e}", f"{c.tolerance:.0e}",
         {True: "pass", False: "FAIL", None: "not made"}[c.passed] + (f": {c.note}" if c.note else ""))
        for c in checks
    ]  # fmt: skip
    return wide(table(("check", "against", "compared", "largest relative error", "tolerance", "verdict"), rows))


def operators(report):
    """erf and erfc with the molecule, all operators with md4's own shells."""
    yield paragraph("With the molecule, against libcint; beyond tolerance the oracle arbitrates, see above.")
    yield check_table(report.operators)
    yield paragraph(
        "With primitive shells on two to four centres, against the oracle, which shares nothing with md4's kernels. "
        "Parameters are in atomic units; errors are relative to the largest element of the block."
    )
    yield check_table(report.oracle)


def contractions(report):
    """Kinds of contraction."""
    yield paragraph(
        "Two centres with s, p and d shells: one primitive each, five primitives (segmented), and three contracted "
        "functions of the same five primitives (general)."
    )
    yield check_table(report.contractions)


def symmetries(report):
    """Identities that integrals obey."""
    yield paragraph(
        "Primitive shells on four centres: the seven other orders of (ab|cd); all centres moved by (3, -7, 5) Bohr; "
        "all centres rotated and the components turned back."
    )
    yield check_table(report.symmetries)


def worst(report):
    """The quartets with the largest differences between md4 and libcint."""
    yield paragraph(
        "The quartets of the molecule where md4 and libcint differ most for what the tolerances allow. 'shells' are "
        "numbers of shells in the molecule, 'element' is a place within them."
    )
    yield wide(table(RULED, ruled_rows(report.worst)))
