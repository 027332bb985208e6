"""Experts on an axis of their own: the bits of data parallelism, its bytes and messages by formula, at any ep."""

from collections import defaultdict
from functools import cache
from itertools import pairwise

import pytest
import torch
from mixtures import FAMILIES, curve, engine_of, mixture, own_part, summand, with_adapters
from models import LiftCasts
from pipelines import covering

from zero3d.account.traffic import Moved, step_traffic
from zero3d.activations.recomputation import recompute
from zero3d.errors import ConfigError
from zero3d.expert_parallel.traffic import expert_traffic
from zero3d.zero.tokens import count_gathers

STEPS = range(2)
WORLD, FEW = 4, 4  # ranks, and micro-batches of all of them


def plain_curves(family, precision, meshes, **options):
    """Curves of meshes {ep, stage, ...} without clipping, one engine after the other."""
    engines = (engine_of(mixture(family), precision=precision, **options | mesh) for mesh in meshes)
    return [curve(engine, STEPS, summands=2 * engine.dp.size) for engine in engines]


@pytest.mark.parametrize(("precision", "stages"), [
    ("bf16", (3,)), *(pytest.param(precision, (3, 2), marks=pytest.mark.long) for precision in ("bf16", "fp32")),
], ids=str)  # fmt: skip
def test_plain_training_has_the_bits_of_data_parallelism_where_ep_is_dp(ranks, precision, stages):
    meshes = [{"stage": 3}, *({"stage": stage, "ep": 2} for stage in stages)]
    usual, *others = ranks(2, plain_curves, "qwen3_moe", precision, meshes)[0]
    assert others == [usual] * len(stages)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_bits_of_data_parallelism_where_ep_is_dp(ranks, family):
    for precision, stage in (("fp32", 3), ("bf16", 2)):
        meshes = [{"stage": 3}, {"stage": stage, "ep": 4}]
        usual, other = ranks(WORLD, plain_curves, family, precision, meshes)[0]
        assert other == usual, precision


# --- exact ------------------------------------------------------------------------------------------

EPS, CLIPS, RECOMPUTED = (1, 2, 4), (0.05, None), (False, True)
EXACT_FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
MESHES = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))  # ranks, ep
STAGES = ((0, "every_step"), (1, "every_step"), (2, "every_micro_batch"), (3, "every_micro_batch"), (3, "every_step"))


def exact_curve(family, precision, clip, cases, how="grouped_mm"):
    """Curves of cases (ep, (stage, moment of reduction), recomputed) in exact mode."""
    curves = []
    for ep, (stage, reduce), recomputed in cases:
        model = mixture(family, how)
        if recomputed:
            recompute(model, "full")
        accumulate = 8 // torch.distributed.get_world_size()
        engine = engine_of(
            model, ep=ep, stage=stage, reduce=reduce, accumulate=accumulate, clip_norm=clip, precision=precision,
            exact=True,
        )  # fmt: skip
        curves.append(curve(engine, STEPS))
    return curves


@pytest.mark.long
@pytest.mark.parametrize("cases", [
    [(2, STAGES[3], True)],  # two ranks share the experts of two others
    pytest.param(
        [(1, STAGES[3], False), (2, STAGES[3], True), (4, STAGES[1], False), (2, STAGES[0], False)], marks=pytest.mark.long
    ),
], ids=len)  # fmt: skip
def test_exact_mode_has_one_fingerprint_at_any_dp_and_ep(ranks, cases):
    of_one = ranks(1, exact_curve, "qwen3_moe", "bf16", 0.05, [(1, STAGES[3], False)])[0]
    assert ranks(WORLD, exact_curve, "qwen3_moe", "bf16", 0.05, cases)[0] == of_one * len(cases)


