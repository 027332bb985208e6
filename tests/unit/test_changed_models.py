"""A model that is changed after its engine was built, wrapped before it, or compiled, is trained as it is or refused."""

import copy
import inspect
from unittest import mock

import pytest
import torch
from models import Block, adamw, build, hf, net
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)

import zero3d
from zero3d.activations import recompute
from zero3d.activations.recomputation import Recomputed
from zero3d.engine.registry import Registry
from zero3d.errors import CheckpointError, ConfigError, LayoutError
from zero3d.models.wrappers import Compiled, unwrap


def engine_of(model=None, **options):
    return zero3d.Engine(net() if model is None else model, **{"stage": 2, "precision": "fp32"} | options)


def backward(engine):
    ids = torch.arange(10).view(2, 5)
    engine.backward(engine(ids).float().pow(2).mean())


def head(model):
    model.head = nn.Linear(24, 61, bias=False)


def block(model):
    model.layers[0].extra = nn.Linear(24, 24)


def norm(model):
    model.norm.weight = nn.Parameter(torch.ones(24))


def gone(model):
    del model.layers[2]


def buffer(model):
    model.register_buffer("mean", torch.zeros(3))


CHANGES = {head: "replaced: head.weight", block: "added: layers.0.extra.weight, layers.0.extra.bias",
           norm: "replaced: norm.weight", gone: "removed: layers.2.norm.weight", buffer: "added: mean"}  # fmt: skip
