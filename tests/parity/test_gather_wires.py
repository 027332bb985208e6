"""Weights that are gathered in blocks of 8 bits, and second shards of gathered weights: bits, bytes, what others see."""

import math
from contextlib import contextmanager
from math import ceil
from unittest.mock import patch

import meshes
import mixtures
import pytest
import torch
from models import adamw, batch, bits, build, hf, loss_of, planned_bytes, train_engine
from safetensors.torch import load_file
from torch import nn

import zero3d
from zero3d.account.traffic import node_traffic, step_traffic
from zero3d.activations.recomputation import recompute
from zero3d.distributed.block_codec import BlockCodec
from zero3d.engine.traffic_formulas import SessionCounts
from zero3d.errors import ConfigError, MeshError
from zero3d.precision import to_compute
from zero3d.train.traffic import TrainingTraffic, traffic_rows
from zero3d.zero.buckets import InRecord
from zero3d.zero.tokens import count_gathers

CODED, SECOND = {"gather_wire": "int8"}, {"second_shard": 2}


def engine_of(model="net", precision="bf16", mesh=None, **options):
    module = build(model) if isinstance(model, str) else model
    return zero3d.Engine(module, mesh=mesh, stage=3, precision=precision, clip_norm=0.5, optimizer=adamw, **options)


def through_blocks(values):
    """What is computed with in the place of weights: decoded blocks of each parameter."""
    codec, out = BlockCodec(8), torch.empty(values.numel(), dtype=values.dtype)
    message = torch.empty(codec.message_bytes(out.numel()), dtype=torch.uint8)
    codec.encode(values.reshape(-1), message)
    codec.decode(message, out)
    return out.view(values.shape)


# --- second shards change no bit -----------------------------------------------------------------


def course(folder, options):
    """What a run sees in its life: steps, an evaluation, a write, a frozen part, a save, a load; all digits."""
    rank = torch.distributed.get_rank()
    model = build("net")
    model.embed.requires_grad_(False)
    model.layers[1].requires_grad_(False)  # a whole unit
    recompute(model, "full")
    degrees = {name: options.pop(name) for name in ("shard",) if name in options}
    engine, seen = engine_of(model, mesh=zero3d.Mesh(**degrees), accumulate=2, **options), []

    def step(number):
        for m in range(2):
            loss = loss_of(engine, batch(10 * number + m, rank))
            engine.backward(loss)
            seen.append(float(loss.detach()))
        seen.append(float(engine.step().grad_norm))

    def evaluate():
        with torch.no_grad():
            seen.append(float(loss_of(engine, batch(99, rank))))

    step(0)
    evaluate()
    saved = engine.save(folder)
    step(1)
    evaluate()
    with engine.full_params(), torch.no_grad():
        engine.module.head.weight.mul_(1.5)
        engine.module.embed.weight.add_(0.25)  # frozen
        next(engine.module.layers[1].parameters()).add_(0.25)
    evaluate()
    step(3)  # what was written is gathered until then
    engine.load(saved)
    evaluate()
    step(1)
    if "offload" not in options:  # what has no states there cannot get them
        engine.unfreeze("embed.weight")
    step(2)
    evaluate()
    with engine.full_params():
        seen.append(bits(engine.module.parameters()))
    calls = {(e.axis, e.unit): e.calls for e in engine.traffic if e.op == "all_gather"}
    return seen, calls


AWAY = {"offload": {"params": "host", "optimizer": "host"}}  # updates are due until weights are used


@pytest.mark.parametrize("options", [
    {}, *(pytest.param(options, marks=pytest.mark.long) for options in (CODED, AWAY, CODED | AWAY)),
], ids=["same", "int8", "away", "int8-away"])  # fmt: skip
def test_a_second_shard_changes_no_bit_of_a_course(ranks, tmp_path, options):
    plain = ranks(4, course, tmp_path / "plain", dict(options))
    second = ranks(4, course, tmp_path / "second", options | SECOND)
    for (seen, _), (found, calls) in zip(plain, second, strict=True):
        assert found == seen
        assert calls["node", "layers.0"] > calls["dp", "layers.0"]
    assert len({seen[-1] for seen, _ in plain}) == 1


