"""What users do that nobody planned: the right result or an error by name, in one process at stage 3."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from models import VOCAB, Block, adamw, batch, bits, build, loss_of
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zero3d
from zero3d.checkpoint.json_values import from_json, to_json
from zero3d.precision import LossScale, LossScaling, Precision


def make(model="net", stage=3, **options):
    model = build(model) if isinstance(model, str) else model
    return zero3d.Engine(model, **({"stage": stage, "precision": "fp32", "optimizer": adamw} | options))


def train(engine, *steps):
    for step in steps:
        engine.backward(loss_of(engine, batch(step)))
        assert engine.step().applied


def weights(engine):
    with engine.full_params():
        return bits(engine.module.parameters())


def same_weights_at_all_stages(use, **options):
    found = set()
    for stage in range(4):
        engine = make(stage=stage, **options)
        use(engine)
        found.add(weights(engine))
    assert len(found) == 1


def test_a_forward_that_is_never_propagated_leaves_no_old_weights_behind():
    def use(engine):
        train(engine, 0)
        engine.backward(loss_of(engine, batch(1)))
        engine(batch(2))
        engine.step()
        train(engine, 3)

    same_weights_at_all_stages(use)


@pytest.mark.parametrize("method", ["train_batch", "evaluate"])
@pytest.mark.parametrize("nothing", [[], iter([])])
def test_no_micro_batches_are_refused(method, nothing):
    engine = make()
    with pytest.raises(zero3d.ConfigError, match=rf"engine\.{method} was given no micro-batches"):
        getattr(engine, method)(nothing)
    train(engine, 0)


TINY = 1e-6
CLIPPINGS = {
    "by norm": lambda ps: clip_grad_norm_(ps, TINY),
    "by norm, elsewhere": lambda ps: torch.nn.utils.clip_grad.clip_grad_norm_(ps, TINY),
    "by a known norm": lambda ps: torch.nn.utils.clip_grads_with_norm_(ps, TINY, torch.tensor(2.0)),
    "by value": lambda ps: torch.nn.utils.clip_grad_value_(ps, TINY),
    "one parameter": lambda ps: clip_grad_norm_(next(iter(ps)), TINY),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("clip", list(CLIPPINGS))
def test_clipping_by_torch_is_refused_where_it_would_do_nothing(clip, stage):
    engine = make(stage=stage)
    engine.backward(loss_of(engine, batch(0)))
    with pytest.raises(zero3d.ConfigError, match=r"pass Engine\(clip_norm=\.\.\.\)"):
        CLIPPINGS[clip](engine.module.parameters())
    assert engine.step().applied


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_of_the_program_s_own_is_refused_where_it_would_train_nothing(stage):
    model = build("net")
    engine = make(model, stage=stage)
    own = torch.optim.AdamW(model.parameters())
    loss_of(engine, batch(0)).backward()
    with pytest.raises(zero3d.ConfigError, match=r"this AdamW has the parameters of an Engine.*optimizer=\.\.\."):
        own.step()
    assert engine.step().applied
    engine.close()
    loss_of(model, batch(0)).backward()
    before = bits(model.parameters())
    own.step()
    assert bits(model.parameters()) != before


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_put_there_after_the_backward_is_not_left_to_the_next_step(stage):
    engine, plain = make(stage=stage), make(stage=stage)
    for each in (engine, plain):
        each.backward(loss_of(each, batch(0)))
    p = next(engine.module.parameters())
    p.grad = torch.ones_like(p)
    with pytest.raises(zero3d.ConfigError, match=r"was given a grad after the backward.*register_hook"):
        engine.step()
    p.grad = None
    assert engine.step().applied
    assert plain.step().applied
    assert engine.fingerprint() == plain.fingerprint()


def test_a_gradient_that_is_there_before_the_backward_is_added():
    engine, plain = make(), build("net")
    optimizer = adamw(plain.parameters())
    for model, p in ((engine, next(engine.module.parameters())), (plain, next(plain.parameters()))):
        p.grad = torch.ones(p.shape)
        loss_of(model, batch(0)).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    assert engine.step().applied
    assert weights(engine) == bits(plain.parameters())


def test_an_engine_is_not_copied():
    engine = make()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(zero3d.ConfigError, match=r"an Engine cannot be copied or pickled"):
            copied(engine)
    train(engine, 0)


def test_a_weight_that_could_not_be_gathered_once_is_gathered_by_its_next_user():
    model = build("net")
    frozen = next(inner for inner in model.modules() if isinstance(inner, Block))
    frozen.requires_grad_(False)
    engine = make(model)
    train(engine, 0)
    frozen.requires_grad_(True)
    for _ in range(2):  # the first fails ahead of the unit's own use
        with pytest.raises(zero3d.LayoutError, match="was unfrozen outside"):
            engine(batch(1)[0])
    frozen.requires_grad_(False)
    with engine.full_params():
        assert all(p.isfinite().all() for p in engine.module.parameters())
    train(engine, 1)


def test_exporting_a_graph_is_refused_where_weights_are_released_and_leaves_the_engine_whole(ranks):
    assert ranks(2, exported) == [True, True]


def exported():
    torch.manual_seed(0)
    engine = make(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), units=[nn.Linear])
    with pytest.raises(zero3d.ConfigError, match=r"torch\.export reached the released weights"):
        torch.export.export(engine.module, (torch.ones(2, 4),))
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    return bool(engine.step().applied)


@pytest.mark.parametrize("clip", list(CLIPPINGS))
def test_other_models_are_clipped_as_before(clip):
    make()
    plain = nn.Linear(3, 3)
    plain(torch.ones(2, 3)).sum().backward()
    CLIPPINGS[clip](plain.parameters())
    assert plain.weight.grad.norm() < 10 * TINY


@pytest.mark.parametrize("name", ["net", "gpt2", "llama"])
def test_an_ordinary_overflow_blames_no_weight(name):
    engine = make(name)
    engine.backward(loss_of(engine, batch(0)) * float("inf"))
    assert engine.step().reason == "overflow"


def test_step_and_load_inside_full_params_are_refused(tmp_path):
    engine = make()
    train(engine, 0)
    engine.save(tmp_path / "ck")
    with engine.full_params():
        with pytest.raises(zero3d.ConfigError, match="leave the block"):
            engine.step()
        with pytest.raises(zero3d.ConfigError, match="leave the block"):
            engine.load(tmp_path / "ck")


def test_a_state_dict_outlives_full_params():
    engine = make()
    plain_model = build("net")
    with engine.full_params():
        state = engine.module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain_model.state_dict().items())


class ScaledEmbedding(nn.Embedding):
    """Has a parameter of its own, which its backward needs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, ids):
        return super().forward(ids) * self.scale[0]


