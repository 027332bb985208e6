"""Linear layers in fp8: which ones, what is refused, and what stays as in bf16; on the CPU with a stand-in for torchao."""

import pytest
import torch
from fp8 import Float8Linear, convert_to_float8_training, torchao
from models import batch, planned_bytes
from tensors import tiny
from torch import nn

import zero3d
from zero3d.activations import prepare_blocks
from zero3d.checkpoint.model_card import CARD
from zero3d.errors import ConfigError
from zero3d.models.fp8 import find_layers, refuse_device, use_fp8

NEAR = 2e-2  # losses of a few steps with factors in e4m3, beside bf16, as docs/speed.md says


def model_of():
    torch.manual_seed(3)
    return tiny("llama", hidden_size=32, intermediate_size=48)


def engine_of(model, **options):
    return zero3d.Engine(model, **{"precision": "bf16", "linear": "fp8", "stage": 3} | options)


def losses_of(engine, steps=3):
    found = []
    for step in range(steps):
        ids = batch(step) % 64
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def test_layers_of_blocks_multiply_in_fp8_and_a_line_says_which_and_why_the_others_do_not():
    model = model_of()
    with torchao():
        engine = engine_of(model)
    (said,) = engine.notes
    assert said.startswith("linear layers in fp8: 14 of 15, by torchao ")
    assert (
        "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; in bf16: lm_head (outside of the blocks)"
        in said
    )
    assert type(model.lm_head) is nn.Linear
    assert sum(type(module) is Float8Linear for module in model.modules()) == 14


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.odd = nn.Linear(16, 64), nn.Linear(16, 20)
        self.hooked, self.plain = nn.Linear(16, 16), nn.Linear(16, 16)
        self.hooked.register_forward_hook(lambda *given: None)


def test_routers_odd_sizes_hooks_and_what_is_kept_in_fp32_stay_in_bf16():
    model = nn.Module()
    model.blocks, model.head = nn.ModuleList([Odd(), Odd()]), nn.Linear(16, 16)
    found = find_layers(model)
    assert found.chosen == ("blocks.0.plain", "blocks.1.plain")
    assert set(found.left.values()) == {
        "routers", "16 does not divide their sizes", "hooks or a forward of their own", "outside of the blocks",
    }  # fmt: skip
    model._keep_in_fp32_modules = ["plain"]
    assert find_layers(model).left["blocks.0.plain"] == "kept in fp32"


def test_losses_are_near_those_of_bf16_and_names_and_bytes_the_same(tmp_path):
    with torchao():
        engine, plain = engine_of(model_of()), engine_of(model_of(), linear=None)
    found, wanted = losses_of(engine), losses_of(plain)
    assert found != wanted
    assert found == pytest.approx(wanted, rel=NEAR)
    assert engine.full_model.shapes == plain.full_model.shapes
    assert [(unit.name, unit.layout.total) for unit in engine.units] == [(u.name, u.layout.total) for u in plain.units]
    assert planned_bytes(engine) == planned_bytes(plain)
    for each, name in ((engine, "fp8"), (plain, "bf16")):
        each.export(tmp_path / name)
    files = [
        {file.name: file.stat().st_size for file in (tmp_path / name).iterdir() if file.name != CARD}  # which names fp8
        for name in ("fp8", "bf16")
    ]
    assert files[0] == files[1]


def test_recomputed_blocks_and_every_stage_have_the_same_bits():
    fingerprints = []
    for stage, activations in ((3, "none"), (3, "full"), (3, "selective"), (1, "none")):
        model = model_of()
        prepare_blocks(model, activations)
        with torchao():
            engine = engine_of(model, stage=stage)
        losses_of(engine)
        fingerprints.append(engine.fingerprint())
    assert len(set(fingerprints)) == 1


@pytest.mark.long
def test_a_closed_engine_gives_plain_layers_back_and_a_checkpoint_says_what_it_was_trained_in(tmp_path):
    model = model_of()
    with torchao():
        engine = engine_of(model)
    losses_of(engine, 1)
    engine.save(tmp_path)
    engine.close()
    assert not any(type(module) is Float8Linear for module in model.modules())
    other = engine_of(model, linear=None)
    other.load(tmp_path)
    assert "not bitwise: linear fp8 -> None (factors of products are rounded differently)" in other.resumed


@pytest.mark.parametrize(("model", "options", "words"), [
    (model_of, {"linear": "int8"}, "linear='int8' is unknown: pass 'fp8', or None"),
    (lambda: tiny("llama", hidden_size=24, intermediate_size=40), {}, "no linear layer in repeated blocks whose sizes 16"),
    (lambda: tiny("llama", lora={"target_modules": ["q_proj"]}), {}, "is not supported with adapters"),
    (model_of, {"precision": "fp32"}, "linear='fp8' converts bf16 matrices to fp8, and precision='fp32' has no bf16 matrices"),
    (model_of, {"gather_budget": "64KB"}, "needs whole matrices, and gather_budget='64KB' gathers a few rows"),
])  # fmt: skip
def test_what_cannot_be_in_fp8_is_refused(model, options, words):
    made = model()
    with torchao(), pytest.raises(ConfigError, match=words):
        engine_of(made, **options)
    assert not any(type(module) is Float8Linear for module in made.modules())


def test_without_a_card_or_torchao_it_is_one_line(monkeypatch):
    with pytest.raises(
        ConfigError, match="multiplies in fp8, but a cpu device has no fp8 matrix products: leave it out"
    ):
        engine_of(model_of())
    monkeypatch.setattr("zero3d.models.fp8.refuse_device", lambda device: None)
    monkeypatch.setattr("zero3d.models.fp8.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs torchao, which is not installed: pip install torchao"):
        engine_of(model_of())


@pytest.mark.parametrize(("capability", "refused"), [
    ((8, 0), "A100 has compute capability 8.0 where 8.9 is needed"), ((8, 9), None), ((9, 0), None),
])  # fmt: skip
def test_cards_without_such_products_are_refused_by_name(monkeypatch, capability, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    assert refuse_device(torch.device("cuda", 0)) == refused


def test_a_conversion_that_replaces_parameters_is_refused():
    def copies(module, **given):
        for child in convert_to_float8_training(module, **given).modules():
            if type(child) is Float8Linear:
                child.weight = nn.Parameter(child.weight.detach().clone())
        return module

    with torchao(copies), pytest.raises(ConfigError, match="has replaced parameters, which checkpoints would miss"):
        use_fp8(model_of())
