"""When garbage cycles are looked for."""

import gc
import weakref

import pytest

from girih.kernels.base.garbage import collect, no_collection, set_aside


class Knot:
    """An object only a collection can free."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_looked_at_inside_and_what_was_made_is_old():
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled(), "the outer one still runs"
        knot = weakref.ref(Knot())
    assert gc.isenabled()
    gc.collect(0)
    assert knot() is not None, "a look at young objects does not meet it"
    gc.collect()
    assert knot() is None
    assert gc.get_freeze_count() == 0


def test_an_error_inside_leaves_it_on():
    with pytest.raises(ValueError), no_collection():
        raise ValueError
    assert gc.isenabled()


def test_whoever_switched_it_off_finds_it_off():
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()


def test_what_was_set_aside_is_met_by_collect_only():
    gc.disable()
    knot = weakref.ref(Knot())
    set_aside()
    assert gc.isenabled()
    gc.collect()
    assert knot() is not None
    collect()
    assert knot() is None
    assert gc.get_freeze_count() > 0, "the rest stays aside"