VERBS = {
    "step": lambda engine, folder: (backward(engine), engine.step()),
    "save": lambda engine, folder: engine.save(folder),
    "export": lambda engine, folder: engine.export(folder),
    "full_params": lambda engine, folder: engine.full_params().__enter__(),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
@pytest.mark.parametrize("verb", VERBS)
def test_other_parameters_are_refused_by_name(change, words, verb, tmp_path):
    engine = engine_of()
    change(engine.module)
    with pytest.raises(LayoutError, match=f"other parameters than when its Engine was built .*{words}"):
        VERBS[verb](engine, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


IDS = torch.arange(10).view(2, 5)
DOORS = VERBS | {
    "__call__": lambda engine, folder: torch.no_grad()(engine)(IDS),
    "train_batch": lambda engine, folder: engine.train_batch([{"ids": IDS}]),
    "evaluate": lambda engine, folder: engine.evaluate([{"ids": IDS}]),
    "generate": lambda engine, folder: engine.generate(IDS, 2),
    "hold_weights": lambda engine, folder: engine.hold_weights(),
    "load": lambda engine, folder: engine.load(folder),
    "load_slots": lambda engine, folder: engine.load_slots(),
    "fingerprint": lambda engine, folder: engine.fingerprint(),
    "unshard": lambda engine, folder: engine.unshard(),
    "freeze": lambda engine, folder: engine.freeze("*norm*"),
    "unfreeze": lambda engine, folder: engine.unfreeze("*norm*"),
    "averaged": lambda engine, folder: engine.averaged().__enter__(),
    "grad_norm": lambda engine, folder: engine.grad_norm(),
    "whole_state_dict": lambda engine, folder: engine.whole_state_dict(),
    "stream_weights": lambda engine, folder: next(engine.stream_weights()),
    "send_weights": lambda engine, folder: engine.send_weights(Sender()),
    "state_dict of its module": lambda engine, folder: engine.module.state_dict(),
}
FREE = {  # they answer of the engine alone, go before a step that refuses, or give the model back
    "backward", "backward_sum", "close", "note", "put", "release", "report", "reserve_saves", "reshard", "saved", "zero_grad",
}  # fmt: skip


class Sender:
    """As a program has it; nobody is to be sent anything."""

    timeout = 1.0


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("door", DOORS)
def test_after_a_head_is_replaced_every_door_of_an_engine_says_so(door, stage, tmp_path):
    engine = engine_of(stage=stage, ema=0.9, optimizer=adamw, loss=lambda out, batch: (out.sum(), 1.0))
    head(engine.module)
    with pytest.raises(LayoutError, match=r"other parameters than when its Engine was built .*replaced: head\.weight"):
        DOORS[door](engine, tmp_path / "folder")


@pytest.mark.parametrize("door", ["train_batch", "forward", "module"])
def test_a_head_that_is_tied_to_released_weights_later_is_said_to_be_replaced(door):
    engine = engine_of(stage=3, units=["layers.*"], loss=lambda out, batch: (out.sum(), 1.0))
    engine.module.head.weight = engine.module.layers[0].up.weight
    doors = DOORS | {"forward": lambda engine, _: engine(IDS), "module": lambda engine, _: engine.module(IDS)}
    with pytest.raises(LayoutError, match=r"other parameters than when its Engine was built .*replaced: head\.weight"):
        doors[door](engine, None)


def test_every_public_method_of_an_engine_is_a_door_or_free():
    methods = {name for name, value in vars(zero3d.Engine).items() if inspect.isfunction(value) and name[0] != "_"}
    assert methods == (DOORS.keys() - {"__call__", "state_dict of its module"}) | FREE


def test_what_changes_while_a_model_is_unsharded_is_said_when_that_ends():
    engine = engine_of()
    engine.unshard()
    head(engine.module)
    with pytest.raises(LayoutError, match=r"replaced: head\.weight"):
        engine.reshard()


def test_what_changes_inside_full_params_is_refused_on_leaving():
    engine = engine_of()
    with pytest.raises(LayoutError, match=r"replaced: head\.weight"), engine.full_params():
        head(engine.module)


def test_modules_without_parameters_and_buffers_of_forwards_may_change():
    model = net()
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    registry = Registry(model)
    model.layers[0].dropout = nn.Identity()
    model.cache = torch.ones(3)
    model.register_buffer("mask", torch.ones(2), persistent=False)
    registry.check()
    head(model)
    with pytest.raises(LayoutError, match=r"replaced: head\.weight"):
        registry.check()


def test_a_parameter_that_moves_to_the_module_behind_its_own_is_seen():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    registry = Registry(model)
    registry.check()
    model[1]._parameters = {"moved": model[0]._parameters.pop("bias"), **model[1]._parameters}  # in the same order
    with pytest.raises(LayoutError, match=r"added: 1\.moved; removed: 0\.bias"):
        registry.check()


def test_a_half_window_is_not_saved(tmp_path):
    engine = engine_of(accumulate=3)
    backward(engine)
    with pytest.raises(CheckpointError, match=r"save\(\) after 1 micro-batches .*engine.zero_grad\(\)"):
        engine.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    engine.zero_grad()
    engine.save(tmp_path)


def names_of(engine):
    return [name for name, _ in engine.module.named_parameters()]


@pytest.mark.parametrize(("how", "stage"), [
    ("blocks", 1), *((how, 3) for how in ("whole", "later", "blocks, recomputed")),
    *(pytest.param(how, 1, marks=pytest.mark.long) for how in ("whole", "later", "blocks, recomputed")),
    pytest.param("blocks", 3, marks=pytest.mark.long),
])  # fmt: skip
def test_compiled_models_keep_their_names_and_bits(how, stage):
    plain, model = build("net"), build("net")
    if how == "whole":
        model = torch.compile(model, backend="eager")
    elif how != "later":
        for number, each in enumerate(model.layers):
            model.layers[number] = torch.compile(each, backend="eager")
    if how == "blocks, recomputed":
        recompute(model, "full")
    engine, other = engine_of(model, stage=stage), engine_of(plain, stage=stage)
    if how == "later":
        engine.module.compile(backend="eager")
    assert names_of(engine) == names_of(other)
    for each in (engine, other):
        backward(each)
        each.step()
    assert engine.fingerprint() == other.fingerprint()
    forwards = [block.forward.inner if "recomputed" in how else block.forward for block in engine.module.layers]
    assert all(isinstance(forward, Compiled) for forward in forwards)
    assert all(isinstance(block.forward, Recomputed) == ("recomputed" in how) for block in engine.module.layers)


@pytest.mark.long
def test_an_engine_compiles_blocks_says_so_and_gives_them_back_plain():
    graphs, model = [], build("net")

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    engine, other = engine_of(model, compile={"backend": backend}), engine_of(build("net"))
    assert other.notes == ()
    assert engine.notes[0].startswith("compiled: 3 x Block; a batch of another shape compiles again")
    for each in (engine, other):
        backward(each)
        each.step()
    assert engine.fingerprint() == other.fingerprint()
    engine.close()
    assert not any("forward" in vars(module) for module in model.modules())
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend="eager")  # compiled again by whoever wants
    assert engine_of(model, compile="eager").notes


@pytest.mark.long
def test_another_length_compiles_once_more_and_a_third_one_is_of_those():
    torch._dynamo.reset()
    shapes = []

    def backend(graph, inputs):
        shapes.append([tuple(each.shape) for each in inputs if isinstance(each, torch.Tensor) and each.dim() > 2])
        return graph.forward

    engine = engine_of(hf("llama"), compile={"backend": backend})
    for length, compiled in ((8, 1), (12, 2), (16, 2), (20, 2)):
        engine(input_ids=torch.ones(2, length, dtype=torch.long), use_cache=False)
        assert len(shapes) == compiled, length


@pytest.mark.parametrize(("asked", "words"), [
    ({"mode": "reduce-overhead"}, "reduce-overhead replays CUDA graphs"),
    ({"mode": "max-autotune"}, "pass mode='max-autotune-no-cudagraphs', or no mode"),
    ({"options": {"triton.cudagraphs": True}}, "triton.cudagraphs replays CUDA graphs"),
    (3, "compile=3: pass True, a backend's name, or options"),
])  # fmt: skip
def test_cuda_graphs_are_refused_and_the_model_stays_plain(asked, words):
    model = build("net")
    with pytest.raises(ConfigError, match=words):
        engine_of(model, compile=asked)
    assert not any("forward" in vars(module) for module in model.modules())
    assert engine_of(model, compile=False).notes == ()


def in_blocks(wrap):
    def wrapped(model):
        for number, each in enumerate(model.layers):
            model.layers[number] = wrap(each)
        return model

    return wrapped


WRAPPERS = {
    "checkpoint": in_blocks(checkpoint_wrapper),
    "reentrant": in_blocks(lambda block: checkpoint_wrapper(block, CheckpointImpl.REENTRANT)),
    "offload": in_blocks(lambda block: offload_wrapper(checkpoint_wrapper(block))),
    "compiled": in_blocks(lambda block: torch.compile(checkpoint_wrapper(block), backend="eager")),
    "compiled inside": in_blocks(lambda block: checkpoint_wrapper(torch.compile(block, backend="eager"))),
    "whole": checkpoint_wrapper,
    "compiled around": lambda model: torch.compile(in_blocks(checkpoint_wrapper)(model), backend="eager"),
    "data parallel": in_blocks(nn.DataParallel),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", WRAPPERS)
def test_wrapped_modules_keep_their_names_and_bits(how, stage):
    model = WRAPPERS[how](net())
    calls = []
    inner = next(module for module in model.modules() if type(module) is Block)
    inner.norm.register_forward_hook(lambda *_: calls.append("norm"))
    engine, other = engine_of(model, stage=stage), engine_of(net(), stage=stage)
    assert names_of(engine) == names_of(other)
    assert list(engine.whole_state_dict()) == list(other.whole_state_dict())
    for each in (engine, other):
        backward(each)
        each.step()
    assert engine.fingerprint() == other.fingerprint()
    assert "compile" in how or len(calls) == (1 if how == "data parallel" else 2)  # it is recomputed


def test_a_gradient_of_a_gradient_goes_through_wrapped_modules():
    def fingerprint(wrap, stage):
        torch.manual_seed(0)
        model = nn.Sequential(*(wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(3)))
        engine = engine_of(model, stage=stage, units=["[0-2]"])
        x = torch.ones(2, 4).requires_grad_()
        y = engine(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        engine.backward(y.mean() + gradient.square().mean())
        assert engine.step().applied
        return engine.fingerprint()

    assert len({fingerprint(wrap, stage) for wrap in (checkpoint_wrapper, nn.Module.train) for stage in (0, 3)}) == 1


def test_a_copied_module_calls_its_own_forward_inside_a_wrapper():
    block = unwrap(nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3))))
    copied = copy.deepcopy(block)
    copied[0].weight.data.zero_()
    copied[0].bias.data.zero_()
    assert not copied(torch.ones(1, 3)).any()
    assert block(torch.ones(1, 3)).any()


