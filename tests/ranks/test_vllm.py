"""vLLM's weight transfer: a source of weights against stand-ins with its signatures, never vLLM itself."""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from meshes import engine_of, mesh_of, step
from models import adamw, bits
from tensors import tiny

BASE = "vllm.distributed.weight_transfer.base"


@dataclass(frozen=True)
class ParamMeta:
    """As vLLM's: what iteration will yield."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(ABC):
    """As vLLM's: two channels that agree element for element, and what follows from them."""

    @abstractmethod
    def metadata(self):
        """Say what iteration will yield."""

    @abstractmethod
    def __iter__(self):
        """Yield names and whole tensors."""

    def held_names(self):
        """Say what this rank has; None: everything."""
        return


class Client:
    """A server's four calls, each written down."""

    def __init__(self):
        self.calls = []

    def init_weight_transfer_engine(self, init_info):
        self.calls.append("init")

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, update_info):
        """Take one payload for all workers, or a list of one for each."""
        self.calls.append(update_info)

    def finish_weight_update(self, weight_version=None):
        self.calls.append("finish")


class Transfer:
    """vLLM's side of a trainer: called on every rank, where the sender alone talks to the server."""

    def __init__(self, source, client, is_sender):
        self.source, self.client, self.is_sender = source, client, is_sender
        if is_sender:
            client.init_weight_transfer_engine({})

    def send_weights(self):
        meta = self.source.metadata()
        if not self.is_sender:
            assert list(self.source) == []
            return {}
        self.client.start_weight_update()
        self.client.update_weights({
            "names": [each.name for each in meta], "dtype_names": [str(each.dtype) for each in meta],
            "shapes": [list(each.shape) for each in meta],
        })  # fmt: skip
        sent = list(self.source)
        assert [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in sent] == meta
        self.client.finish_weight_update()
        return dict(sent)


def stand_ins():
    modules = {".".join(BASE.split(".")[:n]): ModuleType("stand-in") for n in range(1, 5)}
    vars(modules[BASE]).update(ParamMeta=ParamMeta, WeightSource=WeightSource)
    return modules


class Shared(Transfer):
    """vLLM's IPC: every rank gives handles of its own memory, and the sender sends all of them for each tensor."""

    def send_weights(self):
        import torch.distributed as dist

        sent = dict(self.source)
        mine = {name: bits([tensor]) for name, tensor in sent.items()}
        handles = [None, None]
        dist.all_gather_object(handles, mine)
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights([{"names": list(each), "ipc_handles": list(each.values())} for each in handles])
            self.client.finish_weight_update("2")
        return sent


def engine_to_serve():
    model, mesh = tiny("llama", kv_heads=4), mesh_of((2, 1, 1))
    return engine_of(model, mesh, stage=3, precision="fp32", optimizer=adamw, accumulate=1)


def served():
    """What two rounds sent, and weights then."""
    with patch.dict(sys.modules, stand_ins()):
        from zero3d.ways.vllm import source

        engine = engine_to_serve()
        client = Client()
        transfer = Transfer(source(engine, bucket_bytes=8192), client, is_sender=engine.mesh.rank == 0)
        rounds = []
        for number in range(2):
            step(engine, number)
            sent = transfer.send_weights()
            rounds.append((sent, engine.whole_state_dict()))
        return rounds, client.calls, len(transfer.source.metadata())


def test_every_round_sends_the_weights_of_the_step_in_the_order_and_shapes_that_metadata_says(ranks):
    (rounds, calls, count), (others, none, known) = ranks(2, served)
    for sent, weights in rounds:
        assert sent.keys() == weights.keys()
        assert all(torch.equal(sent[name], weights[name].bfloat16()) for name in weights)
    assert [call for call in calls if isinstance(call, str)] == ["init", *["start", "finish"] * 2]
    assert (none, known) == ([], count)
    assert [sent for sent, _ in others] == [{}, {}]
    assert not torch.equal(rounds[0][0]["lm_head.weight"], rounds[1][0]["lm_head.weight"])


def shared():
    """What each rank has to share after a step, in the order and shapes of metadata, and the sender's calls."""
    with patch.dict(sys.modules, stand_ins()):
        from zero3d.ways.vllm import source

        engine, client = engine_to_serve(), Client()
        transfer = Shared(source(engine, every_rank=True), client, is_sender=engine.mesh.rank == 0)
        step(engine, 0)
        sent = transfer.send_weights()
        assert [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in sent.items()] == transfer.source.metadata()
        return sent, client.calls


@pytest.mark.long
def test_every_rank_has_all_tensors_to_share_where_vllm_asks_for_that(ranks):
    (first, calls), (second, none) = ranks(2, shared)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    init, start, (of_first, of_second), finish = calls
    assert (init, start, finish, none) == ("init", "start", "finish", [])
    assert of_first == of_second
