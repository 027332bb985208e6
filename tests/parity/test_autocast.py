"""Engine(autocast=True): losses of torch's mixed precision to rounding, the same bits at every stage, and what it keeps."""

from functools import partial

import pytest
import torch
from models import PostNorm, adamw, batch, bits, net, waves
from tensors import tiny
from torch import nn
from torch.nn import functional as F

import zero3d
from zero3d import ConfigError, Engine
from zero3d.activations import prepare_blocks, recompute
from zero3d.engine.autocast import compute_in_autocast, keep_statistics_in_fp32
from zero3d.models.tiled_loss import Targets, head_numbers

LENGTH, ROWS = 12, 4


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trained(engine, steps=4):
    losses = []
    for step in range(steps):
        ids = batch(step, engine.mesh.rank)
        logits = engine(ids)
        assert logits.dtype == torch.float32
        losses.append(loss_of(logits, ids))
        engine.backward(losses[-1])
        engine.step()
    with engine.full_params():
        return [loss.item() for loss in losses], bits(engine.module.parameters())


def at_stages(stages, **options):
    return [
        trained(Engine(waves(), stage=stage, autocast=True, optimizer=adamw, clip_norm=None, **options))
        for stage in stages
    ]


def in_torch(dtype=torch.bfloat16, steps=4):
    """Losses of the first of two data-parallel ranks, in torch's own autocast of fp32 weights."""
    model, losses = waves(), []
    optimizer = adamw(model.parameters())
    for step in range(steps):
        both = []
        for rank in range(2):
            ids = batch(step, rank)
            with torch.autocast("cpu", dtype=dtype):
                logits = model(ids)
            both.append(loss_of(logits.float(), ids))
        losses.append(both[0].item())
        (sum(both) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_losses_are_those_of_torchs_mixed_precision_to_rounding_at_every_stage_with_the_same_bits(ranks):
    found, other = ranks(2, at_stages, (0, 1, 2, 3))
    assert [each == found[0] for each in found] == [True] * 4
    assert [one[1] for one in found] == [each[1] for each in other]
    assert found[0][0] == pytest.approx(in_torch(), rel=1e-2)


def test_fp16_has_its_loss_scale_in_autocast_too(alone):
    losses, _ = alone(partial(at_stages, (3,), precision="fp16"))[0]
    assert losses[0] == pytest.approx(in_torch(torch.float16, 1)[0], rel=2e-3)


class Given(nn.Module):
    """Returns what it is given, and a product of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return {"given": x, "made": self.linear(x), "number": x.long(), "inside": torch.is_autocast_enabled("cpu")}


def test_inputs_in_fp32_are_not_rounded_and_outputs_are_in_fp32():
    engine = Engine(Given(), autocast=True, optimizer=adamw)
    x = torch.full((2, 4), 1.0009765625)  # which bf16 has not
    for given in (x, x.double(), x.bfloat16()):
        out = engine(given)
        assert out["given"].eq(given).all()
        assert out["given"].dtype == torch.float32
        assert (out["made"].dtype, out["number"].dtype, out["inside"]) == (torch.float32, torch.int64, True)
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    assert engine.optimizer.pieces[0].master.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_wider_precision_is_refused_with_what_to_type(precision):
    with pytest.raises(
        ConfigError, match=f"autocast=True.*precision='{precision}'.*precision='bf16', or autocast=False"
    ):
        Engine(net(), precision=precision, autocast=True)


def test_masters_are_shown_in_the_one_autocast_and_a_closed_model_is_as_it_was():
    model = waves()
    before = [vars(module).get("forward") for module in model.modules()]
    engine = Engine(model, autocast=True, optimizer=adamw)
    trained(engine, 1)
    during = model.forward
    engine.unshard(masters=True)
    assert model.forward is during
    assert next(model.parameters()).dtype == torch.float32
    ids = batch(0)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = waves()
        plain.load_state_dict(model.state_dict())
        wanted = plain(ids).float()
    with torch.no_grad():
        assert torch.equal(model(ids), wanted)
    engine.reshard()
    assert model.forward is during
    assert engine(ids).dtype == torch.float32
    engine.close()
    assert [vars(module).get("forward") for module in model.modules()] == before
    assert not torch.is_autocast_enabled("cpu")


NORMS = {
    "layer": lambda: nn.LayerNorm(4),
    "layer without weights": lambda: nn.LayerNorm(4, elementwise_affine=False),
    "layer without bias": lambda: nn.LayerNorm(4, bias=False),
    "group": lambda: nn.GroupNorm(2, 4),
    "batch": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "batch with averages": lambda: nn.BatchNorm1d(4),
    "batch without weights": lambda: nn.BatchNorm1d(4, affine=False),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_with_weights_in_16_bits_takes_an_input_in_fp32(kind):
    torch.manual_seed(0)
    x, norm = torch.randn(3, 4, 4), NORMS[kind]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = norm(x)
    for p in norm.parameters():
        p.data = p.data.bfloat16()
    keep_statistics_in_fp32({0: norm}, torch.bfloat16)
    compute_in_autocast({0: norm}, 0, "cpu", torch.bfloat16)
    found = norm(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)  # weights of ones and zeros
    for p in norm.parameters():
        (grad,) = torch.autograd.grad(norm(x).sum(), [p])
        assert grad.dtype == torch.bfloat16


def test_a_bilinear_layer_with_weights_in_16_bits_takes_inputs_in_fp32():
    torch.manual_seed(0)
    x, layer = torch.randn(3, 4), nn.Bilinear(4, 4, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = layer(x, x).float()
    layer.to(torch.bfloat16)
    compute_in_autocast({0: layer}, 0, "cpu", torch.bfloat16)
    found = layer(x, x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)


class Convolutions(nn.Module):
    """Two convolutions with batch norms, as models of images have them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.last_norm, self.head = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.last_norm(self.second(x)))
        return self.head(x.mean((2, 3)))


