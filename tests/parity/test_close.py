"""engine.close(): the model is a plain one again, with the weights of its training, and nothing of the engine stays."""

import copy
import gc
import os
import socket
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import adamw, batch, bits, hf, net
from torch import nn
from torch.nn import functional

import zero3d
from zero3d import ConfigError, Engine, LayoutError, ReleasedParameterError


def loss_of(logits, ids):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(engine, steps=2):
    for step in range(steps):
        ids = batch(step, engine.mesh.rank)
        engine.backward(loss_of(engine(ids), ids))
        engine.step()


def described(p):
    return None if p is None else (p.dtype, p.shape, len(p._post_accumulate_grad_hooks or ()))


def made_of(model):
    """All that a plain module has: classes, attributes, hooks, parameters' dtypes and hooks."""
    return {
        name: (
            type(module),
            {key: type(value) for key, value in vars(module).items()},
            [list(value) for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict)],
            {key: described(p) for key, p in module._parameters.items()},
            list(module._modules),
        )
        for name, module in model.named_modules()
    }


def closed(options, tied):
    """What a model is made of before and after an engine, the masters' bits before and the weights' after."""
    model = net(tied=tied)
    own = model.layers[0].register_forward_hook(lambda *_: None)
    before, parameters = made_of(model), list(model.parameters())
    engine = Engine(model, optimizer=adamw, **options)
    train(engine)
    with engine.full_params():
        weights = [p.detach().clone() for p in model.parameters()]
    torch_optimizer = engine.optimizer.torch
    engine.close()
    assert own.id in model.layers[0]._forward_hooks
    assert [p is q for p, q in zip(model.parameters(), parameters, strict=True)] == [True] * len(parameters)
    assert all(p.grad is None and p.is_contiguous() and p.requires_grad for p in parameters)
    assert set(torch_optimizer.param_groups[0]["params"]) == set(parameters)
    assert not torch_optimizer.state
    return before == made_of(model), [p.to(w.dtype) for p, w in zip(parameters, weights, strict=True)], weights


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("options", [
    {"stage": 0, "precision": "fp32"},
    {"stage": 1, "precision": "bf16", "reduce_dtype": "bf16"},
    {"stage": 2, "precision": "bf16", "master": "split"},
    {"stage": 3, "precision": "fp32"},
    {"stage": 3, "precision": "bf16", "offload": {"optimizer": "host", "params": "host"}},
], ids=str)  # fmt: skip
def test_a_closed_engine_leaves_the_plain_model_with_what_it_learnt(ranks, options, tied):
    for is_plain, given_back, weights in ranks(2, closed, options, tied):
        assert is_plain
        # bf16 weights round half away from zero, where torch's cast rounds to even: ties apart they are equal
        torch.testing.assert_close(given_back, weights, rtol=0.01 if options["precision"] == "bf16" else 0, atol=0)


def in_fp32(stage):
    model = net()
    engine = Engine(model, stage=stage, precision="bf16", optimizer=adamw)
    train(engine)
    engine.close()
    rounded = [torch.equal(p, p.bfloat16().float()) for p in model.parameters()]
    return {p.dtype for p in model.parameters()}, all(rounded), bits(model.parameters())


def test_parameters_that_came_in_fp32_get_their_fp32_masters_at_every_stage(ranks):
    (dtypes, rounded, weights), *others = ranks(2, in_fp32, 0) + ranks(2, in_fp32, 3)
    assert dtypes == {torch.float32}
    assert not rounded
    assert [other == (dtypes, rounded, weights) for other in others] == [True] * 3


def trained_again(stage, precision):
    """Bits of weights after two engines of two steps, one after the other, and of plain copies between."""
    model = net()
    for _ in range(2):
        engine = Engine(model, stage=stage, precision=precision, optimizer=adamw)
        train(engine)
        engine.close()
        twin = copy.deepcopy(model)
        assert bits(twin.parameters()) == bits(model.parameters())
        twin.load_state_dict(model.state_dict())
        ids = batch(0)
        loss_of(twin(ids), ids).backward()
        assert all(p.grad is not None for p in twin.parameters())
    return bits(model.parameters())


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_a_model_is_trained_by_one_engine_after_another(ranks, precision):
    wanted = ranks(2, trained_again, 0, precision)
    assert ranks(2, trained_again, 3, precision) == wanted
    assert wanted[0] == wanted[1]


