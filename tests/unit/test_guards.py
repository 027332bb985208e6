"""Weights that are not there: a named error, never a crash. And bad input to an Engine."""

import copy
import io
import pickle

import pytest
import torch
from models import Net, adamw, batch, build, loss_of
from torch import nn

import zero3d


def touch():
    """What comes of each use of weights that are released."""
    model = build("net")
    engine = zero3d.Engine(model, stage=3, precision="bf16")
    loss_of(engine, batch(0)).backward()
    engine.step()
    p = model.layers[0].up.weight

    def write():
        with torch.no_grad():
            p.fill_(1.0)
        loss_of(engine, batch(1))

    actions = {
        "print": lambda: print(p), "norm": lambda: p.norm(), "clone": lambda: p.clone(), "sum": lambda: p.sum(),
        "deepcopy of a parameter": lambda: copy.deepcopy(p), "add": lambda: p + 1, "numpy": lambda: torch.tensor(p.detach().float().numpy()),
        "state_dict": lambda: model.state_dict(), "of a block": lambda: model.layers[0].state_dict(),
        "load_state_dict": lambda: model.load_state_dict({}, strict=False), "save": lambda: torch.save(model, io.BytesIO()),
        "deepcopy": lambda: copy.deepcopy(model), "of an inner module": lambda: copy.deepcopy(model.layers),
        "pickle": lambda: pickle.dumps(model), "add_": lambda: p.data.add_(1), "write": write,
    }  # fmt: skip
    return {name: outcome(action) for name, action in actions.items()}


def outcome(action):
    try:
        value = action()
    except Exception as error:
        return type(error).__name__
    return "fine" if value is None else "values"


def test_touching_released_parameters_is_an_error_and_never_a_signal(alone):
    found = alone(touch)
    assert found.pop("print") == "fine"
    assert set(found.values()) == {"ReleasedParameterError"}


def test_full_params_opens_everything_but_copies():
    model = build("net")
    names = list(dict(model.named_parameters()))
    engine = zero3d.Engine(model, stage=3, precision="fp32")
    with engine.full_params():
        assert list(model.state_dict()) == names
        model.load_state_dict(model.state_dict())
        with pytest.raises(zero3d.ReleasedParameterError, match="export"):
            copy.deepcopy(model)
    with pytest.raises(zero3d.ReleasedParameterError, match=r"'embed\.weight'.*full_params"):
        model.state_dict()