def test_subclasses_of_embedding_are_ordinary_users(poison):
    def build_scaled():
        model = build("net")
        torch.manual_seed(9)
        model.embed = ScaledEmbedding(VOCAB, 24)
        return model

    hashes = set()
    for stage in (0, 3):
        engine = make(build_scaled(), stage=stage)
        train(engine, 0, 1)
        hashes.add(weights(engine))
    assert len(hashes) == 1


def test_the_head_used_again_after_its_forward_is_refused_by_name_and_never_a_crash(poison):
    engine = make()
    out = engine(batch(0)).float()
    with pytest.raises(zero3d.ReleasedParameterError, match=r"matmul\(\) of parameter 'head.weight'.*full_params\(\)"):
        out.square().mean() + (torch.ones(3, 24) @ engine.module.head.weight.T).square().mean()
    train(engine, 1)


class Own(nn.Parameter):
    """A parameter whose class is somebody else's: it is not made to refuse."""


def test_a_released_parameter_of_a_class_of_its_own_is_nan_and_its_loss_is_refused_by_name(poison):
    model = build("net")
    model.head.weight.__class__ = Own
    engine = make(model)
    out = engine(batch(0)).float()
    again = out.square().mean() + (torch.ones(3, 24) @ model.head.weight.T).square().mean()
    assert again.isnan()
    with pytest.raises(zero3d.ReleasedParameterError, match=r"uses parameter 'head.weight' outside of a forward"):
        engine.backward(again)
    train(engine, 1)


def test_runs_that_never_apply_a_step_say_so():
    engine = make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            engine.backward(loss_of(engine, batch(0)) * float("nan"))
            engine.step()
    assert [str(w.message)[:12] for w in told if "in a row" in str(w.message)] == ["5 steps in a"]


