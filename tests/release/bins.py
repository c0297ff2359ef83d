"""An oracle for small models: whether parts can be divided among equal devices, tried out."""

from __future__ import annotations


def fits(sizes, room, count):
    """Whether the sizes can be divided among `count` bins of `room`."""

    def place(index, free):
        if index == len(order):
            return True
        return any(
            place(index + 1, [*free[:bin], free[bin] - order[index], *free[bin + 1 :]])
            for bin in range(count)
            if free[bin] >= order[index] and free[bin] not in free[:bin]
        )

    order = sorted(sizes, reverse=True)
    return place(0, [room] * count)