def test_a_trainers_user_is_told_what_a_trainer_has():
    model = build("net")
    engine = zero3d.Engine(model, stage=3, precision="fp32")
    engine.release()
    with pytest.raises(zero3d.ReleasedParameterError, match=r"accelerator\.get_state_dict\(model\) on all ranks"):
        model.state_dict()
    with pytest.raises(zero3d.ConfigError, match=r"of a Trainer trainer\.accelerator\.close_engine\(\)"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_that_keep_weights_allow_state_dict_and_refuse_copies(stage):
    model = build("net")
    zero3d.Engine(model, stage=stage, precision="fp32")
    assert all(not value.isnan().any() for value in model.state_dict().values())
    for copying in (copy.deepcopy, copy.copy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(zero3d.ReleasedParameterError):
            copying(model)
    with pytest.raises(zero3d.ReleasedParameterError, match="load_state_dict"):
        model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("stage", [0, 3])
def test_writes_behind_the_engines_back_are_noticed_by_name(stage):
    model = build("net")
    engine = zero3d.Engine(model, stage=stage, precision="bf16")
    said = {
        0: (zero3d.LayoutError, r"'layers\.1\.norm\.bias' was written in place.*full_params"),
        3: (zero3d.ReleasedParameterError, r"fill_\(\) of parameter 'layers\.1\.norm\.bias'.*full_params"),
    }
    kind, words = said[stage]
    with torch.no_grad(), pytest.raises(kind, match=words):
        model.layers[1].norm.bias.fill_(3.0)
        loss_of(engine, batch(0))
    other = build("net")
    engine = zero3d.Engine(other, stage=stage, precision="bf16")
    other.head.weight.data = torch.zeros_like(other.head.weight)
    with pytest.raises(zero3d.LayoutError, match=r"'head\.weight' has other data"):
        loss_of(engine, batch(0))


def test_numpy_views_of_gathered_weights_are_survived():
    engine = zero3d.Engine(build("net"), stage=3, precision="fp32", optimizer=adamw)
    plain = zero3d.Engine(build("net"), stage=3, precision="fp32", optimizer=adamw)
    with engine.full_params():
        engine.module.head.weight.detach().numpy()
    for e in (engine, plain):
        for step in range(2):
            loss = loss_of(e, batch(step))
            loss.backward()
            e.step()
    assert torch.equal(loss_of(engine, batch(3)), loss_of(plain, batch(3)))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2).requires_grad_(False)


def on_meta():
    with torch.device("meta"):
        return Net()


BAD = {
    "stage 4": (lambda: zero3d.Engine(Net(), stage=4), zero3d.ConfigError, "stage=0, 1, 2 or 3"),
    "stage True": (lambda: zero3d.Engine(Net(), stage=True), zero3d.ConfigError, "stage=0, 1, 2 or 3"),
    "precision": (lambda: zero3d.Engine(Net(), precision="bf61"), zero3d.ConfigError, "Did you mean 'bf16'"),
    "reduce dtype": (lambda: zero3d.Engine(Net(), precision="fp32", reduce_dtype="bf16"), zero3d.ConfigError, "fp32"),
    "reduce": (lambda: zero3d.Engine(Net(), stage=1, reduce="every_micro_batch"), zero3d.ConfigError, "type stage=2"),
    "release": (lambda: zero3d.Engine(Net(), release="never"), zero3d.ConfigError, "every_use, every_step"),
    "accumulate": (lambda: zero3d.Engine(Net(), accumulate=0), zero3d.ConfigError, "at least 1"),
    "clip": (lambda: zero3d.Engine(Net(), clip_norm=-1.0), zero3d.ConfigError, "positive"),
    "nothing to train": (lambda: zero3d.Engine(Frozen()), zero3d.ConfigError, "requires_grad_(True)"),
    "meta": (lambda: zero3d.Engine(on_meta()), zero3d.ConfigError, "meta device"),
    "weights": (lambda: zero3d.Engine(Net(), weights="cast"), zero3d.ConfigError, "is weight_shards here"),
    "units": (lambda: zero3d.Engine(Net(), units=["decoder.*"]), zero3d.ConfigError, "matches no module"),
    "muon": (lambda: zero3d.Engine(Net(), optimizer=lambda p: torch.optim.Adafactor(p)), zero3d.ConfigError, "AdamW"),
    "exact": (lambda: zero3d.Engine(Net(), exact=True, stage=1, accumulate=6), zero3d.ConfigError, "Pass 4 or 8"),
    "rounded": (
        lambda: zero3d.Engine(Net(), exact=True, reduce_dtype="bf16"),
        zero3d.ConfigError,
        "sums gradients in fp32",
    ),
    "tp": (lambda: zero3d.Mesh(tp=2), zero3d.MeshError, r"dp would be 1 / 2 = 0.5"),
    "pp": (lambda: zero3d.Mesh(dp=1, pp=2), zero3d.MeshError, r"1 rank cannot form pp=2 x dp=1 (= 2 ranks)"),
    "dp": (lambda: zero3d.Mesh(dp=3), zero3d.MeshError, "leave dp out"),
    "degree": (lambda: zero3d.Mesh(dp=0), zero3d.MeshError, "whole number from 1"),
    "no match": (lambda: zero3d.Engine(Net(), param_groups=[{"lr": 1.0}]), zero3d.ConfigError, "'match'"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_one_error_that_says_what_to_type(case):
    build_it, kind, words = BAD[case]
    with pytest.raises(kind) as caught:
        build_it()
    assert words in str(caught.value)


def test_a_model_in_two_engines_is_refused():
    model = Net()
    zero3d.Engine(model, stage=1)
    with pytest.raises(zero3d.ConfigError, match="already sharded"):
        zero3d.Engine(model, stage=1)
    with pytest.raises(zero3d.ConfigError, match="already sharded"):
        zero3d.Engine(nn.Sequential(model), stage=1)


def test_parameters_missing_from_a_ready_optimizer_are_named():
    model = Net()
    with pytest.raises(zero3d.ConfigError, match=r"first 'embed\.weight'"):
        zero3d.Engine(model, optimizer=adamw(model.layers.parameters()))


def test_fp16_needs_a_scaled_loss():
    engine = zero3d.Engine(Net(), stage=2, precision="fp16")
    with pytest.raises(zero3d.ConfigError, match=r"engine\.backward"):
        loss_of(engine, batch(0)).backward()
    engine.backward(loss_of(engine, batch(0)))
    engine.step()


def test_backward_needs_one_number():
    engine = zero3d.Engine(Net(), stage=2)
    with pytest.raises(zero3d.ConfigError, match=r"loss\.mean"):
        engine.backward(engine(batch(0)))


NO_LOSS = {
    "a dict": (lambda loss: {"loss": loss}, {}, r"was given dict: pass its loss, such as output\.loss"),
    "a number": (lambda loss: loss.item(), {}, r"was given float: pass the tensor itself"),
    "nothing": (lambda loss: None, {}, "was given NoneType: a model returns a loss where it is given labels"),
    "a vector of weights": (lambda loss: loss, {"weight": torch.ones(3)}, r"weight=a tensor of shape \(3,\) and dtype"),
    "a text": (lambda loss: loss, {"weight": "3"}, "weight='3': pass the number of targets"),
    "less than none": (lambda loss: loss, {"weight": -2}, "weight=-2: pass the number of targets"),
    "NaN": (lambda loss: loss, {"weight": float("nan")}, "weight=nan: pass the number of targets"),
    "infinity": (lambda loss: loss, {"weight": torch.tensor(torch.inf)}, "weight=inf: pass the number of targets"),
}


@pytest.mark.parametrize("call", ["backward", "backward_sum"])
@pytest.mark.parametrize("case", NO_LOSS)
def test_what_is_no_loss_or_no_weight_is_refused_and_changes_nothing(case, call):
    wrong, options, words = NO_LOSS[case]
    engine = zero3d.Engine(Net(), stage=2)
    with pytest.raises(zero3d.ConfigError, match=words):
        getattr(engine, call)(wrong(loss_of(engine, batch(0))), **options)
    assert engine.step().reason == "not due"
    engine.backward(loss_of(engine, batch(0)))
    assert engine.step().applied


def test_a_weight_of_the_callers_own_loss_is_refused_in_a_train_batch_too():
    engine = zero3d.Engine(Net(), stage=2, loss=lambda output, ids: (output.float().sum(), -1.0))
    with pytest.raises(zero3d.ConfigError, match=r"weight=-1: pass the number of targets"):
        engine.train_batch([batch(0)])