def test_a_model_whose_engine_failed_is_refused_and_not_silently_nan():
    model = build("net")
    with pytest.raises(zero3d.ConfigError, match="every element by itself"):
        make(model, optimizer=lambda ps: torch.optim.LBFGS(ps))
    with pytest.raises(zero3d.ConfigError, match="one that failed"):
        make(model)


class Factored(torch.optim.SGD):
    """An optimizer with a state that is no element's own."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["row"] = torch.zeros(3)


def test_states_of_another_shape_are_refused_at_the_first_step():
    engine = make(optimizer=Factored)
    with pytest.raises(zero3d.ConfigError, match=r"Factored keeps row \[3\] for a piece \[.*checkpoints would lose"):
        train(engine, 1)


def test_a_parameter_of_another_engine_is_refused():
    first, second = build("net"), build("net")
    second.head = first.head
    make(first)
    with pytest.raises(zero3d.ConfigError, match="already sharded"):
        make(second)


def test_the_loss_scale_of_one_precision_means_nothing_to_another():
    fp16, bf16 = LossScale(Precision("fp16", LossScaling(initial=64.0))), LossScale(Precision("bf16"))
    bf16.restore(fp16.state())
    assert bf16.value == 1.0
    fresh = LossScale(Precision("fp16"))
    fresh.restore(bf16.state())
    assert fresh.value == 2.0**16


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]), marks=pytest.mark.long),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.MultiStepLR(o, [1, 3])],
            milestones=[2],
        ),
        pytest.param(torch.optim.lr_scheduler.ConstantLR, marks=pytest.mark.long),
    ],
    ids=["multi-step", "one-cycle", "sequential", "a class"],
)
def test_schedulers_resume_where_they_were(tmp_path, schedule):
    def rates(engine, steps):
        out = []
        for step in steps:
            engine.backward(loss_of(engine, batch(step)))
            out.append(float(engine.step().lr))
        return out

    expected = rates(make(scheduler=schedule), range(6))
    first = make(scheduler=schedule)
    rates(first, range(3))
    first.save(tmp_path)
    second = make(scheduler=schedule)
    second.load(tmp_path)
    assert rates(second, range(3, 6)) == expected[3:]


def test_schedulers_that_cannot_work_are_refused():
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(zero3d.ConfigError, match="another optimizer"):
        make(scheduler=torch.optim.lr_scheduler.StepLR(other, 1))
    with pytest.raises(zero3d.ConfigError, match="metric"):
        make(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_a_scheduler_given_later_is_the_one_that_is_stepped_and_saved(tmp_path):
    engine = make(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    engine.scheduler = lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
    rate = engine.optimizer.torch.param_groups[0]["lr"]
    train(engine, 0, 1)
    assert engine.optimizer.torch.param_groups[0]["lr"] == rate / 4
    engine.save(tmp_path)
    again = make(scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    again.load(tmp_path)
    assert again.scheduler.last_epoch == engine.scheduler.last_epoch == 2
    with pytest.raises(zero3d.ConfigError, match="ReduceLROnPlateau"):
        engine.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau


def test_plain_values_keep_their_types():
    state = {"a": (1, 2.5), "b": {1: [True, None], 2: "x"}, "c": torch.tensor([1.0, 2.0])}
    again = from_json(to_json(state), state)
    assert again["a"] == (1, 2.5)
    assert again["b"] == {1: [True, None], 2: "x"}
    assert torch.equal(again["c"], state["c"])


def test_a_backward_around_the_models_own_forward_is_named_or_right():
    def around(engine):
        model = engine.module
        with engine.full_params():
            loss = model.head(model.norm(model.layers[0](model.embed(batch(0))))).float().square().mean()
            engine.backward(loss, last=True)
        assert engine.step().applied

    same_weights_at_all_stages(around)
    engine = make()
    with engine.full_params():
        engine.backward(engine.module.head(torch.ones(1, 24)).square().mean())
    with pytest.raises(zero3d.ConfigError, match="last=True"):
        engine.step()


def test_a_train_batch_that_fails_is_forgotten():
    calls = []

    def loss(output, ids):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("asked to fail")
        return output.float().square().sum(), float(output.numel())

    for stage in range(4):
        calls.clear()
        engine, fresh = make(stage=stage, loss=loss), make(stage=stage, loss=loss)
        with pytest.raises(ValueError, match="asked to fail"):
            engine.train_batch([batch(0), batch(1)])
        assert float(engine.train_batch([batch(2)])) == float(fresh.train_batch([batch(2)]))
        assert weights(engine) == weights(fresh)


def test_a_train_batch_in_a_half_window_is_refused_and_changes_nothing():
    def lossy(output, ids):
        return output.float().square().sum(), 1.0

    engine, other = make(accumulate=2, loss=lossy), make(accumulate=2)
    for each in (engine, other):
        each.backward(loss_of(each, batch(0)))
    with pytest.raises(zero3d.ConfigError, match=r"train_batch\(\) after 1 micro-batches .*engine\.zero_grad\(\)"):
        engine.train_batch([batch(1)])
    for each in (engine, other):
        each.backward(loss_of(each, batch(1)))
        assert each.step().applied
    assert weights(engine) == weights(other)
    engine.train_batch([batch(2)])


def test_evaluation_gives_every_module_its_own_mode_back():
    engine = make("llama")
    engine.module.train()
    engine.module.model.layers[0].eval()
    ids = batch(0)
    engine.evaluate([{"input_ids": ids, "labels": ids}])
    engine.generate(ids[:, :3], max_new_tokens=2)
    assert engine.module.training
    assert not engine.module.model.layers[0].training


class Nested(nn.Module):
    """Lists of lists of modules: the inner lists are never called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.ModuleList([Block(16), nn.LayerNorm(16)]) for _ in range(3))

    def forward(self, x):
        for block, norm in self.layers:
            x = norm(block(x))
        return x


