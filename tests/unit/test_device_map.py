"""The shortest device map for a placement."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bnb_dispatch_fix.model.device_map import ancestors, compact


def test_ancestors():
    assert list(ancestors("a.b.c")) == ["", "a", "a.b"]
    assert list(ancestors("a")) == [""]
    assert list(ancestors("")) == []


def test_modules_stand_for_their_parts():
    keys = [("a.x", 0), ("a.y", 0), ("b.x", 0), ("b.y", 1), ("c", 1)]
    assert compact(keys) == {"a": 0, "b.x": 0, "b.y": 1, "c": 1}
    assert compact([(name, 2) for name, _ in keys]) == {"": 2}
    assert compact([]) == {}
    assert compact([("", 3)]) == {"": 3}


def test_a_name_that_begins_like_another_is_not_its_part():
    keys = [("layers.1", 0), ("layers.10", 1), ("layers.11", 1)]
    assert compact(keys) == dict(keys)


def test_unplaced_tensors_stay_uncovered():
    keys = [("a.x", 0), ("a.y.v", 0), ("b", 0)]
    assert compact(keys, ["a.y.w"]) == {"a.x": 0, "a.y.v": 0, "b": 0}


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@given(st.lists(PATHS, unique=True), st.data())
def test_a_map_means_the_placement_and_could_not_be_shorter(paths, data):
    names = [
        path for path in paths if not any(other.startswith(f"{path}.") for other in paths)
    ]  # the leaves
    devices = {name: data.draw(st.integers(0, 2)) for name in names}
    device_map = compact(devices.items())
    for name, device in devices.items():
        over = [key for key in device_map if key in ("", name) or name.startswith(f"{key}.")]
        assert [device_map[key] for key in over] == [device]
    for key in device_map:
        for parent in ancestors(key):
            below = {d for n, d in devices.items() if parent == "" or n.startswith(f"{parent}.")}
            assert len(below) > 1
