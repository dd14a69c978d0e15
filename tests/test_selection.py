"""What README's test command runs: all but what is marked `thorough`, by the rule in CONTRIBUTING.md."""

import fnmatch

import pytest


def test_every_module_takes_part(collected, fast):
    """But for modules whose tests need a GPU or minutes."""
    short = {item.path for item in collected if not any(map(item.get_closest_marker, ("gpu", "slow")))}
    assert not short - {item.path for item in fast}


def test_samples_are_not_empty(collected):
    """Each pattern of a marker `sample` fits a case of its test."""
    cases = {}
    for item in collected:
        if sample := item.get_closest_marker("sample"):
            cases.setdefault((item.path, item.originalname, sample.args), []).append(item.callspec.id)
    for (*test, patterns), ids in cases.items():
        assert [p for p in patterns if not fnmatch.filter(ids, p)] == [], test


def test_groups_share_a_worker(request, collected):
    """pytest-xdist has changed their names, by which it knows them."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("all tests run in this process")
    groups = [(item.nodeid, item.get_closest_marker("xdist_group")) for item in collected]
    assert not [name for name, group in groups if group and not name.endswith(f"@{group.args[0]}")]