def normalised(autocast, stages):
    """Losses of two steps and statistics at each stage, and torch's own with fp32 weights in autocast."""
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 + 1
    found = []
    for stage in (*stages, None):
        torch.manual_seed(0)
        model, losses = Convolutions(), []
        if stage is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            engine = Engine(
                model, stage=stage, autocast=autocast, clip_norm=None, units=[nn.Conv2d],
                optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
            )  # fmt: skip
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=stage is None):
                loss = (model(x) if stage is None else engine(x)).float().pow(2).mean()
            loss.backward() if stage is None else engine.backward(loss)
            optimizer.step() if stage is None else engine.step()
            model.zero_grad() if stage is None else None
            losses.append(loss.item())
        statistics = [*model.norm.running_mean.tolist(), *model.last_norm.running_var.tolist()]
        assert model.norm.running_mean.dtype == torch.float32
        found.append((losses, statistics))
    return found


@pytest.mark.parametrize("autocast", [True, False])
def test_batch_norms_have_torchs_losses_and_statistics_to_rounding(ranks, autocast):
    of_two, of_three, plain = ranks(2, normalised, autocast, (2, 3))[0]
    assert of_two == of_three
    for ours, wanted in zip(of_two, plain, strict=True):
        assert ours == pytest.approx(wanted, rel=2e-2, abs=2e-2)


def test_batch_norms_whose_statistics_came_in_16_bits_keep_them():
    norm = nn.BatchNorm1d(4).bfloat16()
    x = torch.randn(3, 4).bfloat16()
    wanted = norm(x)
    keep_statistics_in_fp32({0: norm}, torch.bfloat16)
    assert torch.equal(norm(x), wanted)
    assert norm.weight.dtype == torch.bfloat16


def test_weights_of_a_batch_norm_are_its_parameters_behind_a_forward():
    norm = nn.BatchNorm1d(4)
    norm.weight = nn.Parameter(norm.weight.detach().bfloat16())
    norm.bias = nn.Parameter(norm.bias.detach().bfloat16())
    weight, bias = norm.weight, norm.bias
    keep_statistics_in_fp32({0: norm}, torch.bfloat16)
    norm(torch.randn(3, 4))
    assert norm.weight is weight
    assert norm.bias is bias


# --- beside what else changes a forward ---------------------------------------------------------------


def token_batches(step, rank, count=1):
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = (torch.randint(3, 61, (ROWS, LENGTH), generator=generator) for _ in range(count))
    return [{"input_ids": ids, "labels": ids} for ids in made]


