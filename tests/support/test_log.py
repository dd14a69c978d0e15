"""What md4 tells Python's logging, and that it is silent if nobody listens."""

import logging
import re
import subprocess
import sys

import numpy as np

import md4
from md4.contract.workspace import HermiteStore
from md4.support.log import log


def test_silent_unless_somebody_listens(capsys):
    assert [type(handler) for handler in log.handlers] == [logging.NullHandler]
    code = "import md4, logging; logging.getLogger('md4').error('unheard')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def messages(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_what_a_calculation_tells(caplog, water):
    """Once each, however many blocks and builds there are."""
    caplog.set_level(logging.DEBUG, "md4")
    md4.int2e(water, backend="cpu", max_memory=100)
    backend, tensor = messages(caplog, logging.DEBUG)
    assert re.fullmatch(r"backend cpu \(threads \d+, memory cap 100 MB\)", backend)
    assert re.fullmatch(r"tensor s1 of 13 AOs: \d+ pairs of lists of shell pairs", tensor)
    caplog.clear()
    jk = md4.JK(water, backend="cpu")
    for _ in range(2):
        jk.get_jk(np.eye(water.nao))
    backend, lists = messages(caplog, logging.DEBUG)
    assert backend.endswith("memory cap none)")
    assert re.fullmatch(r"\d+ lists of \d+ shell pairs and their bounds made in [\d.]+ s", lists)


def test_programs_that_show_info_are_not_disturbed(caplog, water):
    """geomeTRIC sets the root logger to INFO, and each step is a calculation. Code is compiled once, and only then."""
    caplog.set_level(logging.INFO)
    md4.attach(water.RHF(), backend="cpu").nuc_grad_method().as_scanner()(water)
    md4.attach(water.RHF().density_fit(), backend="cpu").kernel()
    texts = [record.getMessage() for record in caplog.records if record.name == "md4"]
    assert [text for text in texts if "compiled" not in text] == []


def test_memory_that_is_given_up(caplog, water):
    caplog.set_level(logging.DEBUG, "md4")
    engine = md4.Engine(md4.Basis.from_mol(water), backend="cpu")
    pieces = [engine.prepare([[i, i]]) for i in range(2)]
    caplog.clear()
    store = HermiteStore(1, engine.backend)
    store.touch(*pieces)
    store.touch(*reversed(pieces))
    store.touch(pieces[1], pieces[1])
    assert [text[:21] for text in messages(caplog, logging.DEBUG)] == ["H matrices beyond 1 B"]