@pytest.fixture(scope="module")
def by_family():
    """family -> {(precision, clip, ranks): cases}; of all families together the fewest that have all pairs of settings."""
    found = {family: defaultdict(list) for family in EXACT_FAMILIES}
    for family, precision, clip, (world, ep), stage, recomputed in covering(
        (EXACT_FAMILIES, ("fp32", "bf16"), CLIPS, MESHES, STAGES, RECOMPUTED)
    ):
        found[family][precision, clip, world].append((ep, stage, recomputed))
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_exact_mode_has_one_fingerprint_over_all_settings(ranks, by_family, family):
    of_one = cache(lambda *settings: ranks(1, exact_curve, family, *settings, [(1, STAGES[3], False)])[0])
    for (precision, clip, world), cases in by_family[family].items():
        found = ranks(world, exact_curve, family, precision, clip, cases)[0]
        assert found == of_one(precision, clip) * len(cases), (precision, clip, world, cases)


@pytest.mark.long
@pytest.mark.parametrize("how", ["eager", "batched_mm"])
def test_exact_mode_has_one_fingerprint_however_transformers_computes(ranks, how):
    of_one = ranks(1, exact_curve, "qwen3_moe", "fp32", 0.05, [(1, STAGES[3], False)], how)[0]
    cases = [(ep, STAGES[3], False) for ep in EPS]
    assert ranks(WORLD, exact_curve, "qwen3_moe", "fp32", 0.05, cases, how)[0] == of_one * len(cases)


# --- off the device ---------------------------------------------------------------------------------


def off_the_device(folder, cases):
    """Curves of cases (ep, stage, exact, offload), and what was not held as planned."""
    found = []
    for number, (ep, stage, exact, offload) in enumerate(cases):
        if "disk" in offload.values():
            offload = offload | {"directory": str(folder / str(number))}
        engine = engine_of(ep=ep, stage=stage, exact=exact, precision="bf16", offload=offload, clip_norm=0.05)
        losses, fingerprint = curve(engine, STEPS, summands=2 * engine.dp.size)
        states = [entry for entry in engine.memory if entry.planned is not None]
        apart = [(each.category, each.place) for each in states if each.planned != each.measured]
        found.append((losses, fingerprint, apart))
    return found


HOST = {"optimizer": "host", "params": "host"}


@pytest.mark.parametrize("offload", [
    HOST | {"gradients": "host"}, pytest.param(HOST, marks=pytest.mark.long),
], ids=len)  # fmt: skip
def test_experts_off_the_device_change_no_bit(ranks, tmp_path, offload):
    usual, away = ranks(2, off_the_device, tmp_path, [(2, 3, False, {"optimizer": "none"}), (2, 3, False, offload)])[0]
    assert away == usual
    assert usual[-1] == []


@pytest.mark.long
def test_experts_on_a_disk_and_their_moments_in_bf16_change_no_bit_at_any_ep(ranks, tmp_path):
    disk = {"optimizer": "disk", "params": "disk"}
    for narrow in ({}, {"moments": "bf16"}):
        cases = [(ep, stage, True, offload | narrow) for ep, stage, offload in (
            (1, 3, {"optimizer": "host"}), (4, 3, disk), (2, 3, HOST), (2, 1, {"optimizer": "disk"}),
        )]  # fmt: skip
        usual, *others = ranks(WORLD, off_the_device, tmp_path / str(len(narrow)), cases)[0]
        assert others == [usual] * 3
        assert usual[-1] == []


# --- one process ------------------------------------------------------------------------------------


def losses_in_fp64(family, ep, experts, dp=None, pp=None):
    engine = engine_of(
        mixture(family, "eager"), ep=ep, dp=dp, pp=pp, precision="fp64", clip_norm=0.05, experts=experts,
    )  # fmt: skip
    losses = []
    with LiftCasts():
        for step in STEPS:
            loss = engine.train_batch(own_part(engine, step, summands=FEW))
            losses += [float(loss), float(engine.last_step.grad_norm)]
    return losses


@pytest.fixture(scope="module")
def one_process(ranks):
    """family -> losses and norms of one process, each once."""
    return cache(lambda family: ranks(1, losses_in_fp64, family, 1, "exact")[0])


