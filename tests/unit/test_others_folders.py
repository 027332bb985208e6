"""What is read of a folder that torch's own optimizer was saved in: without a model in training, by names alone."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from zero3d.errors import CheckpointError
from zero3d.ways.checkpoints.plain import Live, states_of
from zero3d.ways.huggingface.accelerate.others import Order, _fitted, reader_of

STEPS = 3


class Tied(nn.Module):
    """Three matrices of one shape, one of them under two names, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.above, self.head = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x):
        return self.head(self.above(self.mix(self.embed(x))))


def written(folder, make):
    """Train a model, and write what Trainer writes of it, its weights under the other name of the tied one."""
    model = Tied()
    optimizer = make(
        [{"params": [model.mix.weight, model.above.weight]}, {"params": [model.embed.weight], "weight_decay": 0.5}]
    )
    for step in range(STEPS):
        model(torch.ones(2, 4) + step).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: values.detach().clone() for name, values in model.state_dict().items() if name != "embed.weight"}
    save_file(weights | {"mean": model.mean * 2}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return model, optimizer, live_of(model, optimizer)


def live_of(model, optimizer):
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    same = {name: ["embed.weight", "head.weight"] for name in ("embed.weight", "head.weight")}
    groups = Order.of(model, optimizer).groups
    kind = type(optimizer).__name__
    states = partial(states_of, optimizer)
    return Live(kind, shapes, frozenset(shapes), same, groups, frozenset(["mean"]), None, states)


def read(folder, live):
    return _fitted(reader_of(folder)(live), live)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.5, 0.75))


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.01, momentum=0.5)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_weights_states_counts_and_options_are_those_of_the_file_by_name(tmp_path, make):
    model, optimizer, live = written(tmp_path, make)
    found = read(tmp_path, live)
    assert found.masters.keys() == {"embed.weight", "mix.weight", "above.weight"}
    for name, p in model.named_parameters():
        assert torch.equal(found.masters[name], p)
        kept = {key: value for key, value in optimizer.state[p].items() if value.dim()}
        assert kept.keys() == found.moments[name].keys()
        assert all(torch.equal(found.moments[name][key], value) for key, value in kept.items())
    assert torch.equal(found.buffers["mean"], model.mean * 2)
    assert found.step == (STEPS if make is adamw else 0)
    assert [group["weight_decay"] for group in found.groups] == [
        group["weight_decay"] for group in optimizer.param_groups
    ]
    assert all(group.get("betas", [0.5, 0.75]) == [0.5, 0.75] for group in found.groups)
    found.check()


def edited(folder, change):
    kept = torch.load(folder / "optimizer.pt", weights_only=True)
    change(kept)
    torch.save(kept, folder / "optimizer.pt")


@pytest.mark.parametrize(("make", "change", "words"), [
    (adamw, lambda kept: kept["state"].clear(), "no moments of AdamW: they would begin at zero"),
    (adamw, lambda kept: kept["state"][1].pop("exp_avg_sq"), "no exp_avg and exp_avg_sq of 1 of 3 parameters"),
    (adamw, lambda kept: kept["state"][1].update(step=torch.tensor(7.0)), r"several values of step \(\[3\.0, 7\.0\]\)"),
    (adamw, lambda kept: kept["state"][0].update(exp_avg=torch.zeros(2)), r"exp_avg.* \(2,\) of mix\.weight"),
    (adamw, lambda kept: kept["param_groups"].pop(), r"groups of \[2\] parameters, and this optimizer has \[2, 1\]"),
    (sgd, lambda kept: kept["state"].pop(2), "no momentum_buffer of 1 of 3 parameters, first 'embed.weight'"),
])  # fmt: skip
def test_states_that_are_not_all_there_are_refused(tmp_path, make, change, words):
    *_, live = written(tmp_path, make)
    edited(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, live).check()


def plain_sgd(groups):
    return torch.optim.SGD(groups, lr=0.01)


@pytest.mark.parametrize(("wrote", "goes_on", "words"), [
    (adamw, plain_sgd, "states exp_avg, exp_avg_sq, step, and SGD keeps none"),
    (adamw, sgd, "states exp_avg, exp_avg_sq, step, and SGD keeps momentum_buffer"),
    (sgd, adamw, "states momentum_buffer, and AdamW keeps exp_avg, exp_avg_sq, step"),
    (plain_sgd, torch.optim.Adagrad, "no moments of Adagrad: they would begin at zero"),
    (torch.optim.NAdam, adamw, "states exp_avg, exp_avg_sq, mu_product, step, and AdamW keeps"),
])  # fmt: skip
def test_states_of_another_optimizer_than_the_one_that_goes_on_are_refused(tmp_path, wrote, goes_on, words):
    written(tmp_path, wrote)
    model = Tied()
    groups = [[model.mix.weight, model.above.weight], [model.embed.weight]]
    with pytest.raises(CheckpointError, match=f"{words}.*Train on with the optimizer that has saved it"):
        read(tmp_path, live_of(model, goes_on([{"params": group} for group in groups])))


@pytest.mark.parametrize(("wrote", "goes_on"), [
    (sgd, plain_sgd), (plain_sgd, sgd), (adamw, torch.optim.Adam), (partial(torch.optim.AdamW, amsgrad=True), adamw),
])  # fmt: skip
def test_states_go_on_where_they_are_those_of_the_options_that_are_saved(tmp_path, wrote, goes_on):
    written(tmp_path, wrote)
    model = Tied()
    groups = [[model.mix.weight, model.above.weight], [model.embed.weight]]
    read(tmp_path, live_of(model, goes_on([{"params": group} for group in groups]))).check()


@pytest.mark.parametrize("name", ["optimizer.pt_0", "rank0-of-2-optimizer.pt"])
def test_states_in_a_form_that_is_not_read_are_refused_and_weights_alone_are_none(tmp_path, name):
    assert reader_of(tmp_path) is None
    Path(tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="in a form that is not read here"):
        reader_of(tmp_path)
