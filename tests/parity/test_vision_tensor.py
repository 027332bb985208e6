"""Models of images and text over tp: the language model is cut as its own plan says, the vision tower is whole."""

import pytest
import torch
import torch.distributed as dist
from tensors import axis, logical_gradients
from test_stages import LiftCasts

from zero3d.distributed.ledger import Ledger
from zero3d.models.bases import language_model
from zero3d.models.images import tower_parameters
from zero3d.tensor_parallel.parallelize import parallelize, read_styles
from zero3d.tools.vision.tiny import micro_batch, tiny_model

SHORT = ("qwen3_vl",)
OTHERS = (
    "aria", "aya_vision", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_vl", "ernie4_5_vl_moe",
    "exaone4_5", "gemma3", "gemma4", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "got_ocr2", "idefics2",
    "idefics3", "internvl", "kimi_k25", "lfm2_vl", "lighton_ocr", "llama4", "llava", "llava_next", "llava_onevision",
    "minimax_m3_vl", "mistral3", "paddleocr_vl", "paligemma", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl",
    "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe", "shieldgemma2", "smolvlm", "video_llama_3", "vipllava",
)  # fmt: skip


IN_FP32 = (  # compute something in fp32, whatever their weights are in
    "ernie4_5_vl_moe", "glm46v", "glm4v", "glm4v_moe", "glmga", "kimi_k25", "minimax_m3_vl",
)  # fmt: skip


def drawn(kind, shift=0.0):
    """A model whose parameters are shifted, in fp64 where it can be."""
    model = tiny_model(kind)
    for p in model.parameters():
        p.data = (p.data + shift).to(torch.float32 if kind in IN_FP32 else torch.float64)
    return model


def step(model, generator):
    """Loss of a micro-batch with an image in each of two rows, and its gradients."""
    batch, dtype = micro_batch(model, generator), next(model.parameters()).dtype
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
    given["labels"][0, :3] = -100
    loss = model(**given, use_cache=False).loss
    loss.backward()
    return loss.detach()


def cut(kind):
    """The same over tp; ranks other than the first begin with other weights."""
    with LiftCasts():
        model = drawn(kind, shift=3.0 * dist.get_rank())
        towers = set(tower_parameters(model).values())
        sharded = parallelize(model, axis(), Ledger())
        loss = step(model, torch.Generator().manual_seed(1))
    return loss, logical_gradients(model, sharded), sorted(towers & sharded.cuts.keys()), len(sharded.cuts)


@pytest.mark.parametrize("kind", [*SHORT, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)])
def test_loss_and_all_gradients_equal_one_process_with_images(ranks, kind):
    with LiftCasts():
        model = drawn(kind)
        wanted = step(model, torch.Generator().manual_seed(1))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    everything = torch.stack([grad.norm() for grad in grads.values()]).norm()
    most = 1e-4 if kind in IN_FP32 else 1e-9
    for loss, found, of_towers, cuts in ranks(2, cut, kind):
        assert abs(float(loss - wanted)) < most
        assert found.keys() == grads.keys()
        assert float(torch.stack([grad.norm() for grad in found.values()]).norm() / everything - 1) < most
        for name, grad in grads.items():
            assert float((found[name] - grad).norm() / grad.norm().clamp_min(1e-4 * everything)) < most, name
        assert of_towers == []
        assert cuts > 8


def test_a_tower_is_cut_only_where_the_users_map_says_so():
    assert read_styles(tiny_model("qwen3_vl"))["model.language_model.layers.0.mlp.down_proj"].kind == "rowwise"
    model = tiny_model("gemma4")
    own = [name for name in read_styles(model) if not name.startswith(f"{language_model(model)}.")]
    assert own == ["lm_head"]
    named = next(name for name, module in model.named_modules() if "vision" in name and type(module) is torch.nn.Linear)
    assert read_styles(model, {named: "colwise_gather_output"})[named].kind == "colwise_gather_output"