@pytest.mark.parametrize(("experts", "world"), [
    ("exact", 4), ("fast", 2), pytest.param("exact", 2, marks=pytest.mark.long), pytest.param("fast", 4, marks=pytest.mark.long),
])  # fmt: skip
def test_losses_and_norms_are_those_of_one_process(ranks, one_process, experts, world):
    alone = one_process("qwen3_moe")
    assert ranks(world, losses_in_fp64, "qwen3_moe", 2, experts)[0] == pytest.approx(alone, rel=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_of_families_are_those_of_one_process(ranks, one_process, family):
    alone = one_process(family)
    for experts in ("exact", "fast"):
        assert ranks(WORLD, losses_in_fp64, family, 2, experts)[0] == pytest.approx(alone, rel=1e-10), experts


@pytest.mark.long
def test_pipelines_of_experts_are_one_process(ranks, one_process):
    alone = one_process("qwen3_moe")
    assert ranks(WORLD, losses_in_fp64, "qwen3_moe", 2, "exact", 2, 2)[0] == pytest.approx(alone, rel=1e-10)


# --- adapters ---------------------------------------------------------------------------------------


def adapted(folder, ep, dp=None, pp=None):
    """Losses and norms in fp64; what was saved, and whether a resume at another ep has the same states."""
    engine = engine_of(with_adapters("eager"), ep=ep, dp=dp, pp=pp, precision="fp64", clip_norm=0.05)
    losses = []
    with LiftCasts():
        for step in STEPS:
            loss = engine.train_batch(own_part(engine, step, summands=FEW))
            losses += [float(loss), float(engine.last_step.grad_norm)]
    engine.save(folder)
    again = engine_of(with_adapters("eager"), precision="fp64")
    again.load(folder)
    engine.export(folder / "adapter")
    engine.export(folder / "merged", "merged")
    return losses, again.fingerprint() == engine.fingerprint()


@pytest.mark.long
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_adapters_of_shared_experts_are_those_of_one_process(ranks, tmp_path, world):
    from safetensors.torch import load_file

    alone, _ = ranks(1, adapted, tmp_path / "1", 1)[0]
    losses, same = ranks(world, adapted, tmp_path / "shared", 2)[0]
    assert losses == pytest.approx(alone, rel=1e-10)
    assert same
    for name in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        one, shared = (load_file(tmp_path / folder / name) for folder in ("1", "shared"))
        assert one.keys() == shared.keys()
        for key, values in one.items():
            torch.testing.assert_close(shared[key], values, rtol=1e-7, atol=1e-9)


# --- routing ----------------------------------------------------------------------------------------


def biased(favour, experts=8):
    """A mixture whose routers prefer some experts: others get no token."""
    model = mixture()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                p.zero_()
                p[favour] = 1.0
    return model


def routed(favour, ep, lengths, stage=3):
    engine = engine_of(biased(favour), ep=ep, stage=stage)
    before = {name: p.clone() for name, p in mixture().named_parameters() if "experts" in name}
    losses = [float(engine.train_batch([summand(step, engine.dp.rank, length)])).hex() for step, length in lengths]
    with engine.full_params():
        here = engine.mesh.place.dp % ep * (8 // ep)
        starved = {
            name: torch.equal(p[number], before[name][here + number])
            for name, p in engine.module.named_parameters() if "experts" in name
            for number in range(len(p)) if here + number not in favour
        }  # fmt: skip
    return losses, engine.fingerprint(), any(starved.values())


@pytest.mark.parametrize("favour", [[0, 7], *(pytest.param(few, marks=pytest.mark.long) for few in ([0, 1], [5]))])
def test_experts_without_tokens_decay_like_parameters_without_gradient(ranks, favour):
    lengths = [(0, 3), (1, 17)]
    usual, shared = (ranks(2, routed, favour, ep, lengths) for ep in (1, 2))
    assert [result[:2] for result in shared] == [result[:2] for result in usual]
    assert not any(unchanged for *_, unchanged in shared)  # weight decay is on


def uneven(ep):
    """Micro-batches of another length on every rank."""
    engine = engine_of(ep=ep)
    losses = [float(engine.train_batch([summand(step, 0, 3 + 5 * engine.dp.rank)])).hex() for step in STEPS]
    return losses, engine.fingerprint()


def test_lengths_may_differ_between_ranks(ranks):
    assert ranks(2, uneven, 2) == ranks(2, uneven, 1)


# --- accounts ---------------------------------------------------------------------------------------


def accounts(ep, stage, exact, accumulate, experts="exact"):
    """Whether a step's ledger, and the arena's bytes, are what formulas say; the boxes of experts that were asked for."""
    asked, model = [], mixture()
    values = dict(model.named_parameters())
    for module in model.modules():
        for key, p in module._parameters.items():
            module._parameters[key] = None if p is None else torch.nn.Parameter(p.to("meta"))

    def source(name, box):
        asked.append((name, box))
        return values[name].detach()[tuple(slice(*edges) for edges in box)]

    engine = engine_of(model, ep=ep, stage=stage, exact=exact, accumulate=accumulate, experts=experts, weights=source)
    engine.train_batch(own_part(engine, 0)[:accumulate])
    before = {name: dispatch.passed for name, dispatch in engine.experts.dispatches.items()}
    engine.traffic.reset()
    engine.gathers.events = []
    engine.train_batch(own_part(engine, 1)[:accumulate])
    gathers = count_gathers(engine.gathers.events)
    planned = step_traffic(
        stage, engine.traffic_units, engine.dp.size, gathers, accumulate, engine.policy.reduce, exact,
        engine.experts.anywhere,
    )  # fmt: skip
    loss = 2 * (engine.dp.size - 1) * (accumulate if exact else 1)
    planned["exchange", "-"] = Moved(*map(sum, zip(planned["exchange", "-"], (1, loss, 8 * loss), strict=True)))
    counts = Moved(0, 0, 0)
    for name, dispatch in engine.experts.dispatches.items():
        moved = expert_traffic(dispatch.passed.plus(before[name], -1), 32, 4, 8, ep)
        planned["pass_rows", name] = moved["pass_rows"]
        counts = Moved(*map(sum, zip(counts, moved["exchange"], strict=True)))
    ledger, of_counts = {}, Moved(0, 0, 0)
    for entry in engine.traffic:
        moved = Moved(entry.calls, entry.elements, entry.bytes)
        if (entry.op, entry.axis) == ("exchange", "ep"):
            of_counts = moved
        elif entry.calls:
            ledger[entry.op, entry.unit] = moved
    states = [entry for entry in engine.memory if entry.planned is not None]
    uneven = [(entry.category, entry.planned, entry.measured) for entry in states if entry.planned != entry.measured]
    own = {box[0] for name, box in asked if "experts" in name}
    return ledger == planned and of_counts == counts, uneven, (min(own)[0], max(own)[1])


@pytest.mark.parametrize(("ep", "stage", "exact", "accumulate"), [
    (2, 3, False, 1),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [(4, 2, True, 2), (2, 1, False, 2), (4, 0, True, 1)]),
])  # fmt: skip
def test_messages_and_bytes_are_what_formulas_say_and_no_rank_asks_for_others_experts(
    ranks, ep, stage, exact, accumulate
):
    found = ranks(WORLD, accounts, ep, stage, exact, accumulate)
    assert [result[:2] for result in found] == [(True, [])] * WORLD
    per_rank = 8 // ep
    for rank, (*_, (first, last)) in enumerate(found):
        assert rank % ep * per_rank <= first
        assert last <= (rank % ep + 1) * per_rank


# --- checkpoints ------------------------------------------------------------------------------------


def saved(folder, ep, exact=False):
    engine = engine_of(ep=ep, exact=exact)
    _, fingerprint = curve(engine, STEPS, summands=FEW)
    engine.save(folder)
    engine.export(folder / "hf")
    return fingerprint


def resumed(folder, ep):
    engine = engine_of(ep=ep)
    engine.load(folder)
    fingerprint = engine.fingerprint()
    engine.export(folder / f"hf-{ep}")
    return fingerprint


@pytest.mark.parametrize("eps", [(1,), pytest.param((4, 1), marks=pytest.mark.long)], ids=str)
def test_states_resume_at_any_ep_and_exports_are_the_same(ranks, tmp_path, eps):
    import transformers

    fingerprint = ranks(2, saved, tmp_path, 2)[0]
    assert {each for ep in eps for each in ranks(ep, resumed, tmp_path, ep)} == {fingerprint}
    folders = ("hf", *(f"hf-{ep}" for ep in eps))
    found = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in folders]
    for one, other in pairwise(found):
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


