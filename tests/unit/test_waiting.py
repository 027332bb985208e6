"""Ranks that meet in a store, hours apart: every one's numbers, few keys, and the note of one that failed."""

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from threading import Timer, current_thread

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from zero3d.distributed import waiting
from zero3d.distributed.waiting import StoreExchange


def on_threads(size, call):
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, range(size)))


def test_64_ranks_get_everyones_numbers_and_leave_two_keys_beside_their_counts():
    store, size, rounds = HashStore(), 64, 5

    def meet(rank):
        numbers, exchange = torch.arange(3) + 10 * rank, StoreExchange(store, "world/0", rank, size, patience=60.0)
        return [exchange.exchange(numbers + turn) for turn in range(rounds)]

    rows = torch.arange(3)[None] + 10 * torch.arange(size)[:, None]
    for found in on_threads(size, meet):
        assert all(torch.equal(table, rows + turn) for turn, table in enumerate(found))
    assert store.num_keys() == size + 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.bfloat16])
def test_numbers_of_any_type_arrive_bit_by_bit(dtype):
    store, values = HashStore(), torch.tensor([0.1, -3.0, 0.0]).to(dtype)
    found = on_threads(2, lambda rank: StoreExchange(store, "a", rank, 2, 60.0).exchange(values))
    assert all(table.dtype == dtype and torch.equal(table, values.expand(2, 3)) for table in found)


def test_a_room_that_is_opened_again_or_under_another_name_has_keys_of_its_own():
    store = HashStore()

    def meet(rank):
        rooms = [StoreExchange(store, name, rank, 2, 60.0) for name in ("world/0", "dp/0", "world/0")]
        return [
            room.exchange(torch.tensor([rank + 10 * number])).flatten().tolist() for number, room in enumerate(rooms)
        ]

    assert on_threads(2, meet) == [[[0, 1], [10, 11], [20, 21]]] * 2


class Counting:
    """A store that counts the questions it is asked."""

    def __init__(self, store):
        self._store, self.asked = store, []

    def __getattr__(self, name):
        def call(*arguments):
            self.asked.append(name)
            return getattr(self._store, name)(*arguments)

        return call


@pytest.mark.parametrize("size", [2, 48])
def test_what_a_rank_asks_of_the_store_does_not_grow_with_the_ranks(size):
    inner = HashStore()
    stores = [Counting(inner) for _ in range(size)]
    on_threads(size, lambda rank: StoreExchange(stores[rank], "a", rank, size, 60.0).exchange(torch.zeros(1)))
    asked = [[name for name, _ in groupby(each.asked)] for each in stores]  # it may look more than once
    assert asked[0] == ["add", "check", "has_extended_api", "multi_get", "set", "add", "delete_key"]
    assert all(each == ["add", "set", "check", "get", "delete_key", "add"] for each in asked[1:])


def test_the_ranks_that_did_not_come_are_named():
    exchange = StoreExchange(HashStore(), "a", 0, 9, patience=0.0)
    with pytest.raises(DistStoreError, match="of 9 ranks 8 did not come: 1, 2, 3, 4, 5"):
        exchange.exchange(torch.zeros(1))
    with pytest.raises(DistStoreError, match="of 9 ranks 1 did not come: 0"):
        StoreExchange(HashStore(), "a", 3, 9, patience=0.0).exchange(torch.zeros(1))


@pytest.mark.parametrize("known", ["", "an older failure, which is over"])
def test_a_note_ends_the_waiting_whenever_it_was_left_unless_it_is_known(monkeypatch, known):
    looks = []

    def read_note():
        looks.append(known if len(looks) < 2 else "a rank has failed")
        return looks[-1]

    monkeypatch.setattr(waiting, "LOOK", 0.01)
    monkeypatch.setattr(waiting, "read_note", read_note)
    with pytest.raises(DistStoreError, match="of 3 ranks 2 did not come"):
        StoreExchange(HashStore(), "a", 0, 3, patience=3600.0, known=known).exchange(torch.zeros(1))
    assert looks == [known, known, "a rank has failed"]
    with pytest.raises(DistStoreError, match="of 3 ranks 2 did not come"):
        StoreExchange(HashStore(), "a", 0, 3, patience=3600.0).exchange(torch.zeros(1))
    assert len(looks) == 4


def test_a_store_that_is_gone_is_no_reason_to_wait():
    class Gone(HashStore):
        def check(self, keys):
            raise DistNetworkError("Connection reset by peer")

    with pytest.raises(DistNetworkError):
        StoreExchange(Gone(), "a", 0, 2, patience=3600.0).exchange(torch.zeros(1))


def test_waiting_is_silent_and_looks_ever_less_often(monkeypatch, capfd):
    monkeypatch.setattr(waiting, "LOOK", 0.02)
    store, pauses, sleep = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), [], waiting.time.sleep
    here = current_thread()
    monkeypatch.setattr(
        waiting.time, "sleep", lambda seconds: (current_thread() is here and pauses.append(seconds)) or sleep(seconds)
    )
    mine, other = (StoreExchange(store, "a", rank, 2, patience=60.0) for rank in range(2))
    late = Timer(0.2, other.exchange, [torch.ones(1)])
    late.start()
    assert mine.exchange(torch.zeros(1)).tolist() == [[0.0], [1.0]]
    late.join()
    assert pauses[:6] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02]
    assert capfd.readouterr().err == ""


def test_a_note_left_by_a_rank_that_came_does_not_end_the_exchange(monkeypatch):
    store, ones = HashStore(), torch.ones(1)
    monkeypatch.setattr(waiting, "LINGER", 0.0)

    def come_and_fail():
        monkeypatch.setattr(waiting, "read_note", lambda: "a rank has failed")
        with ThreadPoolExecutor(1) as thread:  # between this rank's look for its key and that for a note
            thread.submit(StoreExchange(store, "a", 0, 2, patience=60.0).exchange, ones).result()
        return "a rank has failed"

    monkeypatch.setattr(waiting, "read_note", come_and_fail)
    assert StoreExchange(store, "a", 1, 2, patience=60.0).exchange(ones).tolist() == [[1.0]] * 2


def test_the_first_rank_whose_process_may_be_the_store_stays_until_all_have_read():
    class Slow(HashStore):
        def get(self, key):
            waiting.time.sleep(0.1)
            read.append(key)
            return super().get(key)

    store, read = Slow(), []

    def meet(rank):
        StoreExchange(store, "a", rank, 4, patience=60.0).exchange(torch.ones(1))
        return len(read)

    assert on_threads(4, meet)[0] == 3
