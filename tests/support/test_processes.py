"""The modules that processes of the same interpreter import."""

import os
import queue
import subprocess
import sys

import pytest

import md4
from md4.support.processes import command, environment

TELL = "import md4, queue, beside; print(md4.__file__, queue.__file__, beside.__file__, sep='\\n')"


@pytest.mark.parametrize("where", ["current", "script", "environment"])
def test_a_process_imports_the_md4_of_its_parent(where, tmp_path, monkeypatch):
    """Not that of another folder; it finds modules beside the script, but none in place of Python's own."""
    script, other = tmp_path / "script", {"current": tmp_path, "environment": tmp_path / "path"}.get(where)
    other = other or script
    for path in (script / "queue.py", other / "md4" / "__init__.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise ImportError('not this one')")
    (script / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(script), "", *sys.path])
    env = environment()
    env["PYTHONPATH"] = str(other) if where == "environment" else ""
    done = subprocess.run(command(TELL), env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [md4.__file__, queue.__file__, str(script / "beside.py")]


def test_a_process_that_compiles_has_one_thread_for_linear_algebra(monkeypatch):
    """Whatever the caller's has, to whom nothing happens."""
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    tell = "import os; print(*(os.environ[name] for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MD4_JOBS')))"
    done = subprocess.run(command(tell), env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", "1"]
    assert os.environ["OMP_NUM_THREADS"] == "8"
