"""Memory shared with forked processes: what is put there is what is taken, and no slot is given while it is in use."""

import os

import numpy as np

from tridock.data.tokenize.shared_memory import SlotArrays, Slots


def test_what_a_child_puts_its_parent_takes() -> None:
    slots = Slots(2, 64)
    slot = slots.acquire()
    assert slot is not None
    child = os.fork()
    if not child:
        put = slots.write(slot, [np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16)])
        os._exit(0 if put == SlotArrays(slot, (("<u2", 5), ("<u2", 3))) else 1)
    assert os.waitpid(child, 0)[1] == 0
    first, second = slots.read(SlotArrays(slot, (("<u2", 5), ("<u2", 3))))
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2])


def test_a_slot_is_free_when_nothing_looks_at_it() -> None:
    slots = Slots(2, 64)
    one, other = slots.acquire(), slots.acquire()
    assert one is not None
    assert {one, other} == {0, 1}
    assert slots.acquire() is None
    placed = slots.write(one, [np.ones(2, np.int32), np.ones(2, np.int32)])
    assert placed is not None
    first, second = slots.read(placed)
    view = second.data
    del first, second
    assert slots.acquire() is None
    del view
    assert slots.acquire() == one
    slots.release(one)
    assert slots.acquire() == one


def test_what_does_not_fit_is_not_put() -> None:
    slots = Slots(1, 64)
    assert slots.write(0, [np.zeros(32, np.uint16)]) == SlotArrays(0, (("<u2", 32),))
    assert slots.write(0, [np.zeros(32, np.uint16), np.zeros(1, np.uint16)]) is None


def test_slots_do_not_touch_each_other() -> None:
    slots = Slots(3, 8)
    placed = [slots.write(slot, [np.full(4, slot + 1, np.uint16)]) for slot in (2, 0, 1)]
    taken = {one.slot: slots.read(one)[0].tolist() for one in placed if one is not None}
    assert taken == {0: [1] * 4, 1: [2] * 4, 2: [3] * 4}