MOVES = [  # ranks, tp, pp, ep
    (1, None, None, 1), (2, None, None, 2), (4, None, None, 4), (4, 2, None, 2), (4, None, 2, 2), (8, 2, 2, 2),
]  # fmt: skip


@pytest.mark.long
def test_states_resume_over_all_meshes(ranks, tmp_path):
    saved = [ranks(world, moved_on, tmp_path / str(n), n, ep, tp, pp)[0] for n, (world, tp, pp, ep) in enumerate(MOVES)]
    assert len(set(saved)) == len(MOVES)  # a load that changes nothing is seen
    folders = [tmp_path / str(number) for number in range(len(MOVES))]
    for world, tp, pp, ep in MOVES:
        assert ranks(world, all_resumed, folders, ep, tp or 1, pp) == [saved] * world


def moved_on(folder, number, ep, tp, pp):
    engine = engine_of(ep=ep, tp=tp, pp=pp)
    engine.train_batch(own_part(engine, number))
    engine.save(folder)
    return engine.fingerprint()


def all_resumed(folders, ep, tp, pp):
    """Fingerprints of one engine that loads one folder after the other."""
    engine, found = engine_of(ep=ep, tp=tp, pp=pp), []
    for folder in folders:
        engine.load(folder)
        found.append(engine.fingerprint())
    return found


