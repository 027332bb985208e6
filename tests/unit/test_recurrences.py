"""Which parameters are of recurrences and short convolutions: no matrices for Muon, without weight decay."""

import pytest
import torch
from families import family
from hybrids import HYBRIDS, hybrid
from tensors import tiny
from torch import nn

from zero3d.models.recurrences import is_mixer, is_short_convolution, own_of_recurrences
from zero3d.optim.find import find_matrices
from zero3d.train.setup.optimizer import norms_and_biases

MAMBA = {"A_log", "D", "conv1d.bias", "conv1d.weight", "dt_proj.bias"}
MAMBA_2 = {"A_log", "D", "conv1d.bias", "conv1d.weight", "dt_bias"}
DELTA = {"A_log", "conv1d.weight", "dt_bias"}
WANTED = {
    "bamba": MAMBA_2,
    "falcon_h1": MAMBA_2,
    "falcon_mamba": MAMBA,
    "granitemoehybrid": MAMBA_2,
    "jamba": MAMBA,
    "kimi_linear": DELTA,
    "lfm2": {"conv.weight"},
    "lfm2_moe": {"conv.weight"},
    "mamba": MAMBA,
    "mamba2": MAMBA_2,
    "minimax": set(),
    "nemotron_h": MAMBA_2,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "recurrent_gemma": {
        "conv_1d.bias", "conv_1d.weight", "rg_lru.input_gate_bias", "rg_lru.recurrent_gate_bias",
        "rg_lru.recurrent_param",
    },
    "rwkv": {"time_decay", "time_first", "time_mix_key", "time_mix_receptance", "time_mix_value"},
    "xlstm": set(),
    "zamba2": MAMBA_2,
    "zaya": {f"conv_qk_{kind}.{name}" for kind in ("depthwise", "grouped") for name in ("weight", "bias")},
}  # fmt: skip
QUICK = ("kimi_linear", "lfm2", "mamba", "qwen3_5_text", "zamba2", "zaya")


def on_meta(name):
    with torch.device("meta"):
        return hybrid(name)


def ends(names, wanted):
    """The last parts of names, as many as the wanted ones have."""
    return {next((end for end in wanted if name.endswith(f".{end}")), name) for name in names}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in sorted(WANTED)]
)
def test_what_recurrences_have_is_neither_orthogonalised_nor_decayed(name):
    model = on_meta(name)
    own = own_of_recurrences(model)
    # Mamba's dt_proj is a linear layer beside A_log, whose bias is one as of any other.
    assert ends(own, WANTED[name]) == WANTED[name] - {"dt_proj.bias"}
    assert not own & find_matrices(model, None, {}).keys()
    assert own <= norms_and_biases(model)
    left = {each for each, p in model.named_parameters() if p.dim() > 2 and each not in own}
    assert all("experts" in each or "gate_weight" in each or "_proj_weight" in each for each in left), left
    matrices = {each for each, p in model.named_parameters() if p.dim() == 2 and ".layers." in each}
    assert matrices - own - norms_and_biases(model) <= find_matrices(model, None, {}).keys()


def test_the_table_has_every_kind_of_mixer():
    assert set(WANTED) <= set(HYBRIDS)


def test_models_without_recurrences_have_none():
    for model in (tiny("llama"), tiny("gpt2"), family("gpt_oss"), family("bert")):
        assert own_of_recurrences(model) == set()
        assert not any(map(is_mixer, model.modules()))


@pytest.mark.parametrize(
    ("module", "short"),
    [
        (nn.Conv1d(8, 8, 4, groups=8, padding=3), True),
        (nn.Conv1d(8, 8, 3, groups=8, padding=4, dilation=2), True),
        (nn.Conv1d(8, 8, 3, groups=8, padding=1), False),  # of sounds, which see both sides
        (nn.Conv1d(8, 8, 3, groups=8, padding="same"), False),
        (nn.Conv1d(8, 8, 4, groups=4, padding=3), False),  # mixes channels: matrices
        (nn.Conv1d(8, 8, 1, groups=8), False),
        (nn.Conv2d(8, 8, 4, groups=8, padding=3), False),
    ],
)
def test_a_short_convolution_is_depthwise_and_causal(module, short):
    assert is_short_convolution(module) is short


def test_the_names_of_a_recurrence_count_in_one_alone():
    """A matrix that is called D, or a bias of two dimensions, is of no recurrence."""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.D, self.gate_bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

    assert own_of_recurrences(Other()) == set()
    recurrence = Other()
    recurrence.A_log = nn.Parameter(torch.ones(4))
    assert own_of_recurrences(recurrence) == {"A_log", "D", "gate_bias"}
    assert is_mixer(recurrence)
    assert not is_mixer(Other())
