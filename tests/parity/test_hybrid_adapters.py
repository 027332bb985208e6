"""LoRA and packed matrices beside recurrences: what gets an adapter, on ranks, and in PEFT's hands."""

import warnings

import pytest
import torch
from families import family
from hybrids import HYBRIDS, hybrid
from models import adamw, batch, bits
from torch import nn

import zero3d
from zero3d.config import Lora, load
from zero3d.errors import ConfigError
from zero3d.models.adapters import FUSED_MIXERS, find_targets
from zero3d.models.quantised import QuantisedLinear, find_layers
from zero3d.models.recurrences import read_by_mixers, read_past
from zero3d.models.trained import open_trained
from zero3d.train.setup.support import support_of

DEFAULT = {  # what gets an adapter where lora.targets is left out
    "bamba": {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "falcon_h1": {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "falcon_mamba": {"in_proj"},
    "jamba": {"in_proj", "out_proj", "x_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "lfm2": {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"},
    "mamba": {"in_proj"},
    "mamba2": {"in_proj"},
    "nemotron_h": {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj"},
    "qwen3_5_text": {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "k_proj", "v_proj",
                     "o_proj", "gate_proj", "up_proj", "down_proj"},
}  # fmt: skip


def on_meta(name):
    with torch.device("meta"):
        return hybrid(name)


def leaves(names):
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("name", sorted(DEFAULT))
def test_default_targets_are_what_peft_takes_and_adapters_reach(name):
    model = on_meta(name)
    modules, stacked = find_targets(model, Lora(rank=4))
    assert leaves(modules) == DEFAULT[name]
    assert not stacked
    explicit, _ = find_targets(model, Lora(rank=4, targets=("all-linear",)))
    assert leaves(explicit) >= DEFAULT[name]
    assert not {"dt_proj"} & leaves(explicit)


def refuses(name):
    from peft import LoraConfig, inject_adapter_in_model

    try:
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["out_proj"]), on_meta(name))
    except ValueError as error:
        return "incompatible with Mamba" in str(error) and "out_proj" in str(error)
    return False


OTHERS = sorted(set(HYBRIDS) - {*FUSED_MIXERS, "bailing_hybrid", "kimi_linear", "minimax", "recurrent_gemma", "rwkv"})


@pytest.mark.parametrize(
    "name", ["mamba2", "lfm2", *(pytest.param(n, marks=pytest.mark.long) for n in (*FUSED_MIXERS, *OTHERS))]
)
def test_peft_refuses_out_proj_of_the_types_that_are_noted(name):
    assert refuses(name) is (name in FUSED_MIXERS)


def test_a_layer_that_its_mixer_reads_past_is_refused():
    model = on_meta("jamba")
    assert leaves(read_by_mixers(model)) == {"dt_proj"}
    with pytest.raises(ConfigError, match=r"0\.mamba\.dt_proj, whose weight its mixer reads past it.* take in_proj"):
        find_targets(model, Lora(rank=4, targets=("in_proj", "dt_proj")))
    packed = leaves(find_layers(model.requires_grad_(False)))
    assert "in_proj" in packed
    assert "dt_proj" not in packed
    assert not read_by_mixers(on_meta("lfm2"))


def test_a_layer_whose_clamped_weight_is_multiplied_by_is_refused():
    model = family("gemma3n_text")
    assert leaves(read_past(model)) == {"correction_coefs"}
    with pytest.raises(ConfigError, match=r"correction_coefs, whose weight its module reads past it.* out\.$"):
        find_targets(model, Lora(rank=4, targets=("q_proj", "correction_coefs")))
    assert leaves(find_targets(model, Lora(rank=4))[0]) >= {"q_proj", "prediction_coefs"}
    assert "correction_coefs" not in leaves(find_targets(model, Lora(rank=4))[0])
    assert not leaves(find_layers(model.requires_grad_(False))) & {"correction_coefs"}


class Limits(nn.Module):
    """A module that clamps the weight of one layer, and something else beside the weight of another."""

    def __init__(self):
        super().__init__()
        self.past, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(x, self.past.weight.clamp(-1, 1)), self.told(self.called.weight, x.clamp(-1, 1))


def test_a_layer_is_not_left_out_for_a_clamp_of_something_else():
    assert read_past(Limits()) == {"past"}


@pytest.mark.parametrize("name", ["mamba2", pytest.param("qwen3_5_text", marks=pytest.mark.long)])
def test_zero3d_models_says_what_a_run_adapts(name):
    said = {row.name: row for row in support_of(on_meta(name)).rows}["lora"]
    assert (said.supported, said.what) == (True, ", ".join(sorted(DEFAULT[name])))


# --- trained --------------------------------------------------------------------------------------


def saved(name, folder):
    hybrid(name).save_pretrained(folder)
    return str(folder)


def opened_of(folder, **settings):
    return open_trained(load({"model": {"path": folder}, "lora": {"rank": 2}, **settings}))


def train(folder, stage, out=None, parts=1, **settings):
    """Losses and norms of two steps, a hash of the weights, and what live weights give for a batch."""
    import torch.distributed as dist

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    opened = opened_of(folder, **settings)
    engine = zero3d.Engine(
        opened.module, weights=opened.weights, stage=stage, precision="fp32", clip_norm=1e-2, optimizer=adamw,
        reduce="every_step", exact=True,
    )  # fmt: skip
    steps = []
    for step in range(2):
        micro = [{"input_ids": (ids := batch(step, world * part + rank)), "labels": ids} for part in range(parts)]
        steps += [float(engine.train_batch(micro)), float(engine.last_step.grad_norm)]
    if out is not None:
        engine.export(out)
    frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
    assert any("conv" in name for name in frozen), "the convolution is frozen"
    with engine.full_params(), torch.no_grad():
        return steps, bits(engine.module.parameters()), engine.module.eval()(input_ids=batch(9)).logits


def stages_of(folder, out, stages):
    return [train(folder, stage, out if stage == stages[-1] else None) for stage in stages]


def of_peft(base, adapter):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of PEFT: keys that it did not find
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)


