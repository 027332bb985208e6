"""What `zero3d models TYPE` says rests on runs: each "yes" trains as one rank does, each "no" is an engine's own."""

import pytest
import words
from contracts import hashed

from zero3d.models.build import build
from zero3d.models.layer_kinds import feed_forward_left_out, kinds_left_out
from zero3d.tools.cli.models import usual_config

MANY = 10  # types of a commit
REFUSED = {
    ("inkling_text", "sp"), ("chameleon", "sp"), ("doge", "sp"), ("t5gemma2", "tp"),
    ("t5gemma2", "packing"),
}  # fmt: skip
AGREE = {  # types that python tests/words.py has tried, whose words are what runs do
    "afmoe", "apertus", "arcee", "aria", "aria_text", "axk1", "axk2", "aya_vision", "bailing_hybrid", "bamba", "bart",
    "beam", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet", "blenderbot",
    "blenderbot-small", "bloom", "camembert", "chameleon", "codegen", "cohere", "cohere2", "cohere2_moe",
    "cohere2_vision", "cohere_compass", "cohere_compass_text", "cosmos3_edge", "cosmos3_omni", "cpmant", "ctrl", "cwm",
    "data2vec-text", "deepseek_ocr2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_vl",
    "deepseek_vl_hybrid", "diffllama", "doge", "dots1", "dots3_note", "dots3_note_text", "electra", "emu3", "ernie",
    "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone4", "exaone4_5", "exaone_moe", "falcon", "falcon_h1",
    "falcon_mamba", "flex_olmo", "flint", "florence2", "fuyu", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm", "glm4", "glm46v",
    "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "glm5_next", "glm_moe_dsa", "glm_ocr", "glmga", "got_ocr2",
    "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite",
    "granite4_vision", "granite_docling", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl", "hy_v3", "hy_v4",
    "hyperclovax", "hyperclovax_vision_v2", "idefics2", "idefics3", "inkling2", "inkling2_text", "inkling_mm_model",
    "inkling_text", "internlm3", "internvl", "iquestcoder", "jais2", "jamba", "janus", "jetmoe", "kimi_k25",
    "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm2_vl", "lfm3", "lfm3_vl", "lighton_ocr", "llama",
    "llama4", "llama4_text", "llava", "llava_next", "llava_next_video", "llava_onevision", "mamba", "mamba2", "marian",
    "mbart", "megatron-bert", "mellum", "mimo_v2_flash", "minicpm3", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
    "minimax", "minimax_m2", "minimax_m3_vl", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mistral3",
    "mistral_large4", "mixtral", "mllama", "modernbert-decoder", "molmo2", "moshi", "moss_transcribe_diarize", "mpt",
    "muse_glimmer", "muse_spark", "mvp", "nanochat", "nemotron", "nemotron_h", "nemotron_h_omni", "olmo", "olmo2",
    "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "ovis2", "paddleocr_vl", "paligemma", "pegasus", "persimmon",
    "phi", "phi3", "phi4_multimodal", "phimoe", "plbart", "pp_chart2table", "prophetnet", "qianfan_ocr", "qwen2",
    "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_thinker", "qwen3_vl",
    "qwen3_vl_moe", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "rwkv", "seed_oss", "shieldgemma2", "smollm3", "smolvlm", "solar_open", "stablelm",
    "starcoder2", "step3p7", "t5gemma2", "trocr", "unlimited_ocr", "vaultgemma", "video_llama_3", "video_llava",
    "vipllava", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "youtu",
    "zamba", "zamba2", "zaya",
}  # fmt: skip


def test_a_short_one(ranks):
    found = words.words_of("lfm2")
    assert words.differences("lfm2", {word: found[word] for word in ("pp", "lora")}, ranks) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(AGREE, key=hashed)[:MANY])
def test_each_word_is_what_a_run_does(ranks, kind):
    """Others for each commit; python tests/words.py tries all."""
    assert kinds_left_out(words.model_of(kind)) == ()
    assert words.differences(kind, words.words_of(kind), ranks) == []


@pytest.mark.long
@pytest.mark.parametrize(("kind", "word"), [
    ("granite_docling", "pp"),  # as many rows of images as a sequence of a trial had tokens
    ("glm5_next", "tp"),  # keys have no rotary part, and of recurrences a plan cut the last matrix alone
    ("inkling_text", "sp"),  # attention has a bias of a rank's rows alone
    ("chameleon", "sp"),  # whose decoder has the images
    ("afmoe", "sp"),  # attention is given its mask by name
    ("doge", "sp"),  # a mask is made of a rank's keys
    ("moshi", "sp"),  # a window of which no mask is made
    ("electra", "pp"),  # a tied head has a bias
    ("t5gemma2", "tp"),  # embeddings are tied in a copy, too
    ("t5gemma2", "packing"),  # labels are a second sequence
    ("qwen3_omni_moe_thinker", "tp"),  # norms of heads
    ("inkling2_text", "packing"),  # convolutions by weights of their own
])  # fmt: skip
def test_what_a_trial_was_wrong_about(ranks, kind, word):
    found = words.words_of(kind)
    assert found[word].supported is ((kind, word) not in REFUSED)
    assert words.differences(kind, {word: found[word]}, ranks) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cohere2_moe", "qwen3_moe"])
def test_a_type_of_experts_is_asked_about_with_a_dense_layer_too(kind):
    assert feed_forward_left_out(build(usual_config(kind))) == ()