# --- refused ----------------------------------------------------------------------------------------


def refusal(ep, **options):
    family = options.pop("family", "qwen3_moe")
    with pytest.raises(ConfigError) as caught:
        engine_of(mixture(family) if family in FAMILIES else options.pop("model")(), ep=ep, **options)
    return str(caught.value)


def net():
    from models import hf

    return hf("llama")


def test_what_cannot_be_says_why(ranks):
    told = ranks(2, refusals)[0]
    assert "experts='quick' is unknown: type one of exact, fast" in told[0]
    assert "type experts='exact'" in told[1]
    assert "no plan names any in LlamaForCausalLM" in told[2]
    assert "nothing in Qwen3MoeForCausalLM has that name" in told[3]
    assert "unknown style 'rowwise'" in told[4]
    assert "the neighbour holds other experts: leave replay=2 out" in told[5]


def refusals():
    return [
        refusal(2, experts="quick"),
        refusal(2, experts="fast", exact=True),
        refusal(2, family="none", model=net),
        refusal(2, ep_plan={"layers.*.mlp.exports": "ep_dispatch_experts"}),
        refusal(2, ep_plan={"layers.*.mlp.experts": "rowwise"}),
        refusal(2, replay=2),
    ]


def split_backward():
    with pytest.raises(ConfigError) as caught:
        engine_of(ep=2, pp=2, schedule="zero-bubble")
    return str(caught.value)


def test_schedules_that_split_the_backward_are_refused(ranks):
    assert "type schedule='1f1b' or schedule='interleaved'" in ranks(WORLD, split_backward)[0]


def generated(ep):
    """What every rank generates from a prompt of its own; one of them ends early."""
    engine = engine_of(ep=ep)
    curve(engine, range(1), summands=FEW)
    rank = engine.dp.rank
    prompt = summand(9, rank, 4 + 3 * rank)["input_ids"]
    begun = engine.generate(prompt, 3)
    engine.module.generation_config.eos_token_id = int(begun[0, -1]) if rank else 1
    return engine.generate(prompt, 6).tolist(), float(engine.evaluate([summand(8, rank)]))


def test_generation_and_evaluation_with_shared_experts_are_those_without(ranks):
    assert ranks(2, generated, 2) == ranks(2, generated, 1)


def exact_adapters():
    with pytest.raises(ConfigError) as caught:
        engine_of(with_adapters(), ep=2, exact=True)
    return str(caught.value)


def test_adapters_of_shared_experts_are_refused_in_exact_mode(ranks):
    assert "leave ep, exact or these adapters out" in ranks(2, exact_adapters)[0]


def odd():
    with pytest.raises(ConfigError) as caught:
        engine_of(mixture(num_experts=7), ep=2)
    return str(caught.value)


def test_experts_that_ep_does_not_divide_are_refused(ranks):
    assert "7 / 2 = 3.5 is not a whole number. Pass an ep that divides them (1, 7)" in ranks(2, odd)[0]
