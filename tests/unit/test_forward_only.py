"""One micro-batch through all model chunks without a schedule: what passes between ranks, which here are threads."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch

from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.pipeline.forward_only import ForwardOnly
from zero3d.pipeline.shapes import ChunkOutputs

WIDTH, EXPERTS, SHAPE = 4, 3, (2, 5)
TOKENS = SHAPE[0] * SHAPE[1]
ROUTED = torch.float16  # router logits need not have the dtype of hidden states


class Outputs(ChunkOutputs):
    """Of a model of bf16, with memory that shows if it is not filled."""

    def hidden(self, ids_shape):
        return super().hidden(ids_shape).fill_(float("nan"))


class Chunks:
    """A rank's chunks as a function of their number, what enters them and the batch."""

    def __init__(self, run, last, routes):
        self.run, self.last, self.routes = run, last, routes


def outputs():
    module = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    module.width = WIDTH
    return Outputs([module])


def plain(chunk, entering, batch):
    """Adds the chunk's number; what it returns lies in memory as transformers' may: not in order."""
    (x,) = entering
    x = x[..., None].expand(*SHAPE, WIDTH).bfloat16() if chunk == 0 else x
    return (x + batch["by"] * chunk).transpose(0, 1).contiguous().transpose(0, 1)


def routed(chunk, entering, batch):
    """Chunks 1 and 3 have a layer with experts each, and add its router logits to those that came."""
    output = plain(chunk, entering[:1], batch)
    earlier = list(entering[1]) if len(entering) > 1 else []
    if chunk % 2:
        earlier.append(torch.full((TOKENS, EXPERTS), float(chunk), dtype=ROUTED))
    return (output, torch.stack(earlier)) if earlier else output


@pytest.fixture
def run(monkeypatch):
    """(owners, call, routes) -> for every rank the output, what it learned, what it sent."""
    boxes = {(source, target): Queue() for source in range(2) for target in range(2)}

    def messages(axis, op, unit, sends, receives):
        for peer, tensor in sends.items():
            assert peer != axis.rank
            assert tensor.is_contiguous()  # gloo and NCCL send nothing else
            boxes[axis.rank, peer].put(tensor.clone())
        for peer, into in receives.items():
            came = boxes[peer, axis.rank].get(timeout=10)
            assert (came.shape, came.dtype) == (into.shape, into.dtype)
            into.copy_(came)

    monkeypatch.setattr("zero3d.pipeline.forward_only.messages", messages)

    def rank(place, owners, call, routes):
        ledger, shapes = Ledger(), outputs()
        forward = ForwardOnly(owners, Axis("pp", place, 2), ledger, Chunks(call, len(owners) - 1, routes), shapes)
        output = forward(torch.arange(TOKENS).view(SHAPE), {"by": 10})
        return output, shapes.router_logits, [(e.op, e.axis, e.calls, e.elements, e.bytes) for e in ledger]

    def made(owners, call, routes=False):
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda place: rank(place, owners, call, routes), range(2)))
        assert all(box.empty() for box in boxes.values())
        return found

    return made


WANTED = torch.arange(TOKENS).view(SHAPE)[..., None].expand(*SHAPE, WIDTH).bfloat16() + 10 + 20 + 30
STATE = TOKENS * WIDTH


@pytest.mark.parametrize(("owners", "sent"), [([0, 1, 0, 1], (2, 1)), ([0, 1, 1, 0], (1, 1)), ([0, 0, 1, 1], (1, 0))])
def test_every_cut_between_ranks_sends_one_hidden_state(run, owners, sent):
    found = run(owners, plain)
    for place, (output, _, ledger) in enumerate(found):
        assert (output is None) == (place != owners[-1])
        assert ledger == (
            [("send", "pp", sent[place], sent[place] * STATE, 2 * sent[place] * STATE)] if sent[place] else []
        )
    assert torch.equal(found[owners[-1]][0], WANTED)


def test_router_logits_travel_behind_a_header_once_there_are_some(run):
    (nothing, first, ledger), (output, second, other) = run([0, 1, 0, 1], routed, routes=True)
    assert nothing is None
    assert torch.equal(output[0], WANTED)
    assert torch.equal(output[1], torch.tensor([1.0, 3.0], dtype=ROUTED)[:, None, None].expand(2, TOKENS, EXPERTS))
    one = (1, EXPERTS, ROUTED)
    assert first == second == {0: None, 1: one, 2: one}
    logits = TOKENS * EXPERTS
    assert ledger == [("send", "pp", 2 + 2 + 1, 2 * (3 + STATE) + logits, 2 * (8 * 3 + 2 * STATE) + 2 * logits)]
    assert other == [("send", "pp", 1 + 1 + 1, 3 + STATE + logits, 8 * 3 + 2 * STATE + 2 * logits)]
