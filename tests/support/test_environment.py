"""What is installed, from where, and what a message advises."""

import json
import re
import subprocess
import sys
from importlib import metadata

import pytest
from places import ROOT

from md4 import gpu
from md4.engine import make_backend
from md4.errors import DeviceError
from md4.method.operators import Operator
from md4.support import environment
from md4.support.environment import NUMBA_CUDA, way_to_extra


class Installed:
    """A distribution with a file that says where it came from, or without one."""

    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize(
    ("origin", "advice"),
    [
        (None, "run `pip install 'md4[cu13]'`"),
        ({"url": ROOT.as_uri(), "dir_info": {}}, f"run `pip install '{ROOT}[cu13]'`"),
        ({"url": ROOT.as_uri(), "dir_info": {"editable": True}}, f"run `pip install -e '{ROOT}[cu13]'`"),
        ({"url": "file:///nowhere/md4", "dir_info": {}}, "install md4 with its extra cu13, as its README shows"),
        ({"url": "https://a.org/md4.whl", "archive_info": {}}, "install md4 with its extra cu13, as its README shows"),
    ],
)
def test_advice_names_a_command_only_where_it_works(origin, advice, monkeypatch):
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(origin))
    assert way_to_extra("cu13") == advice


def test_advice_where_md4_is_not_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert way_to_extra("pyscf") == "install md4 with its extra pyscf, as its README shows"


def test_the_series_of_numba_cuda_is_that_of_the_extras():
    text = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r"numba-cuda\[cu1\d\]>=([\d.]+),", text)) == {NUMBA_CUDA}


@pytest.fixture
def other_numba_cuda(request, monkeypatch):
    """numba-cuda of the version that the test names; None for none."""
    version = environment.version
    monkeypatch.setattr(environment, "version", lambda name: request.param if name == "numba-cuda" else version(name))
    environment.missing_for_gpu.cache_clear()
    yield
    environment.missing_for_gpu.cache_clear()


@pytest.mark.parametrize(
    ("other_numba_cuda", "message"),
    [(None, "numba-cuda is not installed; "), ("0.29.0", "0.29.0 is installed, but md4 needs 0.30; ")],
    indirect=["other_numba_cuda"],
)
def test_without_the_packages_for_gpus(other_numba_cuda, message):
    assert not gpu.available()
    assert make_backend("auto", Operator.coulomb()).name == "cpu"
    with pytest.raises(DeviceError, match=f"{message}.*cu13.*backend='cpu' works without"):
        make_backend("cuda", Operator.coulomb())
    found, reason = environment.gpus()
    assert found == []
    assert message in reason


CPU_ONLY = """
import sys
sys.modules.update(dict.fromkeys(("numba_cuda", "cuda")))
import md4
from md4.__main__ import main
basis = md4.Basis.from_arrays([0], [[1.0]], [[1.0]], [[0, 0, 0]])
print(md4.Engine(basis).compute([[0, 0]], [[0, 0]]).item())
assert main(["info"]) == 0
assert main(["warmup", "--backend", "cuda"]) == 2
sys.modules.pop("md4.gpu.devices")  # which asks whether there are GPUs
assert not [name for name in sys.modules if name.startswith(("numba.cuda.cudadrv", "md4.gpu."))]
"""


def test_a_process_without_the_packages_for_gpus():
    done = subprocess.run([sys.executable, "-c", CPU_ONLY], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert float(lines[0]) == pytest.approx(1.1283791670955126)  # 2 / sqrt(pi) for an exponent of 1
    assert any(re.match(r"GPU +none \(numba-cuda is not installed; .*cu13", line) for line in lines)
    assert "md4: numba-cuda is not installed" in done.stderr