def in_tiles():
    model = hf("qwen3")
    before, names = made_of(model), [name for name, _ in model.named_parameters()]
    engine = Engine(model, stage=3, precision="fp32", gather_budget=4096, tiled_loss=True, optimizer=adamw)
    ids = batch(0, engine.mesh.rank)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    with engine.full_params():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    engine.close()
    assert names == [name for name, _ in model.named_parameters()]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert before == made_of(model)
    now = model.state_dict()
    return [name for name in weights if not torch.equal(weights[name], now[name])]


def test_layers_in_tiles_are_whole_again(ranks):
    assert ranks(2, in_tiles) == [[], []]


def in_parts(degrees):
    model = hf("llama", vocab=64)
    engine = Engine(model, mesh=zero3d.Mesh(**degrees), precision="fp32")
    engine.train_batch([{"input_ids": batch(0), "labels": batch(0)}] * 2)
    engine.close()
    for use in (lambda: model(batch(0)), model.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(ReleasedParameterError, match="the engine that had its parts is closed"):
            use()
    with pytest.raises(ConfigError):
        Engine(model)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_model_that_no_rank_has_whole_refuses_to_be_used(ranks, degrees):
    ranks(2, in_parts, degrees)


def test_every_use_of_a_closed_engine_says_so():
    engine = Engine(nn.Linear(4, 4), precision="fp32")
    engine.close()
    engine.close()
    for use in (
        lambda: engine(torch.ones(1, 4)), engine.step, lambda: engine.backward(torch.ones(())), lambda: engine.steps,
        engine.fingerprint, lambda: engine.save("anywhere"), lambda: engine.full_params().__enter__(),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="this engine is closed"):
            use()


def test_close_inside_full_params_is_refused_and_changes_nothing():
    engine = Engine(nn.Linear(4, 4), precision="fp32")
    with engine.full_params(), pytest.raises(ConfigError, match="leave the block first"):
        engine.close()
    engine.backward(engine(torch.ones(1, 4)).sum())
    assert engine.step().applied


def test_gradients_of_a_half_window_are_forgotten():
    model = nn.Linear(4, 4)
    before = bits(model.parameters())
    engine = Engine(model, precision="fp32", accumulate=2)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.close()
    assert bits(model.parameters()) == before


def test_a_hook_that_the_caller_put_in_later_stays():
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    engine = Engine(model, precision="fp32")
    model[0].register_forward_hook(lambda *_: seen.append(1))
    engine.close()
    model(torch.ones(1, 4))
    assert seen == [1]


def test_what_was_unfrozen_later_is_given_back_with_what_it_learnt():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    first = bits(model[0].parameters())
    engine = Engine(model, precision="fp32")
    engine.unfreeze("0.*")
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.freeze("1.*")
    optimizer = engine.optimizer.torch
    engine.close()
    assert bits(model[0].parameters()) != first
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def one_after_another(folder):
    model = net()
    for number in range(3):
        before = set(threading.enumerate())
        on_disk = {"optimizer": "disk", "directory": folder}  # which one engine at a time may have
        engine = Engine(model, precision="bf16", optimizer=adamw, offload=on_disk)
        train(engine)
        held = [weakref.ref(one) for one in (engine.optimizer, engine.arena, engine.gathers, *engine.units)]
        engine.close()
        assert [one() for one in held] == [None] * len(held)
        for thread in set(threading.enumerate()) - before if number else ():  # the first one may start some that stay
            thread.join(60)
            assert not thread.is_alive()
        assert not dist.is_initialized()  # the mesh was the engine's, and began a world of one process


def test_nothing_of_an_engine_stays(alone, tmp_path):
    alone(one_after_another, str(tmp_path))


def two_meshes():
    mesh = zero3d.Mesh()
    Engine(nn.Linear(4, 4), mesh=mesh, precision="fp32").close()
    Engine(nn.Linear(4, 4), mesh=mesh, precision="fp32").close()
    other = zero3d.Mesh()
    mesh.close()
    assert dist.is_initialized()
    other.close()
    assert not dist.is_initialized()


def test_a_mesh_of_the_caller_stays_open_and_the_last_one_ends_the_world_of_one_process(alone):
    alone(two_meshes)


def replaced_before(precision):
    """A head that the caller puts in after training stays; all else has what it learnt."""
    model = net()
    engine = Engine(model, stage=3, precision=precision, optimizer=adamw)
    train(engine)
    engine.unshard()
    body = [p.detach().clone() for p in model.layers.parameters()]
    model.head = head = nn.Linear(24, 7, bias=False)
    weight = head.weight.detach().clone()
    engine.close()
    assert model.head is head
    assert torch.equal(head.weight, weight)
    assert all(torch.equal(p, q) for p, q in zip(model.layers.parameters(), body, strict=True))


def test_what_the_caller_replaces_before_the_close_stays(ranks):
    ranks(2, replaced_before, "fp32")


def resized(stage, precision):
    """A head that is given other rows in place, as resize_token_embeddings does, keeps them, and trains on."""
    model = net()
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    for rows in ("more", "fewer"):
        train(engine := Engine(model, stage=stage, precision=precision, optimizer=adamw))
        engine.unshard()
        body, old = [p.detach().clone() for p in model.layers.parameters()], model.head.weight.detach().clone()
        put = torch.cat([old, torch.ones(2, 24, dtype=dtype)]) if rows == "more" else model.head.weight.data[:-2]
        wanted = put.float().clone()
        model.head.weight.data = put
        with pytest.raises(LayoutError, match=r"'head\.weight' was given another shape.*after engine\.close"):
            engine.reshard()
        engine.reshard()
        with pytest.raises(LayoutError, match="was given another shape"), engine.full_params():
            model.head.weight.data = put[:1]
        engine.unshard()
        assert torch.equal(model.head.weight, old)
        model.head.weight.data = put if rows == "more" else model.head.weight.data[:-2]
        engine.close()
        assert torch.equal(model.head.weight, wanted)
        assert all(torch.equal(p.to(dtype), q) for p, q in zip(model.layers.parameters(), body, strict=True))
    train(engine := Engine(model, stage=stage, precision=precision, optimizer=adamw))
    engine.unshard()
    if engine.mesh.rank == 0:
        model.head.weight.data = model.head.weight.data[:-2]
    with pytest.raises(LayoutError, match="other shapes on some ranks"):
        engine.close()


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_a_parameter_that_was_resized_before_the_close_keeps_its_shape(ranks, stage, precision):
    ranks(2, resized, stage, precision)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_data_put_in_place_of_a_whole_parameter_s_is_kept(ranks, stage):
    """As PEFT's merge_and_unload(safe_merge=True) puts it there: with `weight.data = merged`."""
    ranks(2, put_in_place, stage)


def whole(engine, parameters):
    with engine.full_params():
        return [p.detach().clone() for p in parameters]


def put_in_place(stage):
    model = net()
    engine = Engine(model, stage=stage, precision="bf16", optimizer=adamw)
    train(engine)
    for value, how in ((0.5, torch.bfloat16), (0.25, torch.float32)):
        with engine.full_params():
            model.head.weight.data = torch.full_like(model.head.weight, value, dtype=how)
        with engine.full_params():
            assert model.head.weight.eq(value).all()
    square = nn.Parameter(torch.arange(16.0).view(4, 4))
    other = Engine(nn.ParameterList([square]), stage=stage, precision="fp32", optimizer=adamw)
    with other.full_params():
        square.data = square.data.t()
    with other.full_params():
        assert torch.equal(square, torch.arange(16.0).view(4, 4).t())
    first, second = (next(layer.parameters()) for layer in list(model.layers)[:2])
    wanted = [p.detach().clone() for p in whole(engine, [second, first])]
    with engine.full_params():
        first.data, second.data = second.data, first.data
    assert all(torch.equal(p, q) for p, q in zip(whole(engine, [first, second]), wanted, strict=True))
    train(engine)
    engine.unshard()
    model.head.weight.data = torch.full_like(model.head.weight, 0.75)
    engine.close()
    assert model.head.weight.eq(0.75).all()


def unsharded(stage, folder):
    """What is written after unshard() is saved, found by the fingerprint, loaded and trained on from."""
    model = net()
    engine = Engine(model, stage=stage, precision="bf16", optimizer=adamw, ema=0.9)
    train(engine)
    before = engine.fingerprint()
    engine.unshard()
    engine.unshard()
    assert engine.fingerprint() == before
    with torch.no_grad():
        model.head.weight.fill_(0.5)
    written = engine.fingerprint()
    assert written != before
    engine.save(folder)
    assert model.head.weight.eq(0.5).all()
    ids = batch(5, engine.mesh.rank)
    for call in (engine.step, lambda: engine.train_batch([ids])):
        with pytest.raises(ConfigError, match=r"leave the block first \(after unshard\(\): call reshard\(\)\)"):
            call()
    own = bits(model.parameters())
    with engine.averaged(), engine.full_params():
        shown = bits(model.parameters())
    assert shown != own
    assert bits(model.parameters()) == own
    engine.reshard()
    train(engine)
    engine.unshard()
    engine.load(folder)
    assert engine.fingerprint() == written
    return bits(model.parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_unsharded_weights_are_those_of_training(ranks, tmp_path, stage):
    first, second = ranks(2, unsharded, stage, tmp_path)
    assert first == second


def with_masters(options, folder):
    """Bits that unshard(masters=True) shows, and of a further training, with it between and without."""
    shown, after = [], []
    for looks in (True, False):
        model = net()
        model.layers[0].requires_grad_(False)
        frozen = bits(model.layers[0].parameters())
        engine = Engine(model, optimizer=adamw, **options)
        train(engine)
        if looks:
            before = engine.fingerprint()
            engine.unshard(masters=True)
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            plain, ids = copy.deepcopy(net()), batch(7)
            plain.load_state_dict({name: p.detach() for name, p in model.named_parameters()})
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                wanted = plain(ids)
            with torch.no_grad():
                for _ in range(2):
                    assert torch.equal(model(ids), wanted)
                with pytest.raises(RuntimeError):
                    model(ids.float())
            assert not torch.is_autocast_enabled("cpu")
            assert engine.fingerprint() == before
            shown.append(bits(model.parameters()))
            assert bits(model.layers[0].parameters()) == frozen
            with torch.no_grad():
                model.head.weight.copy_(model.head.weight.clone())
            engine.save(folder)
            assert bits(model.parameters()) == shown[0]
            with pytest.raises(zero3d.CheckpointError):
                engine.load(folder / "none")
            assert bits(model.parameters()) == shown[0]
            engine.reshard()
            assert engine.fingerprint() == before
        train(engine)
        after.append(engine.fingerprint())
        engine.unshard(masters=True)
        shown.append(bits(model.parameters()))
        engine.close()
        assert bits(model.parameters()) == shown[-1]
    assert after[0] == after[1]
    assert shown[1] == shown[2] != shown[0]
    return shown


@pytest.mark.parametrize("options", [
    {"stage": 1, "master": "split"}, {"stage": 3, "offload": {"optimizer": "host", "params": "host"}}, {"stage": 3},
    pytest.param({"stage": 0}, marks=pytest.mark.long), pytest.param({"stage": 2}, marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_masters_are_shown_in_the_dtype_in_which_parameters_came_and_cost_no_bit(ranks, tmp_path, options):
    first, second = ranks(2, with_masters, {"precision": "bf16", **options}, tmp_path)
    assert first == second


def frozen_and_written(stage):
    """A frozen parameter of which a part is written has its own values elsewhere; what is kept is on the account."""
    model = net()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    weight = next(model.layers[0].parameters())
    came = weight.detach().clone()
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
    engine = Engine(model, stage=stage, precision="bf16", optimizer=adamw)
    train(engine)
    with engine.full_params():
        weight.data.view(-1)[1] = 3.0
        came.view(-1)[1] = 3.0
    held = {entry.category: entry.measured for entry in engine.memory}["frozen originals"]
    assert held == sum(4 * -(-numel // 2) for numel in frozen)
    engine.unshard(masters=True)
    assert torch.equal(weight, came)
    engine.close()
    assert torch.equal(weight, came)


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_are_given_back_as_they_came_but_for_what_was_written(ranks, stage):
    ranks(2, frozen_and_written, stage)


def written_masters(stage):
    """What is written into parameters that show masters is trained on from, in the dtype of computation."""
    model = net()
    engine = Engine(model, stage=stage, precision="bf16", optimizer=adamw)
    train(engine)
    engine.unshard(masters=True)
    with torch.no_grad():
        model.head.weight.fill_(0.1)
        first, second = (next(layer.parameters()) for layer in list(model.layers)[:2])
        first.data, second.data = second.data, first.data
        wanted = [first.bfloat16(), second.bfloat16()]
    engine.reshard()
    with engine.full_params():
        assert model.head.weight.dtype == torch.bfloat16
        assert model.head.weight.eq(torch.tensor(0.1, dtype=torch.bfloat16)).all()
        torch.testing.assert_close([first, second], wanted, rtol=0.01, atol=0)
    train(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_written_into_parameters_that_show_masters_is_kept(ranks, stage):
    ranks(2, written_masters, stage)


def test_what_was_written_before_masters_are_shown_is_shown_and_inside_a_block_they_are_not():
    model = net()
    engine = Engine(model, stage=3, precision="bf16", optimizer=adamw)
    train(engine)
    engine.unshard()
    with torch.no_grad():
        model.head.weight.fill_(0.25)
    engine.unshard(masters=True)
    assert model.head.weight.eq(0.25).all()
    assert model.head.weight.dtype == torch.float32
    engine.reshard()
    with engine.full_params(), pytest.raises(ConfigError, match=r"unshard\(masters=True\) inside full_params"):
        engine.unshard(masters=True)
    engine.unshard(masters=True)
    assert model.head.weight.dtype == torch.float32


class Interrupted(nn.Module):
    """A line of float64 inputs that Ctrl-C ends."""

    def __init__(self):
        super().__init__()
        self.linear, self.ends = nn.Linear(4, 4), False

    def forward(self, x):
        if self.ends:
            raise KeyboardInterrupt
        return self.linear(x)


def test_a_forward_with_masters_shown_takes_float64_and_leaves_no_autocast_when_it_is_interrupted():
    model = Interrupted()
    own = vars(model).get("forward")
    engine = Engine(model, precision="bf16")
    engine.unshard(masters=True)
    assert model(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.bfloat16
    model.ends = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4))
    assert not torch.is_autocast_enabled("cpu")
    engine.close()
    assert vars(model).get("forward") is own


def test_training_on_floats_goes_on_with_the_same_bits_after_masters_were_shown():
    fingerprints = []
    for looks in (False, True):
        torch.manual_seed(0)
        engine = Engine(nn.Linear(4, 4), precision="bf16", optimizer=adamw)
        for step in range(3):
            if looks:
                engine.unshard(masters=True)
                engine.reshard()
            engine.backward(engine(torch.linspace(-1, step, 8).view(2, 4)).float().square().sum())
            engine.step()
        fingerprints.append(engine.fingerprint())
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize(("came", "precision"), [("bfloat16", "fp32"), ("float16", "bf16"), ("float32", "fp64")])
def test_a_dtype_that_masters_do_not_survive_is_not_shown(came, precision):
    model = nn.Linear(4, 4).to(getattr(torch, came))
    engine = Engine(model, precision=precision)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    before = engine.fingerprint()
    engine.unshard(masters=True)
    assert model.weight.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[precision]
    engine.reshard()
    assert engine.fingerprint() == before


def frozen_otherwise(rank_decides):
    """What is kept of a frozen layer, its weights afterwards, and which of its parameters are as they came."""
    torch.manual_seed(torch.distributed.get_rank() if rank_decides else 0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[0].bias.fill_(1 / 3)
    came = [p.detach().clone() for p in model[0].parameters()]
    engine = Engine(model, precision="bf16")
    kept = {entry.category: entry.measured for entry in engine.memory}["frozen originals"]
    engine.close()
    return kept, bits([model[0].weight]), list(map(torch.equal, model[0].parameters(), came))


def test_frozen_parameters_that_differ_over_ranks_are_rank_0s_and_others_stay(ranks):
    (kept, first, stays), (_, second, stays_too) = ranks(2, frozen_otherwise, True)
    assert kept == 4 * 4 / 2
    assert first == second
    assert stays == stays_too == [False, True]
    assert ranks(2, frozen_otherwise, False)[1][::2] == (4 * (16 + 4) / 2, [True, True])


def over_tp():
    model = hf("llama")
    model.resize_token_embeddings(pad_to_multiple_of=2)
    engine = Engine(model, mesh=zero3d.Mesh(tp=2), precision="bf16")
    with pytest.raises(ConfigError, match="over dp alone"):
        engine.unshard(masters=True)


def test_masters_of_a_model_in_parts_are_not_shown(ranks):
    ranks(2, over_tp)


def test_a_model_without_room_changes_nothing(monkeypatch):
    from zero3d import OutOfBudget
    from zero3d.blueprint.auto import Room
    from zero3d.engine import unshard

    model = nn.Linear(4, 4)
    engine = Engine(model, precision="bf16", master="split", accumulate=2)  # whose weights are copied, to be compared
    engine.backward(engine(torch.ones(1, 4)).sum())
    monkeypatch.setattr(unshard, "room_of", lambda *_: Room(10, None, False))
    for call in (engine.close, engine.unshard):
        with pytest.raises(OutOfBudget, match="has room for 10 B"):
            call()
    engine.backward(engine(torch.ones(1, 4)).sum())
    assert engine.step().reason == "applied"
    engine = Engine(nn.Linear(4, 4), precision="fp32")
    engine.unshard()  # of one rank's weights nothing is gathered or copied


def test_room_for_masters_is_asked_for_before_they_are_shown(monkeypatch):
    from zero3d import OutOfBudget
    from zero3d.blueprint.auto import Room
    from zero3d.engine import unshard

    model = nn.Linear(4, 4)
    engine = Engine(model, precision="bf16")
    monkeypatch.setattr(unshard, "room_of", lambda *_: Room(1000, None, False))
    engine.unshard()  # of one rank's weights nothing is gathered or copied
    engine.reshard()
    with pytest.raises(OutOfBudget, match=r"unshard\(masters=True\) takes .* has room for 1.00 kB"):
        engine.unshard(masters=True)
    assert model.weight.dtype == torch.bfloat16
    monkeypatch.setattr(unshard, "room_of", lambda *_: Room(10**6, None, False))
    engine.unshard(masters=True)
    assert model.weight.dtype == torch.float32


def test_a_checkpoint_that_cannot_be_loaded_leaves_weights_unsharded(tmp_path):
    model = nn.Linear(4, 4)
    engine = Engine(model, stage=3, precision="fp32")
    engine.unshard()
    before = bits(model.parameters())
    with pytest.raises(zero3d.CheckpointError):
        engine.load(tmp_path / "none")
    assert bits(model.parameters()) == before


def dropped():
    """An engine and meshes that are collected instead of closed end the world that they began, the last one alone."""
    for _ in range(2):
        engine, mesh = Engine(net(), precision="fp32", optimizer=adamw), zero3d.Mesh()
        train(engine)
        del engine
        gc.collect()
        assert dist.is_initialized()
        del mesh
        gc.collect()
        assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = zero3d.Mesh()
    mesh.close()
    del mesh
    gc.collect()
    assert dist.is_initialized()  # the caller's


def test_the_last_engine_or_mesh_that_is_dropped_ends_the_world_of_one_process(alone):
    alone(dropped)


def worlds(port):
    """Losses of engines in worlds that ranks begin and end one after another, through one launcher's port."""
    rank, losses = dist.get_rank(), []
    dist.destroy_process_group()
    given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, given):
        for _ in range(3):
            assert not dist.is_initialized()
            engine = Engine(net(), stage=3, precision="fp32", optimizer=adamw)
            assert dist.get_world_size() == 2
            train(engine)
            with engine.full_params():
                losses.append(sum(p.double().sum().item() for p in engine.module.parameters()))
            engine.close()
    assert not dist.is_initialized()
    return losses


def test_ranks_whose_last_engine_is_closed_can_begin_another_world(ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = ranks(2, worlds, port)
    assert found == [[found[0][0]] * 3] * 2
