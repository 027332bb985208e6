"""Every value of a manifest that torch's optimizer or schedule is given, forged with checksums anew, one after another.

A load either raises, and the engine is as it was, or the engine takes steps; a good load after it works, and has the bits
of one into an engine that nobody has tried to load into.
"""

import json
import random
import re
import shutil

import pytest
import torch
from damage import MANIFEST, edit, edit_part, parts
from torch import nn

import zero3d
from zero3d.errors import CheckpointError

GONE = object()
FORGED = (GONE, None, True, False, 10**15, -1, 0, 7, 0.5, 1e300, "x", "inf", [], {}, [1], [None], {"a": 1})
NEW = ("groups.0.other", "groups.0.initial_lr", "groups.0.params", "scalars.other", "scalars.exp_avg")
L = torch.optim.lr_scheduler
OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, centered=True),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
    "8 bits": zero3d.optim.adamw8bit(lr=1e-2),
}
SCHEDULES = {
    None: None,
    "cosine": lambda o: L.CosineAnnealingLR(o, 20),
    "function": lambda o: L.LambdaLR(o, lambda step: 1 / (1 + step)),
    "in a row": lambda o: L.SequentialLR(o, [L.ConstantLR(o), L.StepLR(o, 2)], [2]),
    "one cycle": lambda o: L.OneCycleLR(o, 0.1, total_steps=50, cycle_momentum=False),
}


def engine_of(optimizer, schedule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    kinds = {"optimizer": OPTIMIZERS[optimizer], "scheduler": SCHEDULES[schedule], "units": [nn.Linear]}
    return zero3d.Engine(model, stage=2, precision="fp32", clip_norm=None, **kinds)


def train(engine, *steps):
    for step in steps:
        engine.backward(engine(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).pow(2).mean())
        engine.step()


def snapshot(engine):
    groups = [
        {name: value for name, value in g.items() if name != "params"} for g in engine.optimizer.torch.param_groups
    ]
    schedule = None if engine.scheduler is None else engine.scheduler.state_dict()
    return repr((engine.fingerprint(), engine.steps, groups, schedule))


def places(value, at=()):
    """Every place in a tree of JSON, containers included."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


def put(tree, at, value):
    for key in at[:-1]:
        tree = tree[key]
    if value is GONE:
        del tree[at[-1]]
    else:
        tree[at[-1]] = value


def forge(folder, at, value):
    """Put a value into the manifest; numbers of the optimizer into the ranks' parts, too."""
    edit(folder, lambda manifest: put(manifest, at, value))
    for part in parts(folder) if at[:2] == ("optimizer", "scalars") else ():
        edit_part(folder, part.name, lambda entries: put(entries, at[1:], value))


def cases(manifest):
    """What is forged always, numbers in the place of flags, and all that may be drawn: (place, value)."""
    groups = manifest["optimizer"]["groups"]
    flags = [name for name, value in groups[0].items() if value is None or isinstance(value, bool)]
    told = [(name, *at) for name in ("optimizer", "scheduler") for at in places(manifest[name]) if at]
    new = [("optimizer", *(int(key) if key == "0" else key for key in name.split("."))) for name in NEW]
    others = [(at, value) for at in told for value in FORGED] + [(at, value) for at in new for value in FORGED[1:]]
    return [(("optimizer", "groups", 0, name), 10**15) for name in flags], others


@pytest.mark.parametrize(("optimizer", "schedule", "drawn"), [
    ("AdamW", None, 30), *(pytest.param(*case, 60, marks=pytest.mark.long) for case in (
        ("AdamW", "cosine"), ("amsgrad", None), ("SGD", "function"), ("NAdam", "in a row"), ("RMSprop", None),
        ("ASGD", "one cycle"), ("8 bits", None),
    )),
])  # fmt: skip
def test_a_forged_value_is_refused_or_the_next_good_load_has_its_bits_all_the_same(
    tmp_path, optimizer, schedule, drawn
):
    source = engine_of(optimizer, schedule)
    train(source, 0, 1)
    good = source.save(tmp_path / "good")
    train(source, 2)
    live = engine_of(optimizer, schedule)
    train(live, 5)
    saved, before, wanted = live.save(tmp_path / "before"), snapshot(live), snapshot(source)
    always, others = cases(json.loads((good / MANIFEST).read_text()))
    refused = 0
    for at, value in always + random.Random(drawn).sample(others, drawn):
        folder = tmp_path / "forged" / good.name
        shutil.copytree(good, folder)
        forge(folder, at, value)
        try:
            live.load(folder)
        except CheckpointError:
            refused += 1
            assert snapshot(live) == before, (at, value)
        else:
            if at[0] == "optimizer":  # a schedule of torch's may refuse values of the right type when it steps
                train(live, 3)
            live.load(good)
            train(live, 2)
            assert snapshot(live) == wanted, (at, value)
            live.load(saved)
            assert snapshot(live) == before, (at, value)
        shutil.rmtree(folder)
    assert refused > drawn / 3


@pytest.mark.parametrize(("option", "value"), [("capturable", True), ("amsgrad", True), ("betas", [0.9, 7.0])])
def test_options_that_torch_takes_only_until_it_steps_are_refused_before_and_named(tmp_path, option, value):
    live = engine_of("AdamW", None)
    train(live, 1)
    folder, before = live.save(tmp_path), snapshot(live)
    edit(folder, lambda manifest: manifest["optimizer"]["groups"][0].update({option: value}))
    with pytest.raises(CheckpointError, match=r"optimizer\.groups\[0\] is not taken by AdamW on this cpu"):
        live.load(folder)
    assert snapshot(live) == before
    live = engine_of("AdamW", None)
    live.load(folder, settings="given")
    train(live, 2)
    assert live.steps == 2


@pytest.mark.parametrize(("at", "value"), [
    (("scalars", "step"), GONE), (("scalars", "step"), 1e300), (("scalars", "other"), -1e39),
    (("scalars", "exp_avg"), 0.0), (("scalars", "step of 0.weight"), 0.5), (("scalars", "step of 0.weight"), 2.0),
])  # fmt: skip
def test_numbers_that_the_optimizer_keeps_of_no_parameter_are_refused(tmp_path, at, value):
    live = engine_of("AdamW", None)
    train(live, 1)
    folder, before = live.save(tmp_path), snapshot(live)
    forge(folder, ("optimizer", *at), value)
    with pytest.raises(CheckpointError, match=re.escape(at[-1])):
        live.load(folder)
    assert snapshot(live) == before
