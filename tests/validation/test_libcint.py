import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from md4.errors import ArgumentError
from md4.shells.basis import Basis
from md4.validation.libcint import Libcint, class_label, errors, format_table, quartet_classes, sample_counts, validate

gto = pytest.importorskip("pyscf.gto")


@pytest.fixture(scope="module")
def hf():
    return gto.M(atom="H 0.1 0.2 0.3; F 0 0 1.1", basis="cc-pvdz", verbose=0)


@pytest.mark.parametrize("omega", [None, 0.3, -0.3])
@pytest.mark.parametrize("cart", [False, True])
def test_cpu_agrees_with_libcint(hf, cart, omega):
    mol = hf.copy()
    mol.cart = cart
    records = validate(mol.build(False, False), backend="cpu", omega=omega, max_quartets_per_class=16)
    assert len(records) == 21
    assert all(record.passed for record in records), "\n" + format_table(records)


def test_general_contraction():
    mol = gto.M(atom="He 0 0 0; He 0 0 1.5", basis="ano@3s2p", verbose=0)
    records = validate(mol, backend="cpu")
    assert [record.label for record in records] == ["(ss|ss)", "(ps|ss)", "(pp|ss)", "(ps|ps)", "(pp|ps)", "(pp|pp)"]
    assert all(record.passed and record.quartets == 16 for record in records), "\n" + format_table(records)


@pytest.mark.parametrize("fault", [1e-6, np.nan])
def test_a_fault_is_found(hf, monkeypatch, fault):
    from md4.engine import Engine

    compute = Engine.compute

    def faulty(self, bra, ket, out=None):
        result = compute(self, bra, ket, out)
        result[..., 0] += fault
        return result

    monkeypatch.setattr(Engine, "compute", faulty)
    records = validate(hf, backend="cpu", max_quartets_per_class=4)
    assert not any(record.passed for record in records)
    assert "21 beyond tolerance" in format_table(records)


def test_the_sample_needs_a_size(hf):
    with pytest.raises(ArgumentError, match="an integer of 1 or more"):
        validate(hf, backend="cpu", max_quartets_per_class=0)


def test_classes_are_distinct_up_to_permutation(hf):
    labels = [class_label(ls) for ls in quartet_classes(Basis.from_mol(hf))]
    assert labels[:4] == ["(ss|ss)", "(ps|ss)", "(pp|ss)", "(ds|ss)"]
    assert len(set(labels)) == len(labels) == 21


@given(st.lists(st.integers(1, 60), min_size=4, max_size=4), st.integers(1, 2000))
def test_sample_counts(counts, limit):
    sample = sample_counts(counts, limit)
    assert all(1 <= n <= count for n, count in zip(sample, counts))
    assert np.prod(sample) <= limit or sample == counts == [1, 1, 1, 1]
    assert sample == counts or np.prod(sample) > 0


@pytest.mark.parametrize("cart", [False, True])
def test_libcint_blocks_are_those_of_the_tensor(hf, cart):
    mol = hf.copy()
    mol.cart = cart
    mol.build(False, False)
    basis = Basis.from_mol(mol)
    shells = [np.array(group) for group in ([0, 4], [2], [3], [5, 6])]
    blocks = Libcint(mol, 0.0).blocks(shells)
    tensor = mol.intor("int2e")
    ao = [slice(basis.ao_loc[i], basis.ao_loc[i + 1]) for i in range(basis.nshell)]
    np.testing.assert_allclose(blocks[1, 1], tensor[ao[4], ao[2], ao[3], ao[6]], atol=1e-14)


def test_schwarz_is_a_bound(hf):
    libcint = Libcint(hf, 0.0)
    pairs = np.array([[0, 4], [4, 0], [2, 2]])
    bounds = libcint.schwarz(pairs)
    assert bounds[0] == bounds[1]
    blocks = libcint.blocks([np.array([2]), np.array([2]), np.array([0]), np.array([4])])
    assert np.abs(blocks).max() <= bounds[0] * bounds[2] * (1 + 1e-12)


def block(*values):
    """Shape (1, len(values), 1, 1, 1, 1)."""
    return np.array(values).reshape(1, -1, 1, 1, 1, 1)


def test_errors_are_relative_to_each_block():
    max_abs, max_rel, floor = errors(block(1.0, 1e-8 + 1e-16), block(1.0 - 1e-13, 1e-8), np.full((1, 2), 1e-8), 1e-12)
    assert max_abs == pytest.approx(1e-13, rel=1e-2)
    assert max_rel == pytest.approx(1e-8, rel=1e-6)
    assert floor == 0


def test_rounding_noise_counts_apart():
    at_floor = errors(block(1.0, 3e-15), block(1.0, 1e-15), np.ones((1, 2)), 1e-12)
    assert at_floor == (pytest.approx(2e-15), 0, 1)
    above = errors(block(1.0, 3e-14), block(1.0, 1e-14), np.ones((1, 2)), 1e-12)
    assert above == (pytest.approx(2e-14), pytest.approx(2), 0)


def test_negligible_quartets_count_apart():
    assert errors(block(2e-16), block(0.0), np.zeros((1, 1)), 1e-12) == (2e-16, 0, 1)
    assert errors(block(2e-11), block(0.0), np.zeros((1, 1)), 1e-12)[1] > 1


def test_nan_is_never_at_the_floor():
    max_abs, max_rel, floor = errors(block(np.nan, 1.0), block(1e-20, 1.0), np.ones((1, 2)), 1e-12)
    assert np.isnan(max_abs)
    assert np.isnan(max_rel)
    assert floor == 0


def test_shape_mismatch_is_named():
    with pytest.raises(ArgumentError, match="shape"):
        errors(block(1.0, 2.0), block(1.0), np.ones((1, 1)), 1e-12)
