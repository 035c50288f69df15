"""Plain values to records: what is taken, and what is said about the rest."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from girih.kernels.base.errors import ConfigError
from girih.kernels.base.records import to_record


@dataclass(frozen=True)
class Inner:
    sizes: tuple[float, ...] = ()
    place: str | None = None


@dataclass(frozen=True)
class Outer:
    count: int = 1
    inner: Inner = field(default_factory=Inner)


def test_nested_values_become_records():
    values = {"count": 2, "inner": {"sizes": [1, 2.5], "place": Path("/a")}}
    assert to_record(Outer, values) == Outer(2, Inner((1.0, 2.5), "/a"))
    assert to_record(Outer, {"inner": Inner(place="b")}) == Outer(inner=Inner(place="b"))
    assert to_record(Outer, {}) == Outer()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"cuont": 1}, "outer has no field 'cuont'; did you mean 'count'? Fields: count, inner"),
        ({"inner": {"plaze": 1}}, "outer.inner has no field 'plaze'; did you mean 'place'? "),
        ({"count": "many"}, "outer.count is 'many'; it must be an integer"),
        ({"inner": 5}, "outer.inner is 5; it must be Inner"),
        ({"inner": {"sizes": 5}}, "outer.inner.sizes is 5; it must be a list of numbers"),
        ({"inner": {"place": 5}}, "outer.inner.place is 5; it must be text or None"),
    ],
)
def test_mistakes_name_key_value_and_what_is_allowed(values, told):
    with pytest.raises(ConfigError) as caught:
        to_record(Outer, values, "outer")
    assert str(caught.value).startswith(told)