def run(change="", name="llama", degrees=None, steps=2, rows=None, **options):
    """Losses of a tiny language model, and its gradient norms; `rows`: of all data-parallel ranks together."""
    model = tiny(name, kv_heads=4, lora=options.pop("lora", False))
    if change == "compiled":
        prepare_blocks(model, "none", compile="aot_eager")
    elif change:
        recompute(model, change)
    mesh = zero3d.Mesh(**degrees or {})
    engine = Engine(model, mesh=mesh, optimizer=adamw, **{"autocast": True, **options})
    share = mesh.place.dp // mesh.sp
    losses, norms = [], []
    for step in range(steps):
        batches = token_batches(step, share, rows // (mesh.dp // mesh.sp) if rows else 1)
        if rows:
            batches = token_batches(step, 0, rows)[share :: mesh.dp // mesh.sp]
        losses.append(engine.train_batch(batches).item())
        norms.append(engine.figures.grad_norm)
    return losses, norms


def each(changes, **options):
    return [run(change, **options) for change in changes]


def test_recomputed_and_compiled_blocks_run_in_the_autocast_of_their_forward(alone):
    plain, *others = alone(partial(each, ("", "full", "every:2", "selective"), name="gpt2"))
    assert [other == plain for other in others] == [True] * 3


@pytest.mark.long
def test_compiled_blocks_have_the_losses_of_others(alone):
    plain, compiled = alone(each, ("", "compiled"))
    assert compiled[0] == pytest.approx(plain[0], rel=1e-3)


def tiled_and_not():
    return [[run(name=name, tiled_loss=tiled) for tiled in (False, True)] for name in ("llama", "gpt2")]


def test_a_tiled_loss_is_the_whole_one_to_rounding(alone):
    for (whole, _), (tiled, _) in alone(tiled_and_not):
        assert tiled == pytest.approx(whole, rel=2e-3)


def test_a_tiled_loss_of_hidden_states_in_fp32_has_a_backward():
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(16, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = Targets(torch.arange(5), ())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, target = head_numbers(hidden, weight, None, targets)
        logits = F.linear(hidden, weight).float()
    (total - target).sum().backward()
    wanted = torch.autograd.grad(F.cross_entropy(logits, targets.rows, reduction="sum"), [hidden, weight])
    for found, of_whole in zip((hidden.grad, weight.grad), wanted, strict=True):
        assert found.dtype == of_whole.dtype
        assert torch.allclose(found.float(), of_whole.float(), rtol=0.02, atol=0.02)


def exact(degrees):
    return run(degrees=degrees, rows=4, exact=True, stage=3)


@pytest.mark.long
def test_exact_mode_has_the_same_bits_at_any_dp(ranks, alone):
    one = alone(exact, {})
    assert ranks(2, exact, {}) == [one] * 2


@pytest.mark.long
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"sp": 2}, {"pp": 2}])
def test_other_axes_have_the_losses_of_one_rank_to_rounding(ranks, alone, degrees):
    (one, norms), found = alone(partial(run, rows=2)), ranks(2, partial(run, degrees=degrees, rows=2))
    for losses, others in found:
        assert losses == pytest.approx(one, rel=5e-3)
        assert others == pytest.approx(norms, rel=5e-2)


def test_a_chunk_of_a_pipeline_that_hands_fp32_on_says_so():
    chunk, last = PostNorm(8), PostNorm(8)
    compute_in_autocast({0: chunk, 1: last}, 1, "cpu", torch.bfloat16)
    assert last(torch.ones(1, 2, 8)).dtype == torch.float32
    with pytest.raises(
        ConfigError, match=r"chunk 0 of the pipeline hands on torch\.float32 where stages send torch\.bfloat16"
    ):
        chunk(torch.ones(1, 2, 8))


@pytest.mark.long
def test_experts_of_other_ranks_have_the_losses_of_one_rank_to_rounding(ranks, alone):
    (one, _), found = (
        alone(partial(run, name="moe", rows=2)),
        ranks(2, partial(run, name="moe", degrees={"ep": 2}, rows=2)),
    )
    for losses, _ in found:
        assert losses == pytest.approx(one, rel=5e-3)


@pytest.mark.long
def test_a_replay_computes_the_same_gradients(ranks):
    assert ranks(2, partial(run, replay=1, rows=2)) == ranks(2, partial(run, rows=2))
