"""Which attention a model gets by model.attn, the line that says why, and a run on a kernel that stands in."""

from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from models import hf
from torch.nn.functional import scaled_dot_product_attention
from training import save_model, save_rows, told, train, tree

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.models.build import build
from zero3d.models.parts import Choice
from zero3d.train.setup import attention
from zero3d.train.setup.attention import KERNELS, Kernel, check_alike, check_kernel, choose_attention, hub_kernel

AMPERE, HOPPER, TURING = (8, 0), (9, 0), (7, 5)
ON_HUB = KERNELS[2].name


def chosen(installed=(), card=HOPPER, model=None, **settings):
    config = load({"model": {"attn": "auto"}, "precision": "bf16"} | settings)
    with mock.patch.object(Kernel, "installed", property(lambda kernel: kernel.package in installed)):
        return choose_attention(config, hf("llama") if model is None else model, card)


@pytest.mark.parametrize(("installed", "card", "name"), [
    (["flash_attn", "flash_attn_interface"], HOPPER, "flash_attention_3"),
    (["flash_attn", "flash_attn_interface"], AMPERE, "flash_attention_2"),
    (["flash_attn_interface"], AMPERE, None), (["flash_attn"], HOPPER, "flash_attention_2"),
    (["kernels"], AMPERE, ON_HUB), (["kernels", "flash_attn"], (10, 0), "flash_attention_2"), (["flash_attn"], TURING, None),
])  # fmt: skip
def test_auto_takes_the_first_kernel_that_is_installed_and_for_the_card(installed, card, name):
    found, why = chosen(installed, card)
    assert found == name
    assert why.startswith(f"attention: {name or 'torch`s own'.replace('`', chr(39))} (model.attn=auto): ")


@pytest.mark.parametrize(("changed", "why"), [
    ({"precision": "fp32"}, "kernels compute in bf16 or fp16, and precision is fp32"),
    ({"zero": {"exact": True}}, "algorithms are deterministic"), ({"health": {"replay": 5}}, "algorithms are deterministic"),
    ({"train": {"deterministic": True}}, "algorithms are deterministic"),
    ({"installed": ()}, "flash_attention_3 or flash_attention_2 or kernels-community/flash-attn2 would be faster: install"),
    ({"card": TURING}, "no kernel supports this GPU"),
])  # fmt: skip
def test_what_a_kernel_does_not_do_stays_with_torch_and_a_line_says_why(changed, why):
    name, said = chosen(**{"installed": ["flash_attn"]} | changed)
    assert name is None
    assert said.startswith(f"attention: torch's own (model.attn=auto): {why}")


def test_models_that_kernels_do_not_fit_stay_with_torch():
    wide, without = hf("llama"), hf("llama")
    wide.config.head_dim = 512
    assert "heads have 512 channels, and kernels support at most 256" in chosen(["flash_attn"], model=wide).why
    without._supports_flash_attn = False
    assert "does not support flash attention" in chosen(["flash_attn"], model=without).why
    assert chosen(["flash_attn"], model=SimpleNamespace()) == (None, "")


def test_nothing_is_said_on_a_cpu_and_of_transformers_own_choice():
    assert chosen(["flash_attn"], card=None) == (None, "")
    config = load({"model": {"attn": None}})
    assert choose_attention(config, hf("llama"), HOPPER) == (None, "")
    config = load({"model": {"attn": "eager"}})
    assert choose_attention(config, hf("llama"), None) == (None, "attention: eager, as model.attn says")


@pytest.mark.parametrize(("attn", "words"), [
    ("flash_attention_2", "needs the package flash_attn, which is not installed: install flash-attn for this GPU"),
    ("flash_attention_3", "needs the package flash_attn_interface, which is not installed: install flash-attn-3"),
    ("someone/attention@main:f", "a copy in the Hub's cache, and a run downloads none: pip install kernels, and once: "
                                 "hf download someone/attention, or set model.attn=sdpa"),
])  # fmt: skip
def test_a_kernel_by_name_that_is_not_there_is_one_error_with_what_to_install(attn, words):
    with pytest.raises(ConfigError, match=f"^model.attn={attn} needs") as refused:
        check_kernel(attn)
    assert words in str(refused.value)


def test_other_names_are_transformers_business():
    for attn in (None, "auto", "sdpa", "eager", "flex_attention"):
        check_kernel(attn)


def test_a_kernel_of_the_hub_is_installed_where_the_cache_has_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(attention, "is_installed", lambda package: package == "kernels")
    kernel = hub_kernel("someone/attention@main:f")
    assert not kernel.installed
    (tmp_path / "kernels--someone--attention" / "snapshots" / "abc").mkdir(parents=True)
    assert kernel.installed


def test_models_are_built_offline(monkeypatch):
    from huggingface_hub import constants
    from transformers import AutoConfig

    class Seen:
        @staticmethod
        def from_config(*given, **options):
            raise ValueError(f"offline is {constants.HF_HUB_OFFLINE}")

    before = constants.HF_HUB_OFFLINE
    monkeypatch.setattr("zero3d.models.build.choose", lambda config, part: Choice(config, Seen, "Seen"))
    with pytest.raises(ConfigError, match="LlamaConfig cannot be built: offline is True"):
        build(AutoConfig.for_model("llama"))
    assert constants.HF_HUB_OFFLINE is before


def test_ranks_of_hosts_with_other_kernels_are_refused():
    ours, others = hf("llama"), SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    told = []
    check_alike(others, SimpleNamespace(rank=0, exchange=lambda number: told.append(number) or number[None]))
    with pytest.raises(
        ConfigError, match="rank 1 computes attention with sdpa, and rank 0 with another kernel: install"
    ):
        check_alike(ours, SimpleNamespace(rank=1, exchange=lambda number: torch.stack([told[0], number])))


# --- a run ---------------------------------------------------------------------------------------

CALLS = []
CLOSE = 5e-3  # losses of two kernels in bf16, as docs/speed.md says


def stand_in(module, query, key, value, attention_mask, **options):
    """Attention that rounds once, in the end, and is counted."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    CALLS.append(query.shape[2])
    wide = (each.float() for each in (query, key, value))
    output, _ = sdpa_attention_forward(module, *wide, attention_mask, **options)
    return output.to(query.dtype), None


def by_documents(module, query, key, value, attention_mask, cu_seq_lens_q, max_length_q, **options):
    """Attention as a varlen kernel computes it: no mask, one row, each document by itself."""
    assert attention_mask is None
    assert len(query) == 1
    CALLS.append(cu_seq_lens_q.tolist())
    bounds = [range(*pair) for pair in pairwise(CALLS[-1])]
    assert max(map(len, bounds)) <= max_length_q
    groups, scaling, outputs = module.num_key_value_groups, options["scaling"], []
    for document in bounds:
        q, k, v = (each[:, :, document.start : document.stop] for each in (query, key, value))
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling).transpose(1, 2))
    return torch.cat(outputs, 1), None


@pytest.fixture
def registered():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    functions.register("stand_in", stand_in)
    functions.register("by_documents", by_documents)
    masks.register("stand_in", masks["sdpa"])
    masks.register("by_documents", masks["flash_attention_2"])
    CALLS.clear()
    yield
    for table in (functions, masks):
        for name in ("stand_in", "by_documents"):
            del type(table)._global_mapping[name]


def run(folder, output, name):
    made = tree(folder, output, precision="bf16", train={"batch": 4, "accumulate": 4})
    kernels = (Kernel(name, "torch", "", ((8, 0), (99, 0))),)
    return told(
        made,
        zero3d__train__setup__attention__card_of=lambda device: HOPPER,
        zero3d__train__setup__attention__KERNELS=kernels,
    )


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


@pytest.mark.long
def test_a_run_computes_with_the_kernel_that_is_installed_and_says_so(folder, registered):
    plain, quiet = told(tree(folder, "plain", precision="bf16", train={"batch": 4, "accumulate": 4}))
    assert not any(line.startswith("attention: ") for line in quiet)
    assert not CALLS
    losses, said = run(folder, "kernel", "stand_in")
    assert "attention: stand_in (model.attn=auto): it is installed; its bits differ from torch's" in said
    assert len(CALLS) >= 5 * 4 * 2
    assert losses != plain
    assert losses == pytest.approx(plain, rel=CLOSE)


@pytest.mark.long
def test_a_kernel_that_the_model_refuses_leaves_torch_s_own(folder):
    losses, said = run(folder, "refused", "not_registered")
    (line,) = (line for line in said if line.startswith("attention: "))
    assert line.startswith("attention: torch's own (model.attn=auto): not_registered is installed and cannot be used: ")
    assert len(losses) == 5


def test_packed_rows_of_a_micro_batch_train_as_one_row_of_documents(folder, registered):
    """Losses and gradients' norms are those of padded rows and their masks, by contract 3 in fp64."""
    save_rows(folder / "rows.npy", rows=30, length=7)  # two in a sequence of 16, with padding behind them

    def losses(output, attn, **changes):
        shape = {"batch": 4, "accumulate": 2, "steps": 3} | changes
        evaluated = {"data": {"validation": 0.2}, "evaluate": {"every": 3}}
        made = tree(folder, output, precision="fp64", train=shape, **evaluated)
        made["model"]["attn"] = attn
        return train(made)

    masked, flat = losses("masked", "sdpa"), losses("flat", "by_documents")
    assert CALLS[0] == [0, 7, 14, 16, 23, 30, 32]
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in flat] == pytest.approx([step[name] for step in masked], rel=1e-10)
    assert flat[-1]["validation_loss"] == pytest.approx(masked[-1]["validation_loss"], rel=1e-10)
