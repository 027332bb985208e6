"""LoRA, frozen parts and mixtures of both from a configuration: plain PyTorch with PEFT, and the same at every stage."""

import warnings

import pytest
import torch
from families import IMAGE, llava
from models import adamw, batch, bits, hf, loss_of, planned_bytes, train_engine, train_masters, train_plain
from peft import LoraConfig, get_peft_model
from pool import RankFailure

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.config import Optimizer, load
from zero3d.models.names import is_named, own_name
from zero3d.models.trained import open_trained
from zero3d.train.setup.optimizer import optimizer_of, parameter_groups

BATCHES = [batch(step) for step in range(3)]
IMAGES = [torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(step)) for step in range(3)]
CLIP = 1e-3
ATTENTION = ["q_proj", "v_proj"]
LINEAR = [*ATTENTION, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {  # model, settings of the file, what PEFT is asked for
    "llama": ("llama", {"lora": {"rank": 4}}, {"target_modules": ATTENTION}),
    "gpt2": ("gpt2", {"lora": {"rank": 2, "alpha": 2, "rslora": True}},
             {"target_modules": ["c_attn"], "lora_alpha": 2, "use_rslora": True}),
    "gaussian": ("llama", {"lora": {"rank": 4, "init": "gaussian"}},
                 {"target_modules": ATTENTION, "init_lora_weights": "gaussian"}),
    "experts": ("qwen3_moe", {"lora": {"rank": 2, "targets": ["experts", "q_proj"]}},
                {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "dora": ("llama", {"lora": {"rank": 4, "dora": True}}, {"target_modules": ATTENTION, "use_dora": True}),
    "mixture": ("llama", {"lora": {"rank": 4, "targets": ["all-linear"], "train_also": ["lm_head", "model.norm"]},
                          "freeze": ["layers.1.mlp"]}, {"target_modules": LINEAR}),
    "frozen": ("qwen3", {"freeze": ["embed_tokens", "*.0.self_attn"]}, None),
    "llava": ("llava", {"lora": {"rank": 4, "train_also": ["multi_modal_projector"]}},
              {"target_modules": r".*language_model.*\.(" + "|".join(LINEAR) + ")"}),
}  # fmt: skip


def with_images(model, ids):
    """The loss of a LLaVA on ids [2, 9], each with an image of four tokens."""
    ids = torch.cat([ids[:, :2], torch.full((2, 4), IMAGE), ids[:, 2:]], dim=1)
    pixels = IMAGES[next(i for i, known in enumerate(BATCHES) if known[:, 0].equal(ids[:, 0]))]
    return model(input_ids=ids, labels=ids, pixel_values=pixels).loss


def folder_of(tmp_path, name):
    """Save a tiny model; return its folder."""
    (llava() if name == "llava" else hf(name)).save_pretrained(tmp_path / name)
    return str(tmp_path / name)


def opened_of(folder, settings):
    """The model of a file as `zero3d train` opens it."""
    return open_trained(load({"model": {"path": folder}, **settings}))


def plain_of(folder, settings, asked):
    """The same by transformers and PEFT alone, with the adapters' first values by name."""
    import transformers

    kind = transformers.AutoModelForImageTextToText if "llava" in folder else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    if asked is not None:
        rank = settings["lora"]["rank"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(model, LoraConfig(**{"r": rank, "lora_alpha": 2 * rank} | asked)).base_model.model
    opened = opened_of(folder, settings)
    shapes = {name: p.shape for name, p in opened.module.named_parameters()}
    also, frozen = settings.get("lora", {}).get("train_also", ()), settings.get("freeze", ())
    for name, p in model.named_parameters():
        p.data = opened.weights(name, tuple((0, size) for size in shapes[name])).clone()
        adapted = asked is not None and "lora_" not in name and not is_named(name, also)
        p.requires_grad_(not adapted and not is_named(name, frozen))
    return model


@pytest.mark.parametrize(("case", "stage"), [("gpt2", 3), ("mixture", 2), ("experts", 3)])
def test_one_rank_equals_plain_pytorch_with_peft_bit_for_bit(tmp_path, case, stage):
    name, settings, asked = CASES[case]
    folder = folder_of(tmp_path, name)
    opened, plain = opened_of(folder, settings), plain_of(folder, settings, asked)
    trained = {name for name, p in opened.module.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in plain.named_parameters() if p.requires_grad}
    options = {"stage": stage, "precision": "fp32", "clip_norm": CLIP, "optimizer": adamw}
    engine = zero3d.Engine(opened.module, weights=opened.weights, **options)
    loss = with_images if name == "llava" else loss_of
    losses, norms = train_plain(plain, [[ids] for ids in BATCHES], clip=CLIP, loss=loss)
    assert train_engine(engine, BATCHES, loss=loss) == (losses, norms, bits(plain.parameters()))
    assert min(norms) > CLIP


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_one_rank_equals_plain_pytorch_with_peft_for_all_pairs(tmp_path, case, stage):
    test_one_rank_equals_plain_pytorch_with_peft_bit_for_bit(tmp_path, case, stage)


def test_gaussian_adapters_have_the_deviation_of_peft_s_and_their_config_says_so(tmp_path):
    settings = {"lora": {"rank": 4, "init": "gaussian", "targets": ["q_proj", "experts"]}}
    opened = opened_of(folder_of(tmp_path, "qwen3_moe"), settings)
    named = [(name, p.shape) for name, p in opened.module.named_parameters() if "lora_" in name]
    values = {name: opened.weights(name, tuple((0, size) for size in shape)) for name, shape in named}
    drawn = torch.cat([each.flatten() for name, each in values.items() if "lora_A" in name])
    assert float(drawn.std()) == pytest.approx(1 / 4, rel=0.05)
    assert float(drawn.abs().max()) > 3 / 4
    assert not any(each.any() for name, each in values.items() if "lora_B" in name)
    assert opened.module.peft_config["default"].init_lora_weights == "gaussian"


@pytest.mark.parametrize(("case", "stage"), [("llama", 3), ("frozen", 1)])
def test_bf16_equals_a_written_out_loop_with_masters_of_what_is_trained(tmp_path, case, stage):
    name, settings, asked = CASES[case]
    folder = folder_of(tmp_path, name)
    opened, plain = opened_of(folder, settings), plain_of(folder, settings, asked)
    engine = zero3d.Engine(opened.module, weights=opened.weights, stage=stage, clip_norm=CLIP, optimizer=adamw)
    losses, norms = train_masters(plain, BATCHES, torch.bfloat16, CLIP)
    assert train_engine(engine, BATCHES) == (losses, norms, bits(plain.parameters()))
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    every = sum(p.numel() for p in plain.parameters())
    weights, _, states = planned_bytes(engine)
    assert (weights, states) == (2 * every, 12 * trained)  # a frozen one has no master


def test_groups_have_their_own_learning_rate_and_the_rest_the_files(tmp_path):
    folder = folder_of(tmp_path, "llama")
    settings = {"lora": {"rank": 4, "train_also": ["model.norm", "lm_head"]}}
    choice = Optimizer(lr=1e-2, groups=({"match": "lm_head", "lr": 1e-4}, {"match": "*lora_B*", "lr": 1e-1}))
    opened, plain = opened_of(folder, settings), plain_of(folder, settings, {"target_modules": ATTENTION})
    named = [(name, p) for name, p in plain.named_parameters() if p.requires_grad]
    by_hand = [
        {"params": [p for name, p in named if name == "model.norm.weight"], "weight_decay": 0.0},
        {"params": [p for name, p in named if "lora_A" in name]},
        {"params": [p for name, p in named if "lm_head" in name], "lr": 1e-4},
        {"params": [p for name, p in named if "lora_B" in name], "lr": 1e-1},
    ]
    make = optimizer_of(choice)
    engine = zero3d.Engine(
        opened.module, weights=opened.weights, stage=2, precision="fp32", clip_norm=CLIP, optimizer=make,
        param_groups=parameter_groups(opened.module, choice),
    )  # fmt: skip
    losses, norms = train_plain(plain, [[ids] for ids in BATCHES], clip=CLIP, make=lambda _: make(by_hand))
    assert train_engine(engine, BATCHES) == (losses, norms, bits(plain.parameters()))
    assert engine.optimizer.torch.param_groups[0]["lr"] == 1e-2  # what metrics show


# --- more ranks -----------------------------------------------------------------------------------


def trained_on_ranks(folder, settings, stages, activations, options):
    """For every stage: (losses and norms of two steps of two micro-batches, a hash of the weights)."""
    import torch.distributed as dist

    rank, found = (dist.get_rank(), []) if dist.is_initialized() else (0, [])
    for stage in stages:
        opened = opened_of(folder, settings)
        recompute(opened.module, activations)
        engine = zero3d.Engine(
            opened.module, weights=opened.weights, stage=stage, precision="fp32", clip_norm=CLIP, optimizer=adamw,
            reduce="every_step", release="every_use", **options,
        )  # fmt: skip
        steps = []
        for step in range(2):
            micro = [{"input_ids": (ids := batch(step, 2 * part + rank)), "labels": ids} for part in range(2)]
            steps += [float(engine.train_batch(micro)), float(engine.last_step.grad_norm)]
        with engine.full_params():
            found.append((steps, bits(engine.module.parameters())))
    return found


def whole_batch(folder, settings):
    """The same on one process over all micro-batches."""
    opened = opened_of(folder, settings)
    engine = zero3d.Engine(
        opened.module, weights=opened.weights, stage=0, precision="fp32", clip_norm=CLIP, optimizer=adamw,
        reduce="every_step",
    )  # fmt: skip
    steps = []
    for step in range(2):
        micro = [{"input_ids": (ids := batch(step, part)), "labels": ids} for part in range(4)]
        steps += [float(engine.train_batch(micro)), float(engine.last_step.grad_norm)]
    return steps


@pytest.mark.parametrize(("case", "activations", "stages", "options"), [
    ("mixture", "selective", (1, 3), {"exact": True}),
    *(pytest.param(*each, marks=pytest.mark.long) for each in (
        ("mixture", "selective", range(4), {"exact": True}), ("llama", "full", range(4), {}),
        ("experts", "full", (0, 3), {}), ("gpt2", "none", range(4), {"exact": True}),
        ("dora", "full", (0, 3), {}), ("frozen", "every:2", range(4), {"exact": True}),
    )),
])  # fmt: skip
def test_stages_on_two_ranks_are_bitwise_equal_and_like_one_process(
    ranks, tmp_path, case, activations, stages, options
):
    name, settings, _ = CASES[case]
    folder = folder_of(tmp_path, name)
    wanted = ranks(1, whole_batch, folder, settings)[0]
    for found in ranks(2, trained_on_ranks, folder, settings, stages, activations, options):
        assert all(each == found[0] for each in found)
        assert found[0][0] == pytest.approx(wanted, rel=1e-5)


# --- which, and what is wrong -----------------------------------------------------------------------


def test_adapters_start_by_seed_and_name_whatever_box_is_read(tmp_path):
    folder = folder_of(tmp_path, "llama")
    one, other = (opened_of(folder, {"lora": {"rank": 4}, "seed": seed}) for seed in (1, 2))
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    whole = one.weights(name, ((0, 4), (0, 32)))
    assert one.weights(name, ((1, 3), (5, 9))).equal(whole[1:3, 5:9])
    assert not other.weights(name, ((0, 4), (0, 32))).equal(whole)
    assert not one.weights(name.replace("lora_A", "lora_B"), ((0, 32), (0, 4))).any()
    assert whole.abs().max() <= 32**-0.5
    assert own_name("model.layers.0.self_attn.q_proj.base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(("settings", "words"), [
    ({"lora": {"rank": 4, "targets": ["qproj"]}}, "lora.targets: 'qproj' names nothing .* Did you mean q_proj"),
    ({"lora": {"rank": 4, "targets": ["norm", "q_proj"]}}, "'norm' names modules that cannot have an adapter, such as a L"),
    ({"lora": {"rank": 4, "targets": ["All-Linear", "q_proj"]}}, "all-linear must be the only entry"),
    ({"lora": {"rank": 4, "targets": ["qproj", "vproj"]}}, "'qproj' names nothing .* Did you mean q_proj"),
    ({"lora": {"rank": 4, "train_also": ["lm_haed"]}}, "lora.train_also: .* Did you mean lm_head"),
    ({"lora": {"rank": 4, "targets": ["lm_head"], "train_also": ["lm_head"]}}, "all that lm_head names is in"),
    ({"lora": {"alpha": 4}}, "without lora.rank there are none"),
    ({"freeze": ["tower"]}, "freeze: 'tower' names nothing"),
    ({"freeze": ["model", "lm_head"]}, "nothing is left to train"),
])  # fmt: skip
def test_names_that_fit_nothing_are_told_with_what_there_is(tmp_path, settings, words):
    with pytest.raises(zero3d.ConfigError, match=words):
        opened_of(folder_of(tmp_path, "llama"), settings)


def test_a_target_that_names_nothing_beside_others_is_left_out_with_a_warning(tmp_path):
    folder = folder_of(tmp_path, "llama")
    with pytest.warns(UserWarning, match=r"lora\.targets: 'vproj' names nothing .* Did you mean v_proj.* left out"):
        opened = opened_of(folder, {"lora": {"rank": 4, "targets": ["q_proj", "vproj"]}})
    adapted = {name.split(".")[4] for name, _ in opened.module.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj"}


def cut(folder, settings):
    opened = opened_of(folder, settings)
    zero3d.Engine(opened.module, weights=opened.weights, mesh=zero3d.Mesh(tp=2))


@pytest.mark.long
def test_adapters_of_stacked_experts_are_refused_over_tp(ranks, tmp_path):
    model = hf("qwen3_moe")
    model.resize_token_embeddings(pad_to_multiple_of=2)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(RankFailure, match=r"ConfigError: .*experts has LoRA on stacked experts, .* use mesh\.tp=1"):
        ranks(2, cut, str(tmp_path / "model"), {"lora": {"rank": 2, "targets": ["experts"]}})


def test_a_group_that_matches_nothing_that_is_trained_is_refused():
    choice = Optimizer(groups=({"match": "projector", "lr": 1e-5},))
    with pytest.raises(zero3d.ConfigError, match=r"optimizer\.groups: 'projector' names nothing"):
        parameter_groups(hf("llama"), choice)
