"""Random arguments to every public function: each call is right, or refused by an error of md4's before any work.

`zoo` says what each value means: that a good one is taken as the same call with plain values, that a bad
one is refused. Other cases and more of them: see `strategies`.
"""

from functools import cache

import numpy as np
import pytest
from hypothesis import strategies as st
from public import FUNCTIONS, Shaped, counted, usual
from strategies import TALLY, fuzz, report

import md4

NAMES = sorted(FUNCTIONS)


def plain_arguments(function, texts):
    """The plain values of the same meaning as the values of `texts`; those of bad ones are the usual."""
    out = {}
    for name, values in function.arguments.items():
        value = values[texts[name]]
        out[name] = (value.same or values[usual(name, values)].same)()
    return out


def run(function, arguments):
    """What the call gives, as a list of arrays or None."""
    return [None if v is None else np.array(v) for v in function.call(**arguments)]


@cache
def expected(name, texts):
    """The result of the plain call; an error of md4's where it is refused, too."""
    function = FUNCTIONS[name]
    try:
        return run(function, plain_arguments(function, dict(zip(function.arguments, texts))))
    except md4.MD4Error as error:
        return error


def values_of(function, texts):
    """The values themselves, made anew."""
    made = {name: function.arguments[name][text].make() for name, text in texts.items()}
    shaped = [name for name, value in made.items() if isinstance(value, Shaped)]
    if shaped:
        plain = plain_arguments(function, texts)
        shape = (5,) * 4 if function.conflict(plain) else function.shape(plain)
        made.update({name: made[name].make(shape) for name in shaped})
    return made


def same(ours, theirs):
    """Whether two results agree."""
    if [v is None for v in ours] != [v is None for v in theirs]:
        return False
    pairs = [(a, b) for a, b in zip(ours, theirs) if a is not None]
    return all(a.shape == b.shape and np.allclose(a, b, rtol=1e-11, atol=1e-11) for a, b in pairs)


def fault(name, texts):
    """What is wrong with what a call does, as text; None where it is right."""
    function = FUNCTIONS[name]
    chosen = {argument: function.arguments[argument][text] for argument, text in texts.items()}
    verdicts = {value.verdict for value in chosen.values()}
    conflict = "bad" not in verdicts and function.conflict(plain_arguments(function, texts))
    arguments = values_of(function, texts)
    with counted() as work:
        try:
            result = run(function, arguments)
        except md4.MemoryLimitError:
            return wrong_refusal(verdicts, "r" in work)
        except md4.MD4Error as error:
            TALLY[check_call.__qualname__, "refused"] += 1
            return wrong_refusal(verdicts, bool(work)) if not conflict and str(error) else None
        except Exception as error:
            return f"raises {type(error).__name__}: {error!s:.80}"
    if "bad" in verdicts or conflict:
        return "is accepted"
    plain = expected(name, tuple(texts[argument] for argument in function.arguments))
    if isinstance(plain, md4.MD4Error):
        return f"is accepted, where the plain call is not: {plain}"
    return None if same(result, plain) else "gives another result than the plain call"


def wrong_refusal(verdicts, worked):
    """A good call may not be refused, and no call after work."""
    if verdicts == {"good"}:
        return "is refused, but good"
    return "is refused after work" if worked else None


def defaults(name):
    """The texts of the usual values."""
    return {argument: usual(argument, values) for argument, values in FUNCTIONS[name].arguments.items()}


def odd(name, texts):
    """Those arguments that are not the usual ones, for messages."""
    usual_ones = defaults(name)
    return ", ".join(f"{a}={t}" for a, t in texts.items() if t != usual_ones[a]) or "the usual"


@st.composite
def calls(draw):
    """A function and its arguments: up to three of them from the whole zoo, the others good or usual."""
    name = draw(st.sampled_from(NAMES))
    arguments, texts = FUNCTIONS[name].arguments, defaults(name)
    wild = draw(st.one_of(st.just([]), st.lists(st.sampled_from(sorted(arguments)), max_size=3, unique=True)))
    for argument, values in arguments.items():
        if argument in wild:
            texts[argument] = draw(st.sampled_from(list(values)))
        elif draw(st.booleans()):
            texts[argument] = draw(st.sampled_from([t for t, v in values.items() if v.verdict != "bad"]))
    return name, texts


def check_call(case):
    """The call is right or rightly refused."""
    name, texts = case
    found = fault(name, texts)
    assert found is None, f"{name}({odd(name, texts)}) {found}"


@pytest.mark.parametrize("name", NAMES)
def test_each_value_alone(name):
    """Every value of every argument, the others as usual: all that is wrong in one list."""
    found = []
    for argument, values in FUNCTIONS[name].arguments.items():
        for text in values:
            texts = defaults(name) | {argument: text}
            found.append((odd(name, texts), fault(name, texts)))
    print(f"\n{name}: {len(found)} calls, {sum(f is not None for _, f in found)} wrong")
    wrong = [f"{name}({call}) {what}" for call, what in found if what]
    assert not wrong, "\n".join(wrong)


def test_random_calls():
    fuzz(check_call, calls(), 200)
    report(check_call)


@pytest.mark.slow
def test_random_calls_at_length():
    fuzz(check_call, calls(), 5000)
    report(check_call)
