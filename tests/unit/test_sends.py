"""What a pipeline rank keeps of what it has sent, and until when: neither freed on its way nor kept to the end."""

from weakref import WeakSet

import pytest
from torch.distributed.pipelining import schedules

from zero3d.pipeline.acknowledgements import Work
from zero3d.pipeline.messages import Sends


class Message:
    """A message of torch's: what has been started of it can be waited for."""

    def __init__(self, name, waited):
        self.name, self._waited = name, waited

    def wait(self):
        self._waited.append(self.name)


@pytest.fixture
def post(monkeypatch):
    """`post(over)`: (its Sends, a function that sends two messages, names waited for, a function: names kept)."""
    monkeypatch.setattr(schedules, "_batch_p2p", lambda operations: [Message(m.name, m._waited) for m in operations])

    def made(over):
        sends, waited, alive = Sends(over), [], WeakSet()

        def send(*work):
            messages = [Message((*work, i), waited) for i in range(2)]
            alive.update(messages)
            sends.send(Work(*work), messages)

        return sends, send, waited, lambda: sorted({message.name[:-1] for message in alive})

    return made


def both(*works):
    return [(*work, i) for work in works for i in range(2)]


def test_a_hidden_state_is_let_go_when_its_own_gradient_comes_back(post):
    sends, send, waited, kept = post({})
    for k in range(3):
        send(False, 0, k)
    sends.begin(Work(False, 2, 1))  # another chunk's forward says nothing
    sends.begin(Work(True, 2, 1))  # nor does its backward
    assert (waited, kept()) == ([], [(False, 0, 0), (False, 0, 1), (False, 0, 2)])
    sends.begin(Work(True, 0, 1))
    assert (waited, kept()) == (both((False, 0, 1)), [(False, 0, 0), (False, 0, 2)])
    sends.begin(Work(True, 0, 1))
    assert waited == both((False, 0, 1))


def test_a_gradient_is_let_go_when_its_receiver_has_acknowledged_it(post):
    acknowledged = Work(False, 1, 3)
    sends, send, waited, kept = post({Work(True, 1, 0): acknowledged, Work(True, 1, 1): acknowledged})
    for k in range(3):
        send(True, 1, k)
    sends.begin(Work(True, 1, 0))
    sends.begin(Work(False, 1, 2))
    assert (waited, len(kept())) == ([], 3)
    sends.begin(acknowledged)
    assert (waited, kept()) == (both((True, 1, 0), (True, 1, 1)), [(True, 1, 2)])


def test_what_nothing_acknowledges_is_waited_for_at_the_end_of_the_step(post):
    sends, send, waited, kept = post({})
    send(True, 1, 0)
    send(True, 1, 1)
    send(False, 0, 0)
    sends.finish()
    assert (sorted(waited), kept()) == (both((False, 0, 0), (True, 1, 0), (True, 1, 1)), [])


def test_after_a_failure_nothing_is_waited_for_and_nothing_kept(post):
    sends, send, waited, kept = post({})
    send(False, 0, 0)
    send(True, 1, 0)
    sends.forget()
    sends.finish()
    assert (waited, kept()) == ([], [])


def test_without_a_message_nothing_is_started(post, monkeypatch):
    sends, *_ = post({})
    monkeypatch.setattr(schedules, "_batch_p2p", None)  # torch's refuses an empty list
    sends.send(Work(True, 0, 0), [])
    sends.finish()