@pytest.mark.parametrize("units", [None, ["layers"], ["layers.*"]])
def test_lists_of_lists_of_modules(poison, units):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    hashes = set()
    for stage in (0, 3):
        engine = make(Nested(), stage=stage, units=units)
        engine.backward(engine(x).square().mean())
        assert engine.step().applied
        hashes.add(weights(engine))
    assert len(hashes) == 1
    assert any(unit.name == "layers.1.0" for unit in engine.units)


def test_groups_that_do_not_match_are_refused_before_anything_is_written(tmp_path):
    first = make(param_groups=[{"match": "*norm*", "weight_decay": 0.0}])
    train(first, 0)
    first.save(tmp_path)
    second = make()
    before = weights(second)
    with pytest.raises(zero3d.CheckpointError, match="2 parameter groups, this engine 1"):
        second.load(tmp_path)
    assert weights(second) == before


def test_momentum_that_begins_later_is_on_the_account():
    engine = make(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    train(engine, 0, 1)
    before = {row.category: row.measured for row in engine.memory}["optimizer"]
    engine.optimizer.torch.param_groups[0]["momentum"] = 0.9
    train(engine, 2)
    after = {row.category: row.measured for row in engine.memory}["optimizer"]
    assert after - before == sum(4 * p.numel() for p in engine.module.parameters())


def test_going_back_to_a_checkpoint_without_momentum_forgets_it(tmp_path):
    def sgd(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    engine = make(optimizer=sgd)
    engine.save(tmp_path)
    train(engine, 0, 1)
    once = weights(engine)
    engine.load(tmp_path)
    train(engine, 0, 1)
    assert weights(engine) == once


def test_late_gradients_after_widening_leave_the_planned_memory():
    engine = make(stage=1, precision="bf16")
    for _ in range(2):
        engine.arena.reset_peaks()
        out = engine(batch(0)).float()
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward(retain_graph=True)
        out.cos().mean().backward()
        engine.step()
        planned = {entry.category: entry.planned for entry in engine.memory if entry.planned is not None}
        assert {c: int(engine.arena.held(c)) for c in planned} == planned
    assert engine.arena.live("bucket") == 0


def test_a_partial_backward_before_the_driven_one_keeps_its_weight():
    def loss(engine, look):
        value = loss_of(engine, batch(0))
        if look:
            torch.autograd.grad(value, engine.module.head.weight, retain_graph=True)
        return value

    hashes = set()
    for look in (False, True):
        engine = make(clip_norm=None, stage=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
        engine.backward(loss(engine, look), weight=10)
        engine.step()
        hashes.add(weights(engine))
    assert len(hashes) == 1


def test_create_graph_and_other_unusual_backwards():
    hashes = set()
    for stage in range(4):
        engine = make(stage=stage)
        loss_of(engine, batch(0)).backward(create_graph=True)
        assert engine.step().applied
        hashes.add(weights(engine))
    assert len(hashes) == 1


def test_optimizers_with_foreign_parameters_are_refused():
    model = build("net")
    extra = nn.Parameter(torch.zeros(5))
    with pytest.raises(zero3d.ConfigError, match=r"shapes \(5,\)"):
        make(model, optimizer=adamw([*model.parameters(), extra]))


def test_unfreezing_after_construction_is_noticed():
    model = build("net")
    model.head.weight.requires_grad_(False)
    engine = make(model)
    model.head.weight.requires_grad_(True)
    with pytest.raises(zero3d.LayoutError, match=r"'head\.weight' was unfrozen"):
        engine(batch(0))


def test_frozen_weights_are_cast_the_same_way_when_built_and_when_loaded(tmp_path):
    def frozen():
        model = build("net")
        model.head.weight.data.fill_(1.00390625 + 0.00390625)  # a tie between two bf16 neighbours
        model.head.weight.requires_grad_(False)
        return model

    make(frozen()).save(tmp_path)
    built, loaded = make(frozen(), precision="bf16"), make(frozen(), precision="bf16")
    loaded.load(tmp_path)
    assert weights(built) == weights(loaded)


class Statistics(nn.Module):
    """A model with running statistics and a root parameter used outside any submodule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.norm(self.first(x)) * self.scale.exp()


@pytest.mark.parametrize("wrap", [dict, lambda **items: __import__("collections").defaultdict(list, items)])
def test_buffers_and_mappings_as_inputs(tmp_path, wrap):
    class Wrapped(Statistics):
        def forward(self, inputs):
            return super().forward(inputs["x"])

    x = torch.randn(16, 8, dtype=torch.float64)
    engine = make(Wrapped())
    engine.backward(engine(wrap(x=x)).square().mean())
    assert engine.step().applied
    assert engine.module.norm.running_mean.abs().sum() > 0
    engine.save(tmp_path)
    other = make(Wrapped())
    other.load(tmp_path)
    assert torch.equal(engine.module.norm.running_mean, other.module.norm.running_mean)


def of_inference():
    with torch.inference_mode():
        return nn.Linear(2, 2)


def named(kind):
    """A builder of an optimizer whose class has a name."""
    return type(kind, (torch.optim.SGD,), {})


def with_frozen(values):
    model = build("net")
    model.register_parameter("extra", nn.Parameter(values, requires_grad=False))
    return model


def with_buffer(values):
    model = build("net")
    model.register_buffer("extra", values)
    return model


BAD = {
    "stage 3.0": (lambda: make(stage=3.0), "stage=0, 1, 2 or 3"),
    "clip text": (lambda: make(clip_norm="1"), "positive"),
    "a class as units": (lambda: make(units=Block), "pass a list"),
    "a model of torch.jit": (
        lambda: make(torch.jit.script(nn.Linear(2, 2))),
        "whose weights cannot be pointed elsewhere: pass the plain module",
    ),
    "a function": (lambda: make(torch.nn.functional.relu), "not a torch.nn.Module"),
    "compiled twice": (lambda: make(torch.compile(torch.compile(build("net")))), "pass the module that it was made of"),
    "a lazy model": (lambda: make(nn.LazyLinear(2)), "call the model once on an example"),
    "weights of inference": (lambda: make(of_inference()), "build the model outside it"),
    "complex": (lambda: make(nn.Linear(2, 2, dtype=torch.complex64)), "complex"),
    "frozen float8": (
        lambda: make(with_frozen(torch.ones(3).to(torch.float8_e4m3fn))),
        "parameter 'extra' is torch.float8_e4m3fn, a dtype that cannot be gathered",
    ),
    "frozen sparse": (
        lambda: make(with_frozen(torch.eye(3).to_sparse())),
        "parameter 'extra' is sparse (torch.sparse_coo), and an engine takes only dense tensors",
    ),
    "a sparse buffer": (lambda: make(with_buffer(torch.eye(3).to_sparse())), "buffer 'extra' is sparse"),
    "looks at whole tensors": (
        lambda: make(optimizer=named("SOAP")),
        "SOAP looks at whole tensors, and ZeRO updates pieces of parameters: use AdamW",
    ),
    "torch's Muon by class": (lambda: make(optimizer=torch.optim.Muon), "Muon looks at whole tensors"),
    "torch's Muon with arguments": (
        lambda: make(optimizer=partial(torch.optim.Muon, lr=0.1)),
        "zero3d.optim.muon(...)",
    ),
    "a kind of Shampoo": (
        lambda: make(optimizer=type("Mine", (named("Shampoo"),), {})),
        "Shampoo looks at whole tensors",
    ),
    "LAMB": (lambda: make(optimizer=named("LAMB")), "LAMB looks at whole tensors"),
    "schedule-free": (
        lambda: make(optimizer=named("AdamWScheduleFree")),
        "AdamWScheduleFree trains other weights than it evaluates",
    ),
    "adafactor built": (
        lambda: make(m := build("net"), optimizer=torch.optim.Adafactor(m.parameters())),
        "treats every element by itself",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_more_bad_input(case):
    build_it, words = BAD[case]
    with pytest.raises(zero3d.ConfigError) as caught:
        build_it()
    assert words in str(caught.value)


def test_a_buffer_that_was_made_in_inference_mode_is_loaded_like_others(tmp_path):
    model = build("net")
    with torch.inference_mode():
        model.register_buffer("scale", torch.ones(3))
    engine = make(model)
    engine.save(tmp_path)
    engine.module.scale.zero_()
    engine.load(tmp_path)
    assert engine.module.scale.tolist() == [1, 1, 1]


def saved_and_loaded(folder):
    engine = make(with_buffer(torch.ones(3).to(torch.float8_e4m3fn)))
    engine.save(folder)
    engine.load(folder)
    return str(engine.module.extra.dtype), engine.module.extra.float().tolist()


def test_a_float8_may_be_a_buffer(ranks, tmp_path):
    assert ranks(2, saved_and_loaded, str(tmp_path)) == [("torch.float8_e4m3fn", [1, 1, 1])] * 2


def test_lora_adapters_over_a_frozen_base_agree_at_all_stages(tmp_path):
    peft = pytest.importorskip("peft")
    hashes = set()
    for stage in (0, 3):
        for checkpointing in (None, False, True):
            torch.manual_seed(3)
            model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
            if checkpointing is not None:
                model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
                model.enable_input_require_grads()
            model.train()
            engine = make(model, stage=stage, precision="bf16")
            for step in range(2):
                engine.backward(loss_of(engine, batch(step)))
                assert engine.step().applied
            hashes.add(weights(engine))
    assert len(hashes) == 1
    engine.export(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


class WithLoss(nn.Module):
    """Returns its mean loss and nothing else."""

    def __init__(self):
        super().__init__()
        self.net = build("net")

    def forward(self, ids):
        return loss_of(self.net, ids)


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: {"ids": ids}], ids=["tensor", "mapping"])
def test_an_output_that_is_one_number_is_the_mean_loss_of_weight_1(wrap):
    model, engine = WithLoss(), make(WithLoss(), stage=3, accumulate=2, clip_norm=None)
    losses = [model(batch(m)) for m in range(2)]
    (sum(losses) / 2).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    mean = float((losses[0] + losses[1]).detach()) / 2
    assert float(engine.evaluate([wrap(batch(m)) for m in range(2)])) == pytest.approx(mean, rel=1e-6)
    assert float(engine.train_batch([wrap(batch(m)) for m in range(2)])) == pytest.approx(mean, rel=1e-6)
    assert float(engine.last_step.grad_norm) == pytest.approx(float(norm), rel=1e-5)


def test_experts_compute_in_fp64():
    ids = {"input_ids": batch(0), "labels": batch(0)}
    losses = [float(make("qwen3_moe", precision=name).train_batch([ids])) for name in ("fp64", "fp32")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    chosen = build("qwen3_moe")
    chosen.set_experts_implementation("batched_mm")
    make(chosen, precision="fp64")
    assert chosen.config._experts_implementation == "batched_mm"
    dense = build("llama")
    make(dense, precision="fp64")
    fast = build("qwen3_moe")
    make(fast, precision="fp32")
    assert fast.config._experts_implementation == build("qwen3_moe").config._experts_implementation