def test_blocks_that_torch_recomputes_are_not_recomputed_twice():
    with pytest.raises(ConfigError, match=r"layers\.0 is inside torch's CheckpointWrapper: .*activations=none"):
        recompute(WRAPPERS["checkpoint"](net()), "full")


def test_a_compiled_model_without_blocks_says_that_it_is_not_compiled():
    with pytest.warns(UserWarning, match=r"torch.compile\(Linear\) has no effect"):
        engine = engine_of(torch.compile(nn.Linear(3, 3), backend="eager"))
    assert type(engine.module) is nn.Linear


def test_data_parallel_wrappers_are_taken_off():
    engine = engine_of(nn.DataParallel(net()))
    assert names_of(engine)[0] == "embed.weight"
    backward(engine)
    assert engine.step().reason == "applied"


def test_groups_that_grow_later_are_refused():
    model = net()
    model.head.requires_grad_(False)
    engine = engine_of(model)
    engine.optimizer.torch.add_param_group({"params": list(model.head.parameters())})
    backward(engine)
    with pytest.raises(ConfigError, match=r"add_param_group after .*engine.unfreeze\(pattern\)"):
        engine.step()


def test_a_builder_that_finds_no_matrices_is_told_what_it_gets():
    with pytest.raises(ConfigError, match=r"1-D tensors.*zero3d.optim.muon"):
        engine_of(optimizer=lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]))


