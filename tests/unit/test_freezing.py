"""Parameters are frozen and unfrozen between steps, with the bits of plain PyTorch."""

import copy

import pytest
import torch
from models import net
from torch import nn

import zero3d
from zero3d.errors import CheckpointError, ConfigError

WIDTH = 24


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **{"lr": 0.05, "weight_decay": 0.1, "foreach": False} | options)


def batch(step):
    return torch.randint(0, 61, (2, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    return model(batch(step)).float().pow(2).mean()


def set_trained(module, names, trained):
    for name, p in module.named_parameters():
        if any(name.startswith(part) for part in names):
            p.requires_grad_(trained)


def plain(model, schedule, steps=6):
    """Train in torch's words; schedule: step -> (names, trained)."""
    optimizer, norms = adamw(model.parameters()), []
    for step in range(steps):
        if step in schedule:
            set_trained(model, *schedule[step])
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, step).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return model, norms


def sharded(engine, schedule, way, steps=range(6)):
    norms = []
    for step in steps:
        if step in schedule:
            names, trained = schedule[step]
            if way == "full_params":
                with engine.full_params():
                    set_trained(engine.module, names, trained)
            else:
                (engine.unfreeze if trained else engine.freeze)("|".join(f"{name}*" for name in names))
        engine.backward(loss_of(engine, step))
        result = engine.step()
        assert result.reason == "applied"
        norms.append(result.grad_norm.item())
    return norms


SCHEDULES = {
    "frozen, then trained": (["layers.0", "head"], {2: (["layers.0"], True), 4: (["head"], True)}),
    "a part of a unit": (["layers.1.up.weight", "layers.1.norm"], {3: (["layers.1.up"], True)}),
    "trained, then frozen": ([], {2: (["layers", "norm"], False), 4: (["layers.2"], True)}),
    "there and back": (["layers.2"], {1: (["layers.2"], True), 3: (["layers.2"], False), 5: (["layers.2"], True)}),
}


def engine_of(frozen, stage, **options):
    model = net()
    set_trained(model, frozen, False)
    options = {"precision": "fp32", "optimizer": adamw, "clip_norm": 0.5} | options
    return zero3d.Engine(model, stage=stage, **options)


PAIRS = dict(zip(SCHEDULES, ((0, "full_params"), (3, "names"), (0, "names"), (3, "full_params")), strict=True))


@pytest.mark.parametrize(("name", "stage", "way"), [
    pytest.param(name, stage, way, marks=() if (stage, way) == PAIRS[name] else pytest.mark.long)
    for name in SCHEDULES for stage in (0, 3) for way in ("full_params", "names")
])  # fmt: skip
def test_the_bits_are_those_of_torch(name, stage, way):
    frozen, schedule = SCHEDULES[name]
    model = net()
    set_trained(model, frozen, False)
    wanted, norms = plain(model, schedule)
    engine = engine_of(frozen, stage)
    assert sharded(engine, schedule, way) == pytest.approx(norms, rel=1e-6)
    with engine.full_params():
        for (name, p), other in zip(engine.module.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(p, other), name
    uneven = [(e.category, e.planned, e.measured) for e in engine.memory if e.planned not in (None, e.measured)]
    assert uneven == []


def test_groups_and_ready_optimizers_have_places_for_what_comes_later():
    model = net()
    model.head.requires_grad_(False)
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.0},
              {"params": [p for p in model.parameters() if p.ndim < 2]}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    engine = zero3d.Engine(model, stage=3, optimizer=optimizer, precision="bf16")
    before = len(optimizer.param_groups[0]["params"])
    engine.unfreeze("head.*")
    assert len(optimizer.param_groups[0]["params"]) == before + 1
    sharded(engine, {}, "names", range(2))
    engine = engine_of(["head"], 2, optimizer=adamw, param_groups=[{"match": "head*", "lr": 0.0}])
    with engine.full_params():
        head = engine.module.head.weight.detach().clone()
    engine.unfreeze("head*")
    sharded(engine, {}, "names", range(2))
    with engine.full_params():
        assert torch.equal(engine.module.head.weight, head)


def test_a_checkpoint_of_an_unfrozen_model_goes_on_bit_for_bit(tmp_path):
    schedule = {1: (["layers.0"], True)}
    engine = engine_of(["layers.0", "head"], 3, precision="bf16", master="split")
    sharded(engine, schedule, "names", range(3))
    engine.save(tmp_path)
    straight = sharded(engine, {}, "names", range(3, 5))
    other = engine_of(["layers.0", "head"], 3, precision="bf16", master="split")
    with pytest.raises(CheckpointError, match="were frozen in one run and trained in the other"):
        other.load(tmp_path)
    other.unfreeze("layers.0*")
    other.load(tmp_path)
    assert sharded(other, {}, "names", range(3, 5)) == straight
    assert other.fingerprint() == engine.fingerprint()


def test_on_two_ranks_over_tp_and_dp_states_go_on(ranks):
    alone = ranks(1, staged, (1, 1))[0]
    for shape in ((2, 1), (1, 2)):
        for found in ranks(2, staged, shape):
            assert found == [pytest.approx(each, rel=1e-9) for each in alone]


def apart(stage):
    """Ranks that freeze other blocks: what each hears, and whether its weights have moved."""
    engine = engine_of([], stage)
    before = engine.fingerprint()
    engine.freeze(f"layers.{torch.distributed.get_rank()}.*")
    engine.backward(loss_of(engine, 0))
    try:
        engine.step()
    except zero3d.OrderError as error:
        return str(error), engine.fingerprint() == before


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_freeze_other_parameters_are_stopped_before_the_update(ranks, stage):
    for rank, (said, unmoved) in enumerate(ranks(2, apart, stage)):
        assert f"froze other parameters; this rank's last operation was a step without the frozen layers.{rank}" in said
        assert unmoved


def over_stages():
    """Names of the parameters that a rank of two pipeline stages has frozen, by those of the whole model."""
    from tensors import tiny

    mesh = zero3d.Mesh(pp=2)
    engine = zero3d.Engine(tiny("llama", layers=4), mesh=mesh, stage=1, precision="fp32", optimizer=adamw)
    engine.freeze("model.layers.0.*|model.layers.3.mlp*|lm_head*")
    return [name for unit in engine.units for name in _frozen(unit)]


def _frozen(unit):
    named = zip(unit.layout.slots, unit.weights.params, strict=True)
    return [slot.name for slot, p in named if not p.requires_grad]


def test_names_are_those_of_the_whole_model_in_a_pipeline(ranks):
    first, last = ranks(2, over_stages)
    assert {".".join(name.split(".")[:3]) for name in first} == {"model.layers.0"}
    modules = {name.rpartition(".")[0] for name in last}
    assert modules == {"lm_head", *(f"model.layers.3.mlp.{part}_proj" for part in ("down", "gate", "up"))}


def staged(shape):
    """Losses and norms of a llama whose first layer is unfrozen, and whose last is frozen."""
    from models import LiftCasts
    from tensors import tiny

    dp, tp = shape
    with LiftCasts():
        model = tiny("llama", kv_heads=4)
        model.model.layers[0].requires_grad_(False)
        mesh = zero3d.Mesh(dp=dp, tp=tp)
        engine = zero3d.Engine(model, mesh=mesh, stage=3, precision="fp64", optimizer=adamw, clip_norm=0.5)
        found = []
        for step in range(4):
            if step == 2:
                engine.unfreeze("model.layers.0.*")
                engine.freeze("model.layers.1.*|lm_head*")
            ids = torch.randint(0, 60, (4, 6), generator=torch.Generator().manual_seed(step))
            own = ids.chunk(dp)[mesh.place.dp]
            loss = engine.train_batch([{"input_ids": own, "labels": own}])
            found.append((float(loss), float(engine.last_step.grad_norm)))
        return found


def written_and_unfrozen(stage):
    """A weight that ranks have written differently in the block in which they unfroze it."""
    engine = engine_of(["head"], stage, mesh=zero3d.Mesh(dp=2), precision="bf16")
    head = engine.module.head.weight
    with engine.full_params():
        head.data.mul_(2 + engine.dp.rank)
        head.requires_grad_(True)
    with engine.full_params():
        return head.float().tolist()


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_agree_on_what_they_wrote_where_they_unfroze_it(ranks, stage):
    first, second = ranks(2, written_and_unfrozen, stage)
    assert first == second


@pytest.mark.parametrize(("options", "words"), [
    ({"exact": True}, "exact=True"), ({"ema": 0.9}, "ema"),
])  # fmt: skip
def test_what_cannot_be_unfrozen_has_a_remedy_that_works(options, words):
    engine = engine_of(["head"], 3, **options)
    with pytest.raises(ConfigError, match=f"(?s){words}.*engine.freeze\\('head.weight'\\)"):
        engine.unfreeze("head*")
    other = engine_of([], 3, **options)
    other.freeze("head.weight")
    with other.full_params():
        head = other.module.head.weight.detach().clone()
    sharded(other, {}, "names", range(1))
    with other.full_params():
        assert torch.equal(other.module.head.weight, head)


@pytest.mark.parametrize(("options", "words", "remedy"), [
    ({"offload": {"optimizer": "host"}}, "off the device", "offload=None"),
    ({"optimizer": zero3d.optim.muon(lr=0.1)}, "Muon", "AdamW"),
])  # fmt: skip
def test_offload_and_muon_refuse_both_at_once(options, words, remedy):
    engine = engine_of(["head"], 3, **options)
    with pytest.raises(ConfigError, match=f"(?s){words}.*build a new Engine"):
        engine.unfreeze("head*")
    with pytest.raises(
        ConfigError, match=f"'norm.weight' was frozen after .* {words}.*before the Engine is built, or pass {remedy}"
    ):
        engine.freeze("norm.*")
    assert engine.module.norm.weight.requires_grad
    engine_of(["head"], 3, **dict.fromkeys(options)).freeze("norm.*")  # offload=None, optimizer=None (AdamW)


def test_in_a_window_nothing_is_frozen():
    engine = engine_of([], 3, accumulate=2)
    engine.backward(loss_of(engine, 0))
    with pytest.raises(ConfigError, match=r"freeze\(\) after 1 micro-batches"):
        engine.freeze("head*")


def test_full_params_that_fail_leave_nothing_open():
    engine = engine_of([], 3)
    weight = engine.module.head.weight
    kept, weight.data = weight.data, torch.ones(61, WIDTH)
    with pytest.raises(zero3d.LayoutError, match=r"head\.weight"), engine.full_params():
        pass
    assert engine.arena.live("gathered") == 0
    weight.data = kept
    sharded(engine, {}, "names", range(1))


def test_names_that_are_not_there_and_changes_outside():
    engine = engine_of(["head"], 3)
    with pytest.raises(ConfigError, match=r"'lm_head\*' matches no parameter: .*'embed.weight'"):
        engine.freeze("lm_head*")
    engine.module.head.requires_grad_(True)
    with pytest.raises(zero3d.LayoutError, match=r"call engine.unfreeze\('head.weight'\)"):
        engine(batch(0))


def test_a_loss_through_a_model_that_is_frozen_for_a_while():
    """A GAN's generator: its loss goes through the other's engine, whose parameters are frozen meanwhile."""
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
    plain_first, plain_second = copy.deepcopy(first), copy.deepcopy(second)
    engines = [zero3d.Engine(m, stage=3, precision="fp32", units=[nn.Linear], optimizer=adamw) for m in (first, second)]
    x = torch.randn(3, 4)
    second.requires_grad_(False)
    engines[0].backward(engines[1](engines[0](x)).pow(2).mean())
    engines[0].step()
    second.requires_grad_(True)
    plain_second(plain_first(x)).pow(2).mean().backward()
    optimizer = adamw(plain_first.parameters())
    torch.nn.utils.clip_grad_norm_(plain_first.parameters(), 1.0)
    optimizer.step()
    with engines[0].full_params():
        for p, other in zip(first.parameters(), plain_first.parameters(), strict=True):
            assert torch.equal(p, other)
    assert engines[1].accumulation.count == 0  # what went through was no micro-batch of its own
    with engines[1].full_params():
        for p, other in zip(second.parameters(), plain_second.parameters(), strict=True):
            assert torch.equal(p, other)
    engines[1].backward(engines[1](x).pow(2).mean())
    assert engines[1].step().reason == "applied"
