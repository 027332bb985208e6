"""Optimizers that a JSON of DeepSpeed's names, in a program: those of torch step by step, Lion by its equations, Muon."""

import pytest
import torch
from models import batch, hf, loss_of
from tensors import tiny

from zero3d.errors import ConfigError
from zero3d.optim import muon
from zero3d.ways import deepspeed
from zero3d.ways.deepspeed.document import document_of
from zero3d.ways.deepspeed.lion import Lion
from zero3d.ways.deepspeed.merge import together

STEPS = 3
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "Lion": (Lion, {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"alpha": 0.9}),
    "NAdam": (torch.optim.NAdam, {"momentum_decay": 0.01}),
    "RAdam": (torch.optim.RAdam, {"weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {"rho": 0.8}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False}),
}


def opened(kind, params, stage, model=None, **options):
    tree = {
        "train_batch_size": 2, "gradient_clipping": 0, "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    return deepspeed.initialize(model=model or hf("llama"), config=tree, **options)[0]


def losses_of(engine):
    losses = []
    for step in range(STEPS):
        losses.append(loss_of(engine, batch(step)))
        engine.backward(losses[-1])
        engine.step()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_of_the_json_is_torchs(kind):
    make, params = OPTIMIZERS[kind]
    model, losses = hf("llama"), []
    plain = make(
        model.parameters(), **{key: v for key, v in params.items() if key not in ("torch_adam", "adam_w_mode")}
    )
    for step in range(STEPS):
        losses.append(loss_of(model, batch(step)))
        losses[-1].backward()
        plain.step()
        plain.zero_grad()
    engine = opened(kind, params, 3 if kind in ("SGD", "Lion") else 1)
    assert isinstance(engine.optimizer, make)
    assert losses_of(engine) == pytest.approx([loss.item() for loss in losses], rel=1e-6)
    assert losses[0].item() != losses[-1].item()


def test_groups_of_parameters_go_to_the_optimizer_of_the_json():
    model = hf("llama")
    groups = [{"params": [p for p in model.parameters() if p.dim() == n], "lr": 0.1 * n} for n in (1, 2)]
    engine = opened("SGD", {"momentum": 0.5}, 2, model, model_parameters=groups)
    assert engine.get_lr() == pytest.approx([0.1, 0.2])
    assert engine.get_mom() == [0.5, 0.5]
    model = hf("llama")
    with pytest.raises(ConfigError, match="adagrad takes all that is trained as one"):
        opened("Adagrad", {}, 1, model, model_parameters=[{"params": list(model.parameters())}])


def test_lion_steps_by_the_sign_of_a_mean():
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    lion = Lion([p], lr=0.1, betas=(0.9, 0.5), weight_decay=0.5)
    p.grad = torch.tensor([2.0, -1.0])
    lion.step()
    torch.testing.assert_close(p.detach(), torch.tensor([0.95 - 0.1, -1.9 + 0.1]))
    p.grad = torch.tensor([-3.0, -1.0])  # 0.9 m + 0.1 g has the momentum's sign in the first
    lion.step()
    torch.testing.assert_close(lion.state[p]["exp_avg"], torch.tensor([-1.0, -0.75]))
    torch.testing.assert_close(p.detach(), torch.tensor([0.85 * 0.95 - 0.1, -1.8 * 0.95 + 0.1]))


def test_muon_of_the_json_is_ours_with_deepspeeds_numbers():
    import zero3d

    model = tiny("llama")
    engine = opened("Muon", {"lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1}, 2, model)
    rule = muon(0.02, adamw_lr=1e-3, weight_decay=0.1, adamw_eps=1e-10, adjust_lr="original")
    other = zero3d.Engine(tiny("llama"), stage=2, precision="fp32", optimizer=rule, clip_norm=None)
    for step in range(2):
        for each in (engine, other):
            loss = loss_of(each, batch(step))
            each.backward(loss)
            each.step()
    assert engine.engine.fingerprint() == other.fingerprint()


@pytest.mark.parametrize(("kind", "params", "why"), [
    ("SGD", {"betas": [0.9, 0.99]}, "optimizer.params.betas is not of SGD, which has lr, weight_decay, momentum"),
    ("SGD", {"lr": "auto"}, "optimizer.params.lr cannot be auto"),
    ("SGD", {"momentum": -1}, "optimizer.params do not suit sgd: Invalid momentum value"),
    ("Muon", {"adam_w_mode": False}, "optimizer.params.adam_w_mode is not of Muon"),
    ("Lamb", {}, "optimizer.type='Lamb' is refused: it is not supported; use AdamW or Muon, or zero3d.Engine"),
])  # fmt: skip
def test_what_an_optimizer_cannot_be_is_one_line(kind, params, why):
    with pytest.raises(ConfigError, match=why):
        opened(kind, params, 1)


def test_a_trainer_takes_adam_alone():
    for kind in ("Muon", "SGD"):
        document = document_of({"optimizer": {"type": kind}}, "ds.json")
        with pytest.raises(ConfigError, match=f"optimizer.type='{kind}' is refused: it is for programs; use AdamW, or"):
            together(document, {}, "TrainingArguments")
