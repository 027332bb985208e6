"""Threads of tiers: what they are given, in order; and given back inside any lock that the process shares."""

import gc
import threading
from concurrent.futures import thread as executors, wait
from weakref import finalize

import pytest
import torch
from models import batch, build

import zero3d
from zero3d.memory.threads import Threads, unwaited


def named(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_a_thread_calls_what_it_is_given_in_order_and_ends_with_its_owner():
    threads, seen = Threads(1, "one-by-one"), []
    futures = [threads.submit(seen.append, number) for number in range(100)]
    wait(futures)
    assert seen == list(range(100))
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result()
    assert threads.submit(max, 3, 4).result() == 4
    [mine] = named("one-by-one")
    del threads
    mine.join(60)
    assert not mine.is_alive()


def test_what_a_thread_was_given_is_let_go_of_at_once():
    threads, freed = Threads(1, "letting-go"), threading.Event()
    tensor = torch.zeros(3)
    finalize(tensor, freed.set)
    threads.submit(tensor.sum).result()
    del tensor
    assert freed.wait(60)
    threads.close()


def test_what_comes_after_the_end_is_called_by_whoever_has_it():
    threads = Threads(1, "gone")
    threads.close()
    assert threads.submit(threading.current_thread).result() is threading.current_thread()


def test_what_waits_for_threads_is_not_called_in_one_of_them():
    threads, called = Threads(1, "collecting"), threading.Event()

    def last():
        threads.submit(int).result()  # in its own thread it would wait for ever
        called.set()

    threads.submit(unwaited, last).result()
    assert called.wait(60)
    here = []
    unwaited(lambda: here.append(threading.current_thread()))
    assert here == [threading.current_thread()]


class Watched:
    """A lock that tells who takes it."""

    def __init__(self, lock, takers):
        self._lock, self._takers = lock, takers

    def __enter__(self):
        self._takers.append(threading.current_thread())
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


@pytest.mark.parametrize("offload", [
    {"optimizer": "host", "executor": "host"},
    {"optimizer": "disk", "executor": "device"},
    {"optimizer": "disk", "executor": "host", "params": "disk"},
], ids=lambda offload: " ".join(offload.values()))  # fmt: skip
def test_an_engine_is_collected_without_a_lock_that_somebody_may_hold(offload, tmp_path, monkeypatch):
    """With an update that is due; it is also collected inside an executor's submit, and while a thread starts."""
    offload = {**offload, "directory": tmp_path / "tiers"}
    engine = zero3d.Engine(build("net"), stage=3, precision="bf16", offload=offload, loss=summed)
    engine.train_batch([batch(1)], wait=False)
    engine.cycle = engine
    takers = []
    for module, name in ((executors, "_global_shutdown_lock"), (threading, "_shutdown_locks_lock")):
        if hasattr(module, name):  # the second until Python 3.12
            monkeypatch.setattr(module, name, Watched(getattr(module, name), takers))
    del engine
    gc.collect()
    assert threading.current_thread() not in takers
    again = zero3d.Engine(build("net"), stage=3, precision="bf16", offload=offload)  # the folder is free
    assert again.offload.optimizer == offload["optimizer"]


def summed(output, ids):
    return loss_of_logits(output, ids), ids[:, 1:].numel()


def loss_of_logits(logits, ids):
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )
