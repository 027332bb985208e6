"""Every kind of adapter that PEFT builds: trained at stage 3, its folder loads with PEFT and computes the same bits, and
merged it is what PEFT merges; or it is refused by name."""

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from bases import base_folder
from models import adamw, batch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import zero3d
from zero3d.checkpoint.offline_export import export_stored
from zero3d.checkpoint.stored_states import StoredStates
from zero3d.errors import CheckpointError, ConfigError

QV = {"target_modules": ["q_proj", "v_proj"]}
KINDS = {  # what PEFT is asked for
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LOHA": {"r": 4, **QV},
    "LOKR": {"r": 4, **QV},
    "OFT": {"oft_block_size": 4, **QV},
    "BOFT": {"boft_block_size": 4, **QV},
    "VERA": {"r": 4, "target_modules": ["q_proj", "o_proj"]},
    "LN_TUNING": {"target_modules": ["norm"]},
    "TRAINABLE_TOKENS": {"token_indices": list(range(3, 50))},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
}
RARE = {
    "LORA": {"r": 4, "bias": "lora_only", **QV},
    "PVERA": {"r": 4, "target_modules": ["q_proj", "o_proj"]},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 2},
    "CARTRIDGE": {"num_virtual_tokens": 3},
    "ADAPTION_PROMPT": {"adapter_layers": 2, "adapter_len": 4},
    "FOURIERFT": {"n_frequency": 10, **QV},
    "HRA": {"r": 4, **QV},
    "MISS": {"r": 4, **QV},
    "VBLORA": {"r": 2, "num_vectors": 8, "vector_length": 2, "topk": 2, **QV},
    "RANDLORA": {"r": 4, **QV},
    "C3A": {"block_size": 4, **QV},
    "ROAD": {"group_size": 4, **QV},
    "WAVEFT": {"n_frequency": 10, **QV},
    "OSF": QV,
    "DELORA": {"r": 4, **QV},
    "GRALORA": {"r": 4, "gralora_k": 2, **QV},
    "HIRA": {"r": 4, **QV},
    "UNILORA": {"r": 4, **QV},
    "TINYLORA": {"r": 2, **QV},
    "PSOFT": {"r": 4, **QV},
    "PEANUT": {"r": 4, **QV},
    "BEFT": {"target_modules": ["v_proj"]},
    "LILY": {"r": 4, **QV},
    "SHADOW": {},
    "SUPERTUNING": QV,
    "DEFT": {"r": 4, **QV},
    "POLY": {"r": 4, **QV},
    "SHIRA": {"r": 2, **QV},
    "FROD": QV,
}
BELOW_3 = {"ADALORA": {"target_r": 2, "init_r": 4, "total_step": 10, **QV}}
NOT_WEIGHTS = {"PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CARTRIDGE", "ADAPTION_PROMPT"}
NOT_MERGED = {"LILY", "SHADOW", "POLY"}  # by PEFT itself
WITH_TASKS = {"MULTITASK_PROMPT_TUNING", "POLY"}
TIED = {  # LoRA on a model whose head is its embedding
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved as one": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "neither": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": list(range(3, 50))},
}
KEEP_THE_TIE = {"saved as one", "neither", "tokens"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of bases, each saved once."""
    return {name: base_folder(tmp_path_factory.mktemp("bases") / name, name) for name in ("llama", "qwen3")}


def adapted(base, kind="LORA", **options):
    """A model of PEFT's on a folder's weights."""
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type="CAUSAL_LM", **options)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(plain(base), config).train()


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def inputs(number, kind):
    ids = batch(number)
    return {"input_ids": ids} | ({"task_ids": torch.zeros(len(ids), dtype=torch.long)} if kind in WITH_TASKS else {})


def logits(model, kind="LORA"):
    with torch.no_grad():
        return model.eval()(**inputs(9, kind)).logits


def trained(base, kind="LORA", stage=3, **options):
    """An engine after two steps, and its logits."""
    engine = zero3d.Engine(adapted(base, kind, **options), precision="fp32", optimizer=adamw, stage=stage)
    for number in (1, 2):
        given = inputs(number, kind)
        engine.backward(engine(labels=given["input_ids"], **given).loss)
        assert engine.step().reason == "applied"
    with engine.full_params():
        return engine, logits(engine.module, kind)


def loaded(base, folder):
    return peft.PeftModel.from_pretrained(plain(base), folder)


def check_kind(base, folder, kind, stage, options):
    engine, expected = trained(base, kind, stage, **options)
    again = loaded(base, engine.export(folder / "adapter"))
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip
    found = logits(again, kind)
    assert found.equal(expected)
    base_logits = logits(plain(base))
    assert not found[:, -base_logits.shape[1] :].equal(base_logits)
    if kind in NOT_WEIGHTS:
        with pytest.raises(CheckpointError, match=rf"kind {kind} changes what the model is given, not its weights"):
            engine.export(folder / "merged", "merged")
    elif kind in NOT_MERGED:
        with pytest.raises(CheckpointError, match=r"Layer|Linear cannot be merged into the weights \(NotImplemented"):
            engine.export(folder / "merged", "merged")
    else:
        merged, theirs = plain(engine.export(folder / "merged", "merged")), again.merge_and_unload()
        assert {key: t.tolist() for key, t in merged.state_dict().items()} == {
            key: t.tolist() for key, t in theirs.state_dict().items()
        }


OFTEN = ("IA3", "VERA", "TRAINABLE_TOKENS", "PREFIX_TUNING")  # of each way in which an adapter changes a model


@pytest.mark.parametrize("kind", [
    *OFTEN, *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in OFTEN)
])  # fmt: skip
def test_a_kind_of_adapter_loads_with_peft_and_is_merged_as_peft_merges_it(folders, tmp_path, kind):
    check_kind(folders["llama"], tmp_path, kind, 3, KINDS[kind])


def test_a_kind_that_scales_a_bias_is_merged_into_layers_without_one(folders, tmp_path):
    check_kind(folders["qwen3"], tmp_path, "IA3", 3, KINDS["IA3"])


@pytest.mark.long
@pytest.mark.parametrize("kind", RARE)
def test_a_rare_kind_of_adapter_loads_with_peft_and_is_merged_as_peft_merges_it(folders, tmp_path, kind):
    check_kind(folders["llama"], tmp_path, kind, 3, RARE[kind])


@pytest.mark.parametrize("kind", BELOW_3)
def test_a_kind_that_stage_3_cannot_gather_is_refused_there_and_trained_at_stage_2(folders, tmp_path, kind):
    with pytest.raises(ConfigError, match=rf"PEFT's {kind} is not supported at stage 3: .*Pass stage=2\."):
        zero3d.Engine(adapted(folders["llama"], kind, **BELOW_3[kind]), optimizer=adamw, stage=3)
    check_kind(folders["llama"], tmp_path, kind, 2, BELOW_3[kind])


def test_a_kind_that_writes_its_own_weights_is_refused(folders):
    prompt = {"cpt_token_ids": [0, 1, 2], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 2]}
    with pytest.raises(ConfigError, match=r"PEFT's CPT is not supported: its forward overwrites its weights"):
        zero3d.Engine(adapted(folders["llama"], "CPT", **prompt), optimizer=adamw)


def test_adapters_that_share_memory_are_refused(folders):
    model = adapted(folders["qwen3"], target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(
        ConfigError, match=r"lm_head.lora_A.default.weight is a view of .*leave ensure_weight_tying out"
    ):
        zero3d.Engine(model, optimizer=adamw)


TIED_OFTEN = ("both", "saved as one")


@pytest.mark.parametrize("case", [
    *TIED_OFTEN, *(pytest.param(case, marks=pytest.mark.long) for case in TIED if case not in TIED_OFTEN)
])  # fmt: skip
def test_a_tied_weight_is_merged_for_each_module_that_has_it(folders, tmp_path, case):
    engine, expected = trained(folders["qwen3"], **TIED[case])
    assert logits(loaded(folders["qwen3"], engine.export(tmp_path / "adapter"))).equal(expected)
    folder = engine.export(tmp_path / "merged", "merged")
    torch.testing.assert_close(logits(plain(folder)), expected, rtol=1e-4, atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] == (case in KEEP_THE_TIE)


@pytest.mark.parametrize("options", [
    {"target_parameters": ["k_proj.weight"], "target_modules": ["q_proj"]},
    pytest.param({"target_parameters": ["lm_head.weight"], "target_modules": ["q_proj"]}, marks=pytest.mark.long),
])  # fmt: skip
def test_lora_on_the_parameter_of_a_linear_layer_leaves_it_in_place(folders, tmp_path, options):
    engine, expected = trained(folders["llama"], **options)
    again = loaded(folders["llama"], engine.export(tmp_path / "adapter"))
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)
    merged, theirs = plain(engine.export(tmp_path / "merged", "merged")), again.merge_and_unload()
    assert logits(merged).equal(logits(theirs))


@pytest.mark.parametrize(("base", "kind", "options"), [
    ("llama", "VERA", KINDS["VERA"]), ("qwen3", "LORA", TIED["saved embedding"]),
    pytest.param("llama", "IA3", KINDS["IA3"], marks=pytest.mark.long),
])  # fmt: skip
def test_an_export_without_an_engine_has_the_same_bits(folders, tmp_path, base, kind, options):
    engine, _ = trained(folders[base], kind, **options)
    stored = StoredStates(Path(engine.save(tmp_path / "saved")))
    model = adapted(folders[base], kind, **options)
    for form, weights in (("adapter", "adapter_model"), ("merged", "model")):
        here, there = (
            engine.export(tmp_path / form, form),
            export_stored(stored, tmp_path / f"offline-{form}", model, form),
        )
        for name in (f"{weights}.safetensors", "adapter_config.json" if form == "adapter" else "config.json"):
            assert (there / name).read_bytes() == (here / name).read_bytes()


def in_parts(base, folder, kind, options, mesh):
    """The folders that ranks export after two steps."""
    made = {"precision": "fp32", "optimizer": adamw, "stage": 3 if mesh["dp"] > 1 else 1}
    engine = zero3d.Engine(adapted(base, kind, **options), mesh=zero3d.Mesh(**mesh), **made)
    for number in (1, 2):
        engine.train_batch([{"input_ids": batch(number), "labels": batch(number)}] * mesh["pp"])
    return engine.export(folder / "adapter"), engine.export(folder / "merged", "merged")


def refusal(base):
    with pytest.raises(ConfigError) as refused:
        in_parts(base, Path(), "PROMPT_TUNING", KINDS["PROMPT_TUNING"], {"dp": 1, "pp": 2})
    return str(refused.value)


@pytest.mark.parametrize(("base", "kind", "options", "mesh"), [
    ("qwen3", "LORA", TIED["saved embedding"], {"dp": 1, "pp": 2}),
    pytest.param("llama", "VERA", KINDS["VERA"], {"dp": 2, "pp": 1}, marks=pytest.mark.long),
    pytest.param("qwen3", "LORA", TIED["embedding"], {"dp": 1, "pp": 2}, marks=pytest.mark.long),
])  # fmt: skip
def test_two_ranks_export_what_one_does(folders, ranks, tmp_path, base, kind, options, mesh):
    _, expected = trained(folders[base], kind, **options)
    (adapter, merged), _ = ranks(2, in_parts, folders[base], tmp_path, kind, options, mesh)
    torch.testing.assert_close(logits(loaded(folders[base], adapter)), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(plain(merged)), expected, rtol=1e-4, atol=1e-5)


def base_of_two_stages(base, folder):
    """The base that ranks export beside a replaced head, which was changed."""
    model = adapted(base, **TIED["saved head"])
    with torch.no_grad():
        for p in model.parameters():
            p += p.requires_grad
    engine = zero3d.Engine(model, mesh=zero3d.Mesh(pp=2), stage=1, precision="fp32")
    return engine.export(folder, "base")


def test_a_pipeline_exports_the_base_without_the_head_that_replaced_a_tied_one(folders, ranks, tmp_path):
    folder, _ = ranks(2, base_of_two_stages, folders["qwen3"], tmp_path / "base")
    found = [item for part in folder.glob("*.safetensors") for item in load_file(part).items()]
    came = load_file(folders["qwen3"] / "model.safetensors")
    assert sorted(name for name, _ in found) == sorted(came)
    assert all(values.equal(came[name]) for name, values in found)


def test_prompts_are_refused_in_pipelines(folders, ranks):
    for message in ranks(2, refusal, folders["llama"]):
        assert message.startswith("PEFT's PROMPT_TUNING prepends virtual tokens, which pipeline stages cannot pass on")


@pytest.mark.parametrize("built", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_group_of_parameters_that_adapters_leave_empty_is_trained_like_any(folders, built):
    model = adapted(folders["llama"], r=4, **QV)
    small = [p for p in model.parameters() if p.dim() < 2]
    large = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": small, "weight_decay": 0.0}, {"params": large}]
    options = (
        {"optimizer": torch.optim.AdamW(groups, lr=1e-2)}
        if built
        else {"optimizer": adamw, "param_groups": [{"match": "*norm*|*.bias", "weight_decay": 0.0}]}
    )
    engine = zero3d.Engine(model, precision="fp32", **options)
    before = logits(plain(folders["llama"]))
    for number in (1, 2):
        engine.backward(engine(input_ids=batch(number), labels=batch(number)).loss)
        assert engine.step().reason == "applied"
    with engine.full_params():
        assert not logits(engine.module).equal(before)