def test_a_nan_loss_names_the_rank_and_the_likely_reason():
    engine = engine_of()
    logits = engine(torch.arange(4)[None]).float()[0]
    loss = nn.functional.cross_entropy(logits, torch.full((4,), -100))  # whose gradients are zeros
    engine.backward(loss, weight=0)
    assert engine.step().reason == "no targets"
    engine.backward(nn.functional.cross_entropy(engine(torch.arange(4)[None]).float()[0], torch.full((4,), -100)))
    result = engine.step()
    assert not result.applied
    assert result.reason.startswith("NaN loss on rank 0: all labels there may be -100")
    backward(engine)
    assert engine.step().reason == "applied"


def test_a_nan_loss_without_a_weight_is_named_where_its_gradients_are_nan_too():
    engine = engine_of(accumulate=2)
    ids = torch.arange(4)[None]
    engine.backward(engine(ids).float().sum() * float("nan"), weight=0)
    engine.backward(engine(ids).float().mean())
    assert engine.step().reason.startswith("NaN loss on rank 0, of weight 0, and gradients may be NaN with it")


def test_a_weight_that_only_the_device_knows_is_named_where_it_is_not_finite():
    engine = engine_of()
    with mock.patch("zero3d.engine.losses._checked_number"):  # as on a device, which is not read
        engine.backward(engine(torch.arange(4)[None]).float().mean(), weight=torch.tensor(float("nan")))
    assert engine.step().reason.startswith("overflow, with a weight on rank 0 that is NaN, infinite or negative")


def test_a_regulariser_over_released_weights_is_refused_by_name():
    engine = engine_of(stage=3, units=["layers.*"])
    ids = torch.arange(10).view(2, 5)

    def loss():
        return engine(ids).float().pow(2).mean() + sum(p.float().pow(2).sum() for p in engine.module.parameters())

    with pytest.raises(zero3d.ReleasedParameterError, match=r"pow\(\) of parameter '.*'.*full_params\(\)"):
        engine.backward(loss())
    with engine.full_params():
        engine.backward(loss())
    assert engine.step().reason == "applied"