@pytest.mark.long
def test_a_second_shard_inside_of_a_shard_group_changes_no_bit_either(ranks, tmp_path):
    plain = ranks(8, course, tmp_path / "plain", {"shard": 4})
    second = ranks(8, course, tmp_path / "second", {"shard": 4, **SECOND})
    for (seen, _), (found, calls) in zip(plain, second, strict=True):
        assert found == seen
        assert calls["node", "layers.0"] > calls["shard", "layers.0"]


def course_of_experts(folder, options, reloads):
    """Steps, an evaluation, a load, with experts shared out; what was sent or held otherwise than by formula; gathers."""
    engine = mixtures.engine_of(ep=2, precision="bf16", clip_norm=0.05, **options)
    counted, seen = TrainingTraffic(engine), []
    for step in range(2):
        seen.append(float(engine.train_batch(mixtures.own_part(engine, step, summands=4))))
        counted.last_step()
        with counted.excluded(), torch.no_grad():
            seen.append(float(engine(**mixtures.summand(9, engine.dp.rank)).loss))
    wrong = [row.op for row in traffic_rows(counted, SessionCounts(2, 0, 1, 0)) if not row.equal]
    wrong += [each.category for each in engine.memory if each.planned not in (None, each.measured)]
    over = {
        axis: {e.unit for e in engine.traffic if (e.op, e.axis) == ("all_gather", axis)} for axis in ("node", "edp")
    }
    if reloads:
        saved = engine.save(folder)
        seen.append(mixtures.curve(engine, [2]))
        engine.load(saved)
        seen.append(mixtures.curve(engine, [2]))
    return (*seen, engine.fingerprint()), wrong, over


