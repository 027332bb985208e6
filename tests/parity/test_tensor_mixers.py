"""Mixers of hybrids cut over tp ranks: each has its heads' channels, and computes what one process computes."""

import pytest
import torch
from models import adamw
from safetensors.torch import load_file
from tensors import assert_near, cut_model, logical_gradients, one_process, step, tiny
from test_stages import LiftCasts
from torch.utils.flop_counter import FlopCounterMode

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.engine.traffic_formulas import SessionCounts, planned_model_group, planned_tensor
from zero3d.errors import ConfigError
from zero3d.tensor_parallel.parallelize import parallelize
from zero3d.train.traffic import TrainingTraffic, by_operation

ONE_GROUP = {"n_groups": 1}


def local(name, options):
    """fp64 throughout, as the oracle."""
    with LiftCasts():
        model, sharded, _ = cut_model(name, **options)
        loss = step(model, options.get("policy", "none"))
    return loss, logical_gradients(model, sharded), sum(p.numel() for p in model.parameters())


def assert_equal_one_process(results, name, options):
    with LiftCasts():
        loss, grads = one_process(name, **{k: v for k, v in options.items() if k not in ("sequence", "plan")})
    least = 1e-6 * torch.stack([grad.norm() for grad in grads.values()]).norm()
    for value, joined, _ in results:
        assert abs(float(value - loss)) < 1e-12
        assert joined.keys() == grads.keys()
        for key, grad in grads.items():
            assert float((joined[key] - grad).norm() / grad.norm().clamp_min(least)) < 1e-12, key


FALCON = {"mamba_rms_norm": True, "ssm_multipliers": [0.5, 1.5, 0.7, 1.1, 2.0]}


ZAMBA = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_key_value_heads": 4}  # one block, twice


@pytest.mark.parametrize(("name", "world", "options"), [
    ("mamba2", 2, ONE_GROUP), ("qwen3_5_text", 2, {}), ("kimi_linear", 2, {}),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("bailing_hybrid", 2, {}), ("kimi_linear", 4, {"q_lora_rank": 8}),
        ("bailing_hybrid", 2, {"sequence": True, "layer_types": ["linear_attention"] * 2}),
        ("next", 2, {}), ("olmo_hybrid", 2, {}), ("qwen3_5_moe_text", 2, {}), ("qwen3_5_text", 2, {"sequence": True}),
        ("qwen3_5_text", 4, {"linear_num_key_heads": 4, "num_key_value_heads": 4}),
        ("qwen3_5_text", 2, {"lora": {"target_modules": ["in_proj_qkv", "in_proj_a", "out_proj"]}}),
        ("mamba2", 2, {}), ("mamba2", 4, {}), ("mamba2", 2, ONE_GROUP | {"sequence": True}),
        ("bamba", 2, {"sequence": True}), ("granitemoehybrid", 2, {}), ("nemotron_h", 2, {}),
        ("nemotron_h", 4, {"num_key_value_heads": 4}), ("nemotron_h", 2, {"n_groups": 1, "sequence": True}),
        ("falcon_h1", 2, {"mamba_n_groups": 2} | FALCON), ("falcon_h1", 4, {"mamba_n_groups": 2, "num_key_value_heads": 4} | FALCON),
        ("falcon_h1", 2, {"mamba_norm_before_gate": False} | FALCON),
        ("zamba2", 2, ZAMBA), ("zamba2", 2, ZAMBA | {"mamba_ngroups": 2, "use_shared_attention_adapter": True}),
    )),
])  # fmt: skip
def test_loss_and_gradients_equal_one_process_in_float64(ranks, name, world, options):
    results = ranks(world, local, name, options)
    assert_equal_one_process(results, name, options)


NORMS = ("norm.weight", "layernorm.weight", "norm_f.weight")  # of blocks, and of every head


