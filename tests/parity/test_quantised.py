"""Adapters beside a base of 8 and 4 bits: the losses of the decoded base in bf16, bit for bit; bytes, saves, exports."""

import json
from collections import Counter
from dataclasses import replace
from math import prod
from unittest import mock

import pytest
import torch
from bases import base_folder
from models import adamw, batch, train_engine
from pool import RankFailure
from safetensors.torch import load_file
from tensors import tiny

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.config import Lora, Model, load
from zero3d.distributed.ledger import Ledger
from zero3d.errors import CheckpointError, ReleasedParameterError
from zero3d.models.codecs import CODECS, packed_of
from zero3d.models.load import FileWeights
from zero3d.models.quantised import QuantisedLinear, find_layers
from zero3d.models.quantised_experts import Stack, stacks_of
from zero3d.models.trained import open_trained
from zero3d.optim import adamw8bit
from zero3d.precision import to_compute
from zero3d.spec.formats import FORMATS
from zero3d.tensor_parallel.parallelize import parallelize
from zero3d.tools.plan.kernels import digest
from zero3d.tools.plan.memory import memory
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim.model_spec import open_spec, outline
from zero3d.tools.sim.stand_ins import SilentAxis

BATCHES = [batch(step) for step in range(3)]
LORA = {"rank": 4, "targets": ["all-linear"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return base_folder(tmp_path_factory.mktemp("base") / "llama", intermediate_size=96)


def opened_of(folder, name="nf4", **lora):
    """A folder's model with adapters, in a format; None: as it is."""
    return open_trained(load({"model": {"path": str(folder), "quantize": name}, "lora": LORA | lora}))


class Decoded:
    """The weights of a plain model whose matrices are what a quantised one's decode to."""

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, name, box):
        return self.weights.decoded(name, box)


def decoded_of(folder, name="nf4", **lora):
    """The same in bf16 all over: its matrices are what those of the format decode to."""
    plain, packed = opened_of(folder, None, **lora), opened_of(folder, name, **lora)
    return replace(plain, weights=packed.weights.over(Decoded(packed.weights.source)))


def engine_of(opened, **options):
    return zero3d.Engine(opened.module, weights=opened.weights, **{"clip_norm": 1e-3, "optimizer": adamw, **options})


def trained(opened, recomputed="none", **options):
    """Losses and norms of three steps."""
    recompute(opened.module, recomputed)
    return train_engine(engine_of(opened, **options), BATCHES)[:2]


@pytest.mark.parametrize(("name", "stage", "lora", "options"), [
    ("nf4", 3, {"dora": True}, {}), ("int8", 3, {"dropout": 0.1}, {}), ("fp8", 2, {}, {}),
    ("nf4", 3, {"train_also": ["model.norm"]}, {"recomputed": "full"}), ("nf4", 3, {}, {"offload": "cpu"}),
    ("nf4", 3, {}, {"autocast": True, "recomputed": "full"}),
    *(pytest.param(name, stage, {}, {}, marks=pytest.mark.long) for name in FORMATS for stage in range(4)),
])  # fmt: skip
def test_losses_are_those_of_adapters_on_the_decoded_base(folder, name, stage, lora, options):
    offload = {"optimizer": "host", "params": "host"} if options.get("offload") else {}
    kept = {key: value for key, value in options.items() if key != "offload"}
    made = []
    for opened in (opened_of(folder, name, **lora), decoded_of(folder, name, **lora)):
        torch.manual_seed(3)
        made.append(trained(opened, stage=stage, **kept, **({"offload": zero3d.Offload(**offload)} if offload else {})))
    assert made[0] == made[1]
    assert made[0][0][0] != made[0][0][-1]


def on_ranks(folder, stages):
    found = []
    for stage in stages:
        for opened in (opened_of(folder), decoded_of(folder)):
            found.append(trained(opened, stage=stage))
    return found


def test_stages_on_two_ranks_have_the_bits_of_one_another_and_of_the_decoded_base(ranks, folder):
    found, other = ranks(2, on_ranks, str(folder), (1, 3))
    assert found == other
    assert all(each == found[0] for each in found)


def over_tp(folder, name, recomputed="none"):
    """Steps of both bases, cut over two tp ranks, and bytes of the quantised one's weights."""
    found, held = [], []
    for opened in (opened_of(folder, name), decoded_of(folder, name)):
        recompute(opened.module, recomputed)
        engine = engine_of(opened, mesh=zero3d.Mesh(tp=2), stage=3)
        held += [entry.measured for entry in engine.memory if entry.category == "parameters"]
        found.append(train_engine(engine, BATCHES)[:2])
    return found, held[0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["nf4", "fp8"])
def test_matrices_are_cut_over_tp_at_borders_of_groups(ranks, tmp_path, name):
    wide = 128 if name == "nf4" else 256
    folder = base_folder(tmp_path / "wide", hidden_size=wide, intermediate_size=2 * wide, num_key_value_heads=4)
    for (packed, decoded), _ in ranks(2, over_tp, str(folder), name):
        assert packed == decoded


MICRO_BATCHES = 4  # of a step, over all ranks


def curve(engine):
    """Losses and norms of two steps over one list of micro-batches, which ranks share out as exact mode numbers them."""
    n, rank = engine.dp.size, engine.dp.rank
    own = MICRO_BATCHES // n
    together = engine.policy.reduce == "every_micro_batch"
    numbers = [k * n + rank if together else rank * own + k for k in range(own)]
    found = []
    for step in range(2):
        given = [{"input_ids": ids, "labels": ids} for ids in (batch(10 * step + number) for number in numbers)]
        found.append((float(engine.train_batch(given)).hex(), float(engine.last_step.grad_norm).hex()))
    return found


def with_more(folder, mesh, options):
    """Curves of both bases with something else beside them."""
    found, lora = [], options.get("lora", {})
    for number, opened in enumerate((opened_of(folder, **lora), decoded_of(folder, **lora))):
        more = {key: value for key, value in options.items() if key != "lora"}
        if directory := more.pop("directory", None):
            more["offload"] = {"optimizer": "disk", "params": "disk", "directory": f"{directory}/{number}"}
        if more.pop("eight", False):
            more["optimizer"] = adamw8bit(1e-2)
        dp = torch.distributed.get_world_size() // mesh.get("pp", 1)
        engine = engine_of(opened, mesh=zero3d.Mesh(**mesh), accumulate=MICRO_BATCHES // dp, **more)
        found.append(curve(engine))
    return found


@pytest.mark.parametrize(("world", "mesh", "options"), [
    (2, {"pp": 2}, {"stage": 3}), (1, {}, {"directory": "disk"}),
    (1, {}, {"eight": True, "lora": {"dora": True, "rslora": True, "train_also": ["model.embed_tokens"]}}),
    pytest.param(2, {"pp": 2}, {"stage": 1, "schedule": "zero-bubble"}, marks=pytest.mark.long),
    pytest.param(2, {}, {"eight": True, "stage": 2, "master": "split"}, marks=pytest.mark.long),
    pytest.param(1, {}, {"compile": "aot_eager"}, marks=pytest.mark.long),
])  # fmt: skip
def test_what_else_a_run_has_changes_no_bit(ranks, folder, tmp_path, world, mesh, options):
    if "directory" in options:
        options = options | {"directory": str(tmp_path)}
    if "schedule" in options:
        folder = base_folder(tmp_path / "deep", layers=4)
    for packed, decoded in ranks(world, with_more, str(folder), mesh, options):
        assert packed == decoded


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return base_folder(tmp_path_factory.mktemp("base") / "moe", "moe")


def of_experts(folder, stages, mesh, name):
    """Curves of both bases at some stages."""
    found = []
    for stage in stages:
        for opened in (opened_of(folder, name), decoded_of(folder, name)):
            engine = engine_of(opened, stage=stage, mesh=zero3d.Mesh(**mesh), accumulate=2)
            found.append(curve(engine))
    return found


@pytest.mark.parametrize(("name", "stages", "mesh"), [
    ("nf4", (3,), {"ep": 2}),
    *(pytest.param(name, (0, 3), mesh, marks=pytest.mark.long) for name in FORMATS for mesh in ({}, {"ep": 2})),
])  # fmt: skip
def test_experts_that_are_packed_one_by_one_have_the_bits_of_decoded_ones(ranks, mixture, name, stages, mesh):
    for found in ranks(2, of_experts, str(mixture), stages, mesh, name):
        assert all(each == found[0] for each in found)


def stacks_in(opened):
    """Stacks of experts in groups, by name, and how each is packed."""
    named = opened.module.named_modules()
    return {f"{name}.{key}": stack for name, module in named for key, stack in stacks_of(module).items()}


def test_stacked_experts_take_the_bytes_of_the_formula_and_are_exported_as_they_were(mixture, tmp_path):
    opened = opened_of(mixture)
    stacks = stacks_in(opened)
    nbytes = {name: opened.module.get_parameter(name).numel() for name in stacks}
    assert nbytes == {name: 4 * FORMATS["nf4"].nbytes(stack.shape) for name, stack in stacks.items()}
    assert len(stacks) == 4
    engine = engine_of(opened, stage=3)
    train_engine(engine, BATCHES[:1])
    merged, whole = (
        load_file(each / "model.safetensors") for each in (engine.export(tmp_path / "m", "merged"), mixture)
    )
    names = [name for name in merged if ".experts." in name]
    assert len(names) == 2 * 4 * 3
    assert all(merged[name].equal(to_compute(whole[name], torch.bfloat16)) for name in names)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_blocks_that_are_recomputed_run_packed_experts_once_more(mixture, stage):
    found = [trained(opened, how, stage=stage) for opened, how in (
        (opened_of(mixture), "none"), (opened_of(mixture), "full"), (opened_of(mixture), "every:2"), (decoded_of(mixture), "full"),
    )]  # fmt: skip
    assert all(each == found[0] for each in found)


@pytest.mark.long
def test_a_run_on_stacked_experts_goes_on_where_it_was(mixture, tmp_path):
    engine = engine_of(opened_of(mixture), stage=3)
    train_engine(engine, BATCHES[:1])
    step = engine.save(tmp_path)
    wanted = train_engine(engine, BATCHES[1:])[:2]
    again = engine_of(opened_of(mixture), stage=0)
    again.load(step)
    assert train_engine(again, BATCHES[1:])[:2] == wanted
    saved = [name for file in step.glob("*.safetensors") for name in load_file(file)]
    assert saved
    assert not any(".experts." in name for name in saved)


@pytest.mark.parametrize(("name", "shape"), [("nf4", (3, 128)), ("nf4", (7, 9)), ("nf4", (8, 24)), ("int8", (5, 7)),
    ("fp8", (128, 40)), ("fp8", (130, 40)), ("nf4-double", (6, 64))])  # fmt: skip
def test_experts_decode_together_as_each_does_alone(name, shape):
    stack = Stack(CODECS[name], shape, torch.bfloat16)
    weights = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    packed = torch.stack([packed_of(stack.codec, each) for each in weights])
    wanted = [stack.codec.decode(each, shape, torch.bfloat16) for each in packed]
    assert stack.decode(packed, torch.bfloat16).equal(torch.stack(wanted))


@pytest.mark.parametrize("name", [pytest.param("nf4", marks=pytest.mark.long), "nf4-double"])
def test_a_plan_knows_what_stacked_experts_are_packed_from(mixture, name):
    packed, plain = (outline(opened_of(mixture, how).module, 32) for how in (name, None))
    own, other = (digest(spec).shapes[1].stack for spec in (packed, plain))
    assert own.packed == own.elements == other.elements
    assert (own.share, own.trainable, other.packed) == (other.share, False, 0)
    assert packed.weights == plain.params


def test_experts_with_adapters_of_their_own_keep_the_compute_dtype(mixture):
    names = stacks_in(opened_of(mixture, targets=["q_proj", "layers.0.mlp.experts.down_proj"]))
    assert {name.split(".")[2] for name in names} == {"1"}


def wide_mixture(folder, width=128, inner=128):
    """Attention that tp 2 can cut at borders of groups, and experts that it can where `inner` allows it."""
    heads = {"num_key_value_heads": 4, "head_dim": width // 4}
    return base_folder(folder, "moe", hidden_size=width, moe_intermediate_size=inner, **heads)


@pytest.mark.parametrize(("name", "recomputed"), [
    ("nf4", "none"), *(pytest.param(name, "full", marks=pytest.mark.long) for name in ("nf4", "fp8")),
])  # fmt: skip
def test_stacked_experts_are_cut_over_tp_at_borders_of_groups(ranks, tmp_path, name, recomputed):
    wide = 128 if name == "nf4" else 256
    folder = wide_mixture(tmp_path / "wide", wide, wide)
    for (packed, decoded), _ in ranks(2, over_tp, str(folder), name, recomputed):
        assert packed == decoded


@pytest.mark.long
def test_a_plan_has_the_bytes_of_experts_that_are_cut_over_tp(ranks, tmp_path):
    folder = str(wide_mixture(tmp_path / "wide"))
    spec = open_spec(folder, 32, Model(quantize="nf4"), Lora(4, targets=("all-linear",)))
    planned = memory(spec, ParallelPlan(tp=2, stage=3, quantize="nf4")).parts["parameters"]
    assert [held for _, held in ranks(2, over_tp, folder, "nf4")] == [planned] * 2


def merged_over_tp(folder, output):
    """A step of a mixture over tp, from whose export rank 0 has the names of experts that are not those of the folder."""
    engine = engine_of(opened_of(folder), mesh=zero3d.Mesh(tp=2), stage=3)
    train_engine(engine, BATCHES[:1])
    merged = load_file(engine.export(output, "merged") / "model.safetensors")
    whole = load_file(f"{folder}/model.safetensors")
    experts = [name for name in merged if ".experts." in name]
    return [name for name in experts if not merged[name].equal(to_compute(whole[name], torch.bfloat16))], len(experts)


@pytest.mark.long
def test_experts_that_are_cut_over_tp_are_exported_as_they_were(ranks, tmp_path):
    others, experts = ranks(2, merged_over_tp, str(wide_mixture(tmp_path / "wide")), str(tmp_path / "merged"))[0]
    assert (others, experts) == ([], 2 * 4 * 3)


@pytest.mark.parametrize(("name", "inner", "words"), [
    ("nf4", 64, r"down_proj: tp cannot cut 64 columns .* nf4 into 2 parts at borders of its groups of 64"),
    ("fp8", 128, r"gate_up_proj: tp cannot cut 256 rows .* fp8 into 4 parts at borders of its groups of 128"),
])  # fmt: skip
def test_a_cut_through_groups_of_experts_is_refused(tmp_path, name, inner, words):
    opened = opened_of(wide_mixture(tmp_path / "wide", 256, inner), name)
    with pytest.raises(zero3d.ConfigError, match=words):
        parallelize(opened.module, SilentAxis("tp", 0, 2), Ledger())


@pytest.mark.long
def test_exact_mode_has_the_same_bits_at_any_dp(ranks, folder):
    found = [ranks(n, with_more, str(folder), {}, {"exact": True}) for n in (1, 2)]
    assert found[0][0][0] == found[0][0][1]
    assert all(each == found[0][0] for each in found[1])


@pytest.mark.parametrize(("name", "words"), [
    ("nf4", r"q_proj: tp cannot cut the rows .* over the end of a row"), ("int8", r"o_proj: tp cannot cut the columns of .* in int8, whose scales are of rows"),
])  # fmt: skip
def test_a_cut_through_groups_is_refused(ranks, folder, name, words):
    with pytest.raises(RankFailure, match=words):
        ranks(2, over_tp, str(folder), name)


@pytest.mark.parametrize(("name", "stage"), [("nf4", 0), ("nf4", 3), ("nf4-double", 3)])
def test_bytes_are_those_of_the_formula(folder, name, stage):
    opened = opened_of(folder, name)
    layers = [module for module in opened.module.modules() if isinstance(module, QuantisedLinear)]
    others = sum(p.numel() for p in opened.module.parameters() if p.dtype != torch.uint8)
    packed = sum(FORMATS[name].nbytes(layer.shape) for layer in layers)
    engine = engine_of(opened, stage=stage)
    (weights,) = [entry for entry in engine.memory if entry.category == "parameters"]
    assert weights.measured == weights.planned == packed + 2 * others
    assert len(layers) == 14
    sizes = [layer.in_features * layer.out_features for layer in layers]
    assert all(size <= 64 * 256 for size in sizes)  # one group of maxima each
    assert packed == {"nf4": sum(sizes) * 9 // 16, "nf4-double": sum(sizes) * 33 // 64 + 8 * len(layers)}[name]


@pytest.mark.parametrize(
    "name", ["nf4", pytest.param("nf4-double", marks=pytest.mark.long), pytest.param("int8", marks=pytest.mark.long)]
)
def test_a_plan_has_the_bytes_of_the_engine(folder, name):
    spec, plain = (
        open_spec(str(folder), 32, Model(quantize=how), Lora(4, targets=("all-linear",))) for how in (name, None)
    )
    engine = engine_of(opened_of(folder, name), stage=3)
    held = {entry.category: entry.measured for entry in engine.memory}
    planned = memory(spec, ParallelPlan(stage=3, quantize=name)).parts
    for category in ("parameters", "optimizer"):
        assert planned[category] == held[category]
    assert spec.weights == plain.params
    assert digest(spec).width < 2 == digest(plain).width
    assert frozen(spec) == frozen(plain)


def frozen(spec):
    """How many frozen matrices of each shape the first block has."""
    found = Counter()
    for matrix in digest(spec).shapes[1].matrices:
        found[matrix.shape] += 0 if matrix.trainable else matrix.many
    return found


def weights_read(folder):
    """Elements of quantised matrices that this rank reads as its engine is built, those of the longest box, and all."""
    read, opened, plain = [], opened_of(folder), FileWeights.__call__

    def reading(self, name, box):
        values = plain(self, name, box)
        read.append(values.numel() * ("_proj.weight" in name))
        return values

    shapes = [m.shape for m in opened.module.modules() if isinstance(m, QuantisedLinear)]
    with mock.patch.object(FileWeights, "__call__", reading):
        engine_of(opened, stage=3)
    return sum(read), max(read), sum(rows * columns for rows, columns in shapes)


def test_a_rank_reads_its_own_slice_of_a_base_a_matrix_at_most_at_once(ranks, tmp_path):
    folder = base_folder(tmp_path / "wide", hidden_size=64, intermediate_size=256)
    shares = ranks(2, weights_read, str(folder))
    for share, longest, everything in shares:
        assert share < 0.75 * everything  # the rest of the second slice is padding
        assert longest <= 64 * 256
    assert shares[0][2] <= sum(share for share, *_ in shares) < 1.1 * shares[0][2]


def test_a_run_goes_on_where_it_was_and_saves_no_byte_of_its_base(folder, tmp_path):
    engine = engine_of(opened_of(folder), stage=3)
    train_engine(engine, BATCHES)
    step = engine.save(tmp_path)
    wanted = train_engine(engine, BATCHES)[:2]
    again = engine_of(opened_of(folder), stage=1)
    again.load(step)
    assert train_engine(again, BATCHES)[:2] == wanted
    assert json.loads((step / "manifest.json").read_text())["base"]["folder"] == str(folder)
    saved = [name for file in step.glob("*.safetensors") for name in load_file(file)]
    assert saved
    assert not any("packed" in name for name in saved)
    with pytest.raises(CheckpointError, match="packed"):
        engine_of(opened_of(folder, "int8"), stage=3).load(step)
    other = base_folder(tmp_path / "other", seed=1, intermediate_size=96)
    with pytest.raises(CheckpointError, match="digest"):
        engine_of(opened_of(other), stage=3).load(step)


def going_on(folder, output, stage, step=None):
    """The curve of a run from a step on; without one, of a run that is saved there, and where its step is."""
    dp = torch.distributed.get_world_size()
    engine = engine_of(opened_of(folder), stage=stage, exact=True, accumulate=MICRO_BATCHES // dp)
    if step is not None:
        engine.load(step)
        return curve(engine), step
    curve(engine)
    saved = str(engine.save(output))
    return curve(engine), saved


@pytest.mark.long
def test_a_run_goes_on_with_other_ranks_and_at_another_stage(ranks, folder, tmp_path):
    wanted, step = ranks(2, going_on, str(folder), str(tmp_path), 3)[0]
    assert ranks(1, going_on, str(folder), str(tmp_path), 1, step)[0] == (wanted, step)


def test_an_export_is_an_adapter_or_the_full_base_with_it_merged(folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = engine_of(opened_of(folder), stage=3)
    train_engine(engine, BATCHES)
    adapter = engine.export(tmp_path / "adapter", "adapter")
    merged = engine.export(tmp_path / "merged", "merged")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for p in base.parameters():
        p.data = to_compute(p.data, torch.bfloat16)  # torch's own cast rounds ties otherwise
    wanted = PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False).merge_and_unload().state_dict()
    found = load_file(merged / "model.safetensors")
    assert found.keys() <= wanted.keys()
    assert all(values.equal(wanted[name]) for name, values in found.items())
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)


def test_new_weights_are_quantised_too_and_generate(tmp_path):
    settings = {"model": {"path": str(base_folder(tmp_path / "m")), "init": "random", "quantize": "nf4"}, "lora": LORA}
    opened = open_trained(load(settings))
    engine = engine_of(opened, stage=3)
    tokens = engine.generate(BATCHES[0][:, :4], max_new_tokens=3)
    assert tokens.shape == (2, 7)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("trained", [False, True], ids=["bias frozen", "bias trained"])
def test_a_layer_with_a_bias_has_the_gradients_of_nn_linear_for_inputs_of_any_shape(name, trained):
    linear = torch.nn.Linear(96, 40)
    linear.weight.requires_grad_(False)
    linear.bias.requires_grad_(trained)
    packed = QuantisedLinear(linear, CODECS[name], torch.float32)
    linear.weight.copy_(packed.weight)
    for shape in ((2, 3, 96), (5, 96), (96,), (0, 96), (2, 0, 96)):  # an expert that no token went to gets (0, 96)
        found = []
        for layer in (linear, packed):
            x = torch.linspace(-1, 1, prod(shape)).view(shape).requires_grad_()
            y = layer(x)
            (y * torch.linspace(0, 1, 40)).sum().backward()
            found.append((y, x.grad, *([linear.bias.grad] if trained else [])))
            linear.bias.grad = None
        assert all(map(torch.equal, *found))


def test_gradients_of_inputs_in_fp32_are_of_the_matrix_in_fp32_though_the_layer_is_in_bf16():
    linear = torch.nn.Linear(64, 8).requires_grad_(False)
    layer = QuantisedLinear(linear, CODECS["nf4"], torch.bfloat16)
    x = torch.linspace(-1, 1, 3 * 64).view(3, 64).requires_grad_()
    grad = torch.linspace(0, 1, 3 * 8).view(3, 8)
    layer(x).backward(grad)
    assert x.grad.equal(grad @ layer.decoded(layer.packed, torch.float32))


def test_a_layer_in_autocast_has_the_gradients_of_nn_linear_and_reads_its_bias_anew():
    linear = torch.nn.Linear(64, 8)
    linear.weight.requires_grad_(False)
    layer = QuantisedLinear(linear, CODECS["nf4"], torch.float32)
    linear.weight.copy_(layer.weight)
    found = []
    for each in (linear, layer):
        x = torch.linspace(-1, 1, 3 * 64).view(3, 64).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = each(x)
        y.float().square().sum().backward()
        found.append((y, x.grad, linear.bias.grad))
        linear.bias.grad = None
    assert all(map(torch.equal, *found))
    x = torch.zeros(1, 64)
    with torch.autocast("cpu", torch.bfloat16):  # which keeps its own casts of parameters until its end
        for step in range(2):
            torch.nn.init.constant_(linear.bias, step)
            assert layer(x).eq(step).all(), "a step inside autocast changes the bias"


@pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_layers_with_hooks_stay_as_they_are(hook):
    model = tiny("llama").requires_grad_(False)
    layers = find_layers(model)
    name = "model.layers.1.mlp.up_proj"
    getattr(layers[name], f"register_{hook}")(lambda *_: None)
    assert find_layers(model).keys() == layers.keys() - {name}


def test_a_read_of_a_released_layers_weight_is_an_error_that_names_what_it_is_packed_in(folder):
    opened = opened_of(folder)
    engine_of(opened, stage=3)
    layer = next(module for module in opened.module.modules() if isinstance(module, QuantisedLinear))
    with pytest.raises(ReleasedParameterError, match=r"parameter 'model\.layers\.0\..*\.packed', which has no values"):
        _ = layer.weight


@pytest.mark.parametrize(("settings", "words"), [
    ({"model": {"linear": "fp8"}, "lora": LORA}, r"model\.quantize=nf4 decodes .* type model\.linear=null"),
    ({"model": {"quantize": "int4"}}, r"model\.quantize"),
    ({"model": {"quantize": "nf4"}}, r"model\.quantize=nf4 packs frozen linear layers of blocks, .* lora\.rank=16"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_type(folder, settings, words):
    model = {"path": str(folder), "quantize": "nf4"} | settings.get("model", {})
    with pytest.raises(zero3d.ConfigError, match=words):
        open_trained(load({**settings, "model": model}))


def test_a_quantised_matrix_is_not_unfrozen(folder):
    engine = engine_of(opened_of(folder), stage=2)
    with pytest.raises(zero3d.ConfigError, match=r"uint8, which has no gradient: .*model\.quantize=null"):
        engine.unfreeze("model.layers.0.mlp*")