@pytest.mark.parametrize(("name", "stages"), [
    ("lfm2", (3,)),
    *(pytest.param(name, range(4), marks=pytest.mark.long) for name in (*sorted(DEFAULT), "kimi_linear", "qwen3_next")),
])  # fmt: skip
def test_adapters_on_two_ranks_train_beside_a_frozen_convolution_and_load_with_peft(ranks, tmp_path, name, stages):
    folder, out = saved(name, tmp_path / "base"), tmp_path / "adapter"
    wanted = train(folder, 0, parts=2)
    for found in ranks(2, stages_of, folder, str(out), list(stages)):
        for steps, weights, _ in found:
            assert steps == wanted[0], "in exact mode"
            assert weights == wanted[1]
    with torch.no_grad():
        model = of_peft(folder, str(out)).eval()
        assert model(input_ids=batch(9)).logits.equal(found[-1][2])
    changed = {n for n, p in model.named_parameters() if "lora_B" in n and p.abs().max() > 0}
    assert changed == {n for n, p in model.named_parameters() if "lora_B" in n}, "every adapter has learnt"


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*DEFAULT, "kimi_linear"}))
def test_projections_of_mixers_in_4_bits_train_as_at_stage_0(tmp_path, name):
    folder = saved(name, tmp_path / "base")
    model = {"path": folder, "quantize": "nf4"}
    packed = {n for n, m in opened_of(folder, model=model).module.named_modules() if isinstance(m, QuantisedLinear)}
    assert {"in_proj", "in_proj_qkv", "o_proj"} & leaves(n.replace(".base_layer", "") for n in packed)
    assert not [n for n in packed if "dt_proj" in n]
    (losses, weights, _), plain = train(folder, 3, model=model), train(folder, 0)
    assert (losses, weights) == train(folder, 0, model=model)[:2]
    assert losses[0] == pytest.approx(plain[0][0], rel=0.02)
    assert losses[0] != plain[0][0]