@pytest.mark.parametrize(("name", "tp"), [("mamba2", 2), ("mamba2", 4), ("qwen3_5_text", 2), ("next", 2)])
def test_every_weight_but_norms_of_blocks_falls_by_the_degree(name, tp):
    model = tiny(name).to("meta")
    shapes = {key: p.numel() for key, p in model.named_parameters()}
    cuts = parallelize(model, Axis("tp", tp - 1, tp), Ledger()).cuts
    kept = {key for key, p in model.named_parameters() if p.numel() * tp != shapes[key]}
    assert kept == shapes.keys() - cuts.keys()
    assert all(key.endswith(NORMS) and ".mixer." not in key for key in kept), kept


def test_groups_that_do_not_go_on_the_ranks_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"mixer: B and C of 3 groups do not go on tp=2 ranks"):
        parallelize(tiny("mamba2", n_groups=3, num_heads=6, hidden_size=24).to("meta"), Axis("tp", 0, 2), Ledger())


LATENT = {"layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 4, "moe_latent_size": 16, "n_group": 2,
          "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 32}  # fmt: skip


def test_latent_experts_send_rows_of_their_own_width():
    regions = parallelize(tiny("nemotron_h", **LATENT).to("meta"), Axis("tp", 0, 2), Ledger()).regions
    widths = {(region.forward, region.backward): region.width for region in regions if region.name.endswith(".experts")}
    assert widths == {("", "all_reduce"): 2, ("all_reduce", ""): 16}  # weights of two experts a token, last


def test_heads_of_attention_in_a_mixer_of_any_name_are_not_cut_in_two():
    with pytest.raises(ConfigError, match="num_key_value_heads=2: 2 / 4 is not a whole number"):
        parallelize(tiny("nemotron_h").to("meta"), Axis("tp", 0, 4), Ledger())


# --- arithmetic, counted ----------------------------------------------------------------------------


def operations(mixer):
    """Those of products, and of convolutions: of a forward, for torch counts a convolution's backward without groups."""
    with FlopCounterMode(display=False) as counted:
        mixer(torch.randn(2, 8, 32))
    of = {str(op): flops for op, flops in counted.get_flop_counts()["Global"].items()}
    convolved = of.pop("aten.convolution")
    return sum(of.values()), convolved


def counted(name, where, options):
    """What one mixer computes: in one process and on this rank."""
    whole = operations(tiny(name, **options).get_submodule(where))
    return whole, operations(cut_model(name, dtype=torch.float32, **options)[0].get_submodule(where))


@pytest.mark.long
@pytest.mark.parametrize(("name", "where", "options", "extra"), [
    ("mamba2", "backbone.layers.0.mixer", {}, 0),
    ("qwen3_5_text", "model.layers.0.linear_attn", {}, 0),
    ("bailing_hybrid", "model.layers.0.self_attn", {}, 0),
    ("mamba2", "backbone.layers.0.mixer", ONE_GROUP, 8 / 80),  # B and C: 16 of 80 channels, on both ranks
])  # fmt: skip
def test_arithmetic_falls_by_the_degree_but_for_filters_of_shared_groups(ranks, name, where, options, extra):
    for whole, part in ranks(2, counted, name, where, options):
        assert part[0] * 2 == whole[0]
        assert part[1] == round(whole[1] * (0.5 + extra))


# --- engines ----------------------------------------------------------------------------------------

M, STEPS, ROWS, LENGTH = 2, 2, 4, 8


def engine_steps(name, mesh, options, folder):
    """Losses and norms, what was sent over tp, and the formula of it; exports what was trained."""
    model = tiny(name, lora=options.get("lora", False), **options.get("sizes", {}))
    if "policy" in options:
        recompute(model, options["policy"])
    engine = zero3d.Engine(
        model, optimizer=adamw, mesh=zero3d.Mesh(**mesh), accumulate=M, clip_norm=0.5,
        stage=options.get("stage", 1), precision="fp32", sequence_parallel=options.get("sequence", False),
    )  # fmt: skip
    counted = TrainingTraffic(engine)
    random = torch.Generator().manual_seed(3)
    dp, place = mesh.get("dp", 1), engine.mesh.place.dp
    found = []
    for _ in range(STEPS):
        rows = [torch.randint(3, 60, (ROWS, LENGTH), generator=random).chunk(dp)[place] for _ in range(M)]
        loss = engine.train_batch([{"input_ids": own, "labels": own, "use_cache": False} for own in rows])
        found += [float(loss), float(engine.last_step.grad_norm)]
    done = SessionCounts(STEPS, 0, M, STEPS * M * ROWS // dp * LENGTH)
    planned = by_operation([*planned_tensor(engine._parts, done), *planned_model_group(engine._parts, STEPS)])
    sent = by_operation(e for e in counted.entries() if e.axis in ("tp", "replica") and any(e.moved))
    engine.export(folder)
    return found, sent, planned


def assert_engines_agree(ranks, tmp_path, name, mesh, options):
    world = mesh["tp"] * mesh.get("pp", 1) * mesh.get("dp", 1)
    plain = {key: value for key, value in options.items() if key in ("sizes", "lora")}
    ((wanted, *_),) = ranks(1, engine_steps, name, {}, plain, str(tmp_path / "one"))
    for found, sent, planned in ranks(world, engine_steps, name, mesh, options, str(tmp_path / "cut")):
        assert found == pytest.approx(wanted, rel=2e-5)
        assert sent == planned
    cut, one = ({key: t for file in (tmp_path / way).glob("*.safetensors") for key, t in load_file(file).items()}
                for way in ("cut", "one"))  # fmt: skip
    assert_near(cut, one, 1e-4, rate=1e-2)


@pytest.mark.parametrize(("name", "mesh", "options"), [
    ("mamba2", {"tp": 2}, {"sizes": ONE_GROUP, "policy": "selective"}),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("mamba2", {"tp": 2}, {"sizes": ONE_GROUP, "policy": "full"}), ("falcon_h1", {"tp": 2}, {"sizes": FALCON, "policy": "selective"}),
        ("mamba2", {"tp": 2, "dp": 2}, {"sizes": ONE_GROUP, "policy": "selective", "stage": 3}),
        ("qwen3_5_text", {"tp": 2}, {"policy": "full", "stage": 2}), ("qwen3_5_text", {"tp": 2, "pp": 2}, {"sequence": True}),
        ("qwen3_5_moe_text", {"tp": 2, "dp": 2}, {"stage": 3}), ("olmo_hybrid", {"tp": 2}, {}),
        ("kimi_linear", {"tp": 2, "dp": 2}, {"stage": 3, "policy": "full"}), ("bailing_hybrid", {"tp": 2, "pp": 2}, {}),
        ("bailing_hybrid", {"tp": 2}, {"sequence": True, "sizes": {"layer_types": ["linear_attention"] * 2}}),
        ("mamba2", {"tp": 2, "dp": 2}, {"stage": 3}), ("mamba2", {"tp": 2, "pp": 2}, {"sizes": ONE_GROUP}),
        ("mamba2", {"tp": 2}, {"sizes": ONE_GROUP, "lora": {"target_modules": ["in_proj"]}}),
        ("nemotron_h", {"tp": 2, "dp": 2}, {"stage": 2, "sizes": {"n_groups": 1}}),
        ("nemotron_h", {"tp": 2, "dp": 2}, {"sizes": LATENT}), ("zamba2", {"tp": 2}, {"sizes": ZAMBA}),
        ("zamba2", {"tp": 2, "dp": 2}, {"sizes": ZAMBA, "stage": 3, "policy": "full"}),
        ("bamba", {"tp": 2}, {"sequence": True, "stage": 3}), ("falcon_h1", {"tp": 2}, {"sizes": FALCON}),
    )),
])  # fmt: skip
def test_engines_train_as_one_process_and_send_what_the_formula_says(ranks, tmp_path, name, mesh, options):
    assert_engines_agree(ranks, tmp_path, name, mesh, options)
