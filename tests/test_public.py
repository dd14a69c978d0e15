"""What `import md4` offers: names, types and a version."""

import inspect
import re
from pathlib import Path

import pytest
from places import ROOT

import md4


def functions():
    """Name and function of all that is public: functions, and the public methods and properties of classes."""
    for name in md4.__all__:
        thing = getattr(md4, name)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.ismodule(thing):
            yield from ((f"{name}.{function}", getattr(thing, function)) for function in thing.__all__)
        elif not issubclass(thing, Exception):
            for method, value in vars(thing).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if inspect.isfunction(function) and (method == "__init__" or not method.startswith("_")):
                    yield f"{name}.{method}", function


FUNCTIONS = dict(functions())
# Public to md4's own modules only; docs/api.md does not show them.
INTERNAL = {
    "Engine.check_memory", "Engine.checked_lists", "Engine.lock", "Engine.run_steps",
    "Engine.with_backend",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - INTERNAL))
def test_all_that_is_public_has_types(name):
    signature = inspect.signature(FUNCTIONS[name])
    assert signature.return_annotation is not inspect.Signature.empty
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    assert [p.name for p in parameters if p.annotation is p.empty] == []


def test_type_checkers_are_told():
    assert (Path(md4.__file__).parent / "py.typed").is_file()


def test_names():
    assert {"int2e", "JK.get_jk", "Basis.from_arrays", "Basis.nao", "Engine.compute", "Operator.erf"} <= set(FUNCTIONS)
    assert md4.__version__[0].isdigit()


def test_readme_s_test_command_calls_all_that_is_public(collected, fast):
    """Each function, class and method is named in a module with tests that are not `thorough`."""
    if not {item.path for item in collected} >= set((ROOT / "tests").rglob("test_*.py")):
        pytest.skip("not all tests were collected")
    code = "\n".join(path.read_text() for path in {item.path for item in fast})
    methods = {name.rpartition(".")[2] for name in FUNCTIONS.keys() - INTERNAL} - {"__init__"}
    assert sorted({*md4.__all__, *methods} - set(re.findall(r"\w+", code))) == []