@pytest.mark.parametrize("reloads", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_second_shard_beside_experts_that_are_shared_out_changes_no_bit(ranks, tmp_path, reloads):
    plain, second = (
        ranks(4, course_of_experts, tmp_path / name, options, reloads) for name, options in (("a", {}), ("b", SECOND))
    )
    for (seen, wrong, _), (found, wrong_too, over) in zip(plain, second, strict=True):
        assert found == seen
        assert wrong == wrong_too == []
        assert over["node"], "others than experts are gathered from neighbours"
        assert over["edp"], "experts from those who have the same ones"
        assert not over["node"] & over["edp"]


def served(folder, options):
    """Tokens that are generated and the files of an export between two steps, and what comes after."""
    rank, model = torch.distributed.get_rank(), hf("llama")
    engine, seen = engine_of(model, **options), []
    for number in range(2):
        engine.backward(loss_of(engine, batch(number, rank)))
        engine.step()
        seen.append(engine.generate(batch(9)[:1, :4], max_new_tokens=4).tolist())
        engine.export(folder / str(number))
        seen.append([path.read_bytes() for path in sorted((folder / str(number)).glob("*.safetensors"))])
    return seen


@pytest.mark.long
def test_what_a_second_shard_generates_and_exports_is_what_weights_are_now(ranks, tmp_path):
    plain, second = (ranks(4, served, tmp_path / name, options) for name, options in (("a", {}), ("b", SECOND)))
    assert plain == second
    assert plain[0][1] != plain[0][3]


def begun_before_an_update():
    """Whether a second shard is kept of a gather that began before weights changed and ended after; and of one behind."""
    engine, found = engine_of(**SECOND), []
    weights = next(unit.weights for unit in engine.units if unit.name == "layers.0")
    for changes in (True, False):
        weights.gather()
        if changes:
            weights.changed()
        weights.release()
        found.append(weights._wire.second.kept)
    return found


def test_a_gather_that_began_before_an_update_is_not_kept_as_of_after_it(ranks):
    assert ranks(4, begun_before_an_update) == [[False, True]] * 4


def two_on_a_mesh():
    """How many ranks keep second shards of two engines on one mesh, and their losses beside those without."""
    rank, mesh = torch.distributed.get_rank(), zero3d.Mesh()
    engines = [engine_of(mesh=mesh, **options) for options in ({}, {"second_shard": 2}, {"second_shard": 4})]
    found = [train_engine(engine, [batch(step, rank) for step in range(2)]) for engine in engines]
    return [engine.second_shard_ranks for engine in engines], [each == found[0] for each in found]


@pytest.mark.long
def test_two_engines_on_a_mesh_have_second_shards_of_their_own_numbers_of_ranks(ranks):
    assert ranks(8, two_on_a_mesh) == [([1, 2, 4], [True] * 3)] * 8


# --- what is computed with -----------------------------------------------------------------------


def by_hand(batches, clip):
    """Mixed precision over blocks, written out: fp32 masters, bf16 weights of them, which are decoded for the model."""
    model = build("net")
    masters = [p.detach().clone() for p in model.parameters()]
    optimizer, losses, norms = adamw(masters), [], []
    for ids in batches:
        for p, master in zip(model.parameters(), masters, strict=True):
            p.data = through_blocks(to_compute(master, torch.bfloat16))
        loss = loss_of(model, ids)
        loss.backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        norms.append(float(nn.utils.clip_grad_norm_(masters, clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, [to_compute(m, torch.bfloat16) for m in masters]


def test_one_rank_computes_with_decoded_blocks_and_keeps_its_masters():
    batches = [batch(step) for step in range(3)]
    losses, norms, weights = by_hand(batches, 0.5)
    engine = engine_of(**CODED)
    found = train_engine(engine, batches)
    assert found == (losses, norms, bits(weights))
    assert found != train_engine(engine_of(), batches)


def seen_by_others(folder):
    """The weights that steps compute with, and those of full_params(), a checkpoint, an export and averages."""
    rank = torch.distributed.get_rank()
    engine, plain = engine_of(**CODED), engine_of()
    with torch.no_grad():
        coded, exact = loss_of(engine, batch(7, rank)), loss_of(plain, batch(7, rank))
        with engine.full_params(), plain.full_params():  # while units stay gathered from the forward
            both = [
                (p.clone(), q.clone())
                for p, q in zip(engine.module.parameters(), plain.module.parameters(), strict=True)
            ]
        again = loss_of(engine, batch(7, rank))
    engine.export(folder)
    return coded, exact, again, both


def test_others_than_the_model_see_the_weights_themselves(ranks, tmp_path):
    for coded, exact, again, both in ranks(2, seen_by_others, tmp_path / "out"):
        assert coded == again != exact
        assert all(torch.equal(p, q) for p, q in both)
        written = load_file(next((tmp_path / "out").glob("*.safetensors")))
        shapes = sorted(tuple(p.shape) for p, _ in both)
        assert sorted(tuple(values.shape) for values in written.values()) == shapes


def resumed(folder, first, then):
    """Two steps with the first options, one more with others."""
    rank = torch.distributed.get_rank()
    engine = engine_of(**first)
    train_engine(engine, [batch(step, rank) for step in range(2)])
    saved = engine.save(folder)
    other = engine_of(**then)
    other.load(saved)
    with other.full_params(), engine.full_params():
        assert bits(other.module.parameters()) == bits(engine.module.parameters())
    return other.checkpoints.resumed, train_engine(other, [batch(2, rank)]), train_engine(engine, [batch(2, rank)])


@pytest.mark.parametrize(("first", "then"), [
    (CODED, {}), *(pytest.param(*case, marks=pytest.mark.long) for case in [({}, CODED), (CODED, SECOND | CODED)]),
])  # fmt: skip
def test_masters_are_resumed_between_wires(ranks, tmp_path, first, then):
    world = 4 if "second_shard" in then else 2
    for why, found, wanted in ranks(world, resumed, tmp_path, first, then):
        same = first.keys() == (then.keys() & first.keys()) and bool(first)
        assert (found == wanted) == same
        assert why.startswith("bitwise") == same


# --- meshes, exact mode, offload -------------------------------------------------------------------


MESHES = {
    "tp": ("llama", {"dp": 1, "tp": 2}),
    "pp": ("llama", {"dp": 1, "pp": 2}),
    "zbv": ("llama", {"dp": 1, "pp": 2}),
    "ep": ("moe", {"dp": 2, "ep": 2}),
    "edp": ("moe", {"dp": 4, "ep": 2}),
    "sp": ("llama", {"dp": 2, "sp": 2}),
    "tp and pp": ("llama", {"dp": 1, "tp": 2, "pp": 2}),
}


def on_mesh(name):
    """The loss of an evaluation over blocks, that of a plain engine with decoded weights, and one of a step."""
    family, degrees = MESHES[name]
    schedule, mesh = "zbv" if name == "zbv" else None, zero3d.Mesh(**degrees)
    engines = [
        meshes.engine_of(
            meshes.model_of(family, (1, 1, mesh.pp)), mesh, precision="bf16", stage=3, schedule=schedule, **options
        )
        for options in (CODED, {})
    ]
    with engines[1].full_params(), torch.no_grad():
        for p in engines[1].module.parameters():
            for part in p if p.dim() == 3 else [p]:  # experts lie one by one
                part.copy_(through_blocks(part))
    count = 4 if mesh.pp > 1 else 2 * mesh.dp // mesh.sp
    given = meshes.own(meshes.micro_batches(0, count), mesh.row, mesh.dp // mesh.sp)
    losses = [float(engine.evaluate(given)) for engine in engines]
    return losses, float(engines[0].train_batch(given)), float(engines[1].train_batch(given))


@pytest.mark.long
@pytest.mark.parametrize("name", MESHES)
def test_every_axis_computes_with_decoded_blocks(ranks, name):
    world = math.prod(degree for axis, degree in MESHES[name][1].items() if axis in ("dp", "tp", "pp"))
    for (coded, decoded), first, other in ranks(world, on_mesh, name):
        assert coded == decoded
        assert first == other


def exact_course(options):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine = engine_of(precision="bf16", exact=True, accumulate=4 // world, **options,
                       loss=lambda output, ids: (loss_of(lambda _: output, ids), 1.0))  # fmt: skip
    losses = []
    for step in range(2):
        losses.append(float(engine.train_batch([batch(10 * step + m * world + rank) for m in range(4 // world)])))
    with engine.full_params():
        return losses, bits(engine.module.parameters())


@pytest.mark.parametrize("worlds", [(1,), pytest.param((1, 2), marks=pytest.mark.long)])
def test_exact_mode_has_one_fingerprint_at_every_dp(ranks, worlds):
    found = [ranks(world, exact_course, CODED)[0] for world in worlds]
    found.append(ranks(4, exact_course, CODED | SECOND)[0])
    assert all(course == found[0] for course in found)
    assert found[0] != ranks(1, exact_course, {})[0]


def on_host(options):
    rank = torch.distributed.get_rank()
    off = {"params": "host", "optimizer": "host"}
    batches = [batch(step, rank) for step in range(2)]
    return [train_engine(engine_of(offload=offload, **options), batches) for offload in (None, off)]


@pytest.mark.parametrize(("world", "options"), [
    (2, CODED), pytest.param(4, CODED | SECOND, marks=pytest.mark.long),
])  # fmt: skip
def test_weights_that_leave_the_device_have_the_same_blocks(ranks, world, options):
    for here, there in ranks(world, on_host, options):
        assert here == there


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on a device which this machine may lack; what is made of it does not."""

    device = torch.device("cuda", 0)
    __torch_function__ = torch._C._disabled_torch_function_impl


def as_if_elsewhere():
    """Have a shard that left the device be read, inside, as where the host is not the device that computes."""
    opened, read = InRecord.opened, []

    @contextmanager
    def open_elsewhere(place, changed):
        with opened(place, changed) as shard:
            read.append(changed)
            yield shard if changed else shard.as_subclass(Elsewhere)

    return patch.object(InRecord, "opened", open_elsewhere), read


def coded_from_the_host():
    """What steps find whose weights come from another device, beside those that have them; bytes of messages left."""
    rank = torch.distributed.get_rank()
    batches = [batch(step, rank) for step in range(2)]
    here = train_engine(engine_of(**CODED), batches)
    engine = engine_of(offload={"params": "host", "optimizer": "host"}, **CODED)
    elsewhere, read = as_if_elsewhere()
    with elsewhere:
        found = train_engine(engine, batches)
    return found == here, False in read, int(engine.arena.live("wire"))


def test_weights_that_are_coded_from_another_device_leave_no_memory_on_this_one(ranks):
    assert ranks(2, coded_from_the_host) == [(True, True, 0)] * 2


# --- ledger and arena --------------------------------------------------------------------------------


def account(options):
    rank = torch.distributed.get_rank()
    model = build("net")
    model.embed.requires_grad_(False)
    engine = engine_of(model, accumulate=2, **options)
    for step in range(2):
        engine.traffic.reset()
        engine.gathers.events = []
        for m in range(2):
            engine.backward(loss_of(engine, batch(step * 10 + m, rank)))
        engine.step()
    gathers = count_gathers(engine.gathers.events)
    planned = {("dp", *key): v for key, v in step_traffic(3, engine.traffic_units, engine.dp.size, gathers, 2).items()}
    planned |= {("node", *key): v for key, v in node_traffic(engine.traffic_units, gathers).items()}
    measured = {(e.axis, e.op, e.unit): (e.calls, e.elements, e.bytes) for e in engine.traffic}
    arena = {c: engine.arena.held(c) for c in ("parameters", "padding", "gathered", "bucket", "wire")}
    [layer] = [unit for unit in engine.traffic_units if unit.name == "layers.0"]
    widths = [math.prod(each.as_gathered) for each in (layer, layer._replace(coded=False))]
    return planned, measured, arena, planned_bytes(engine), {e.category: e.planned for e in engine.memory}, widths


@pytest.mark.parametrize("options", [
    CODED | SECOND, *(pytest.param(options, marks=pytest.mark.long) for options in (CODED, SECOND)),
], ids=["both", "coded", "second"])  # fmt: skip
def test_ledger_and_arena_equal_the_formulas(ranks, options):
    for planned, measured, arena, states, held, (travels, plain) in ranks(4, account, options):
        assert measured == {key: tuple(value) for key, value in planned.items()}
        assert arena["parameters"] == states.parameters
        assert ceil(arena["padding"]) == held["padding"]
        assert arena["wire"] == arena["gathered"] == arena["bucket"] == 0
        layer = planned["dp", "all_gather", "layers.0"]
        assert layer.calls == (1 if "second_shard" in options else 4)
        assert ("dp", "all_gather", "embed") in planned or "second_shard" in options
        assert layer.bytes == layer.calls * travels * 3 // 4
        assert travels / plain == pytest.approx((1 + 4 / 256) / 2 if "gather_wire" in options else 1)


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "text"), [
    ({"gather_wire": "int8", "release": "every_step"}, "release='every_use'"),
    ({"gather_wire": "fp8"}, "type one of same, int8"),
    ({"second_shard": 1}, "type 2 or more ranks"),
])  # fmt: skip
def test_what_has_no_gathers_to_change_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        engine_of(**options)


def three_of_four():
    with pytest.raises(MeshError, match=r"4 / 3 = 1\.333 is not whole"):
        engine_of(second_shard=3)
    return engine_of(second_shard=4).second_shard_ranks


def test_neighbours_must_divide_dp_and_all_of_dp_keep_none(ranks):
    assert ranks(4, three_of_four) == [1] * 4
