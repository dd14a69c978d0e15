"""Bounds of derivatives, tasks, batches of lists and threads of gradients."""

from itertools import chain, pairwise

import numpy as np
import pytest
from molecules import molecule
from nuclear_forces import MIXED, SHELLS, WATER, symmetric

import md4
from md4.cpu.forces import divided
from md4.shells.schwarz import block_norms


def forces_of(jk):
    return jk._forces_of_lists(jk.direct_scf_tol)


@pytest.fixture(scope="module", params=[False, True], ids=["spherical", "Cartesian"])
def mol(request):
    return molecule(MIXED, SHELLS, cart=request.param)


@pytest.fixture(scope="module")
def forces(mol):
    jk = md4.JK(mol, backend="cpu")
    return jk, forces_of(jk)


def test_bounds(mol, forces):
    """Norms of derivatives, and bounds of those of pairs with factors f; both in the order of the groups."""
    jk, made = forces
    basis, order = jk.basis, jk._frame.order
    tensor = mol.intor("int2e_ip1ip2").reshape(3, 3, *[mol.nao] * 4)
    tensor = tensor[np.ix_(range(3), range(3), order, order, order, order)]
    plain = mol.intor("int2e")[np.ix_(order, order, order, order)]
    for this in made.lists:
        for n, (a, b) in enumerate(this.pairs.pairs.tolist()):
            here, there = (slice(*basis.ao_loc[k : k + 2]) for k in (a, b))
            found = [
                np.sqrt(np.einsum("ijij->", tensor[x, x, one, two, one, two]))
                for one, two in ((here, there), (there, here)) for x in range(3)
            ]  # fmt: skip
            assert abs(this.largest[n] - max(found)) < 1e-10 * max(found) + 1e-12
            place, factor = this.groups.order.tolist().index(n), 1 if a == b else 2
            whole = np.sqrt(np.einsum("ijij->", plain[here, there, here, there]))
            assert this.bounds[place] >= (1 - 1e-12) * factor * whole
            together = 2 if (basis.centres[a] == basis.centres[b]).all() else 1
            assert this.derivative_bounds[place] == together * factor * this.largest[n]


def test_norms_in_pieces(forces, monkeypatch):
    """As those of lists as wholes."""
    jk, made = forces
    whole = [this.largest for this in made.lists]
    monkeypatch.setattr("md4.cpu.forces.NORM_SHARE", 1e-9)
    again = jk.engine.backend.sums.forces(jk.basis, jk.lists)
    for this, want in zip(again.lists, whole):
        np.testing.assert_allclose(this.largest, want, rtol=1e-12)


def test_sums_of_groups(forces):
    for this in forces[1].lists:
        highest, sums, squares = this.of_groups
        step = this.groups.per_group
        for g in range(this.groups.ngroup):
            rest = this.bounds[g * step :]
            assert highest[g] == rest.max()
            assert np.isclose(sums[g], rest.sum(), rtol=1e-12)
            assert np.isclose(squares[g], (rest**2).sum(), rtol=1e-12)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("room", [1, 8 << 20])
def test_tasks_have_each_pair_once(forces, threads, room, monkeypatch):
    """And only one pair each where Z is larger than it may be; those of most work come first."""
    monkeypatch.setattr("md4.cpu.forces.Z_BYTES", room)
    _, made = forces
    every = range(len(made.lists))
    tasks = made.tasks([made.work_of(this, every) for this in made.lists], threads)
    assert [task[0] for task in tasks] == sorted((task[0] for task in tasks), reverse=True)
    for number, this in enumerate(made.lists):
        ranges = sorted(task[2:] for task in tasks if task[1] == number)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == len(this.pairs)
        assert all(one[1] == two[0] for one, two in pairwise(ranges))
        if room == 1:
            assert len(ranges) == len(this.pairs)


@pytest.mark.parametrize("exchange", [1.0, 0.0])
def test_batches_of_lists(exchange, monkeypatch):
    """Where not all H matrices fit: as many lists as fit, at least one, and H of the others is dropped."""
    mol = molecule(WATER, "6-31g*")
    dm, jk = symmetric(mol.nao), md4.JK(mol, backend="cpu")
    want, stats = jk.gradient(dm, exchange=exchange), jk.stats
    made = forces_of(jk)
    for share, batches in ((0.5, 1), (1e-9, len(made.lists))):
        monkeypatch.setattr("md4.cpu.forces.H_SHARE", share)
        _, batches_of_kets = made.divided_memory(jk.engine.backend, range(len(made.lists)))
        found = list(batches_of_kets)
        assert [*chain.from_iterable(found)] == list(range(len(made.lists)))
        assert len(found) == batches
        assert abs(jk.gradient(dm, exchange=exchange) - want).max() < 1e-12
        assert (jk.stats.computed, jk.stats.skipped) == (stats.computed, stats.skipped)


def test_a_part_of_the_terms(monkeypatch):
    """Parts add up to all, in gradients, quartets and bounds."""
    mol = molecule(WATER, "6-31g")
    jk = md4.JK(mol, backend="cpu")
    made, dm = forces_of(jk), jk._frame.densities(symmetric(mol.nao, 1))
    given = jk.engine.backend, dm, block_norms(jk._frame.basis, dm), np.ones(1), np.ones(1), 0.1
    whole, quartets, left_out = made.run(*given)
    assert left_out[0] > 0
    parts = []
    for part, (threads, share) in enumerate(((1, 0.5), (7, 0.5), (2, 1e-9))):  # processes on unlike machines
        monkeypatch.setattr("md4.cpu.forces.number_of_threads", lambda threads=threads: threads)
        monkeypatch.setattr("md4.cpu.forces.H_SHARE", share)
        parts.append(made.run(*given, part, 3))
    assert sum(part[1] for part in parts) == quartets
    assert min(part[1] for part in parts) > 0.2 * quartets
    np.testing.assert_allclose(sum(part[0] for part in parts), whole, rtol=0, atol=1e-12)
    np.testing.assert_allclose(sum(part[2] for part in parts), left_out, rtol=1e-10)


def test_progress_is_told_of_all_work():
    mol = molecule(WATER, "6-31g")
    jk, told = md4.JK(mol, backend="cpu"), []
    made, dm = forces_of(jk), jk._frame.densities(symmetric(mol.nao, 1))
    made.run(jk.engine.backend, dm, block_norms(jk._frame.basis, dm), np.ones(1), np.ones(1), 0.0, report=told.append)
    assert sum(told) == pytest.approx(made.seconds())


def test_terms_that_are_made_together():
    """All with exchange, one after the other without it."""
    densities, one, zero = np.zeros((3, 2, 2)), np.ones(3), np.zeros(3)
    assert [len(terms[0]) for terms in divided(densities, one, np.array([0.0, 1.0, 0.0]))] == [3]
    assert [len(terms[0]) for terms in divided(densities, one, zero)] == [1, 1, 1]
