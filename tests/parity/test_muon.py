"""Muon at any stage and dp: in exact mode the bits of torch.optim.Muon on whole matrices, in one process."""

import meshes
import mixtures
import pytest
import torch
from models import LiftCasts
from muon import STAGES, build, check_going_on, engine_of, states_of, train, written_out
from summands import VOCAB

from zero3d.errors import ConfigError
from zero3d.optim import muon, owners

STEPS = range(2)
BLOCKS = {f"net.layers.{i}.{name}.weight": lambda p: [p] for i in (0, 1) for name in ("up", "down")}


def outcome(cases, summands=8, **options):
    """Of cases (stage, moment of reduction): the curve, the fingerprint, this rank's states, what is not as planned."""
    found = []
    for stage, reduce in cases:
        engine = engine_of(stage=stage, reduce=reduce, summands=summands, **options)
        curve = train(engine, STEPS, summands)
        apart = [(e.category, e.planned, e.measured) for e in engine.memory if e.planned not in (None, e.measured)]
        found.append((curve, engine.fingerprint(), states_of(engine), apart))
    return found


EVERY = [
    (stage, reduce)
    for stage in range(4)
    for reduce in ("every_step", "every_micro_batch")
    if stage > 1 or reduce == "every_step"
]


@pytest.mark.parametrize(("dp", "accumulate", "cases"), [
    (2, 4, STAGES[::2]),  # going on below has other dp
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (1, 8, STAGES[::3]), (2, 4, STAGES), (4, 2, STAGES[::3]),
    )),
    *(pytest.param(dp, accumulate, EVERY, marks=pytest.mark.long) for dp in (1, 2, 4) for accumulate in (1, 4)),
])  # fmt: skip
def test_exact_training_has_the_bits_of_the_written_out_loop(ranks, dp, accumulate, cases):
    results = ranks(dp, outcome, cases, dp * accumulate)
    norms = [float.fromhex(norm) for _, norm in results[0][0][0]]
    wanted = written_out(build(), BLOCKS, norms, steps=len(STEPS), count=dp * accumulate)
    for of_rank in results:
        for _, _, states, apart in of_rank:
            assert apart == []
            assert states
            for name, key, start, values in states:
                assert torch.equal(values, wanted[name, key][start : start + len(values)]), (name, key)
    assert len({(str(curve), states) for of_rank in results for curve, states, *_ in of_rank}) == 1


def offloaded(folder, cases):
    """Of cases of options: curve, fingerprint, what is not as planned."""
    found = []
    for number, case in enumerate(cases):
        case = dict(case)
        if "disk" in case.get("offload", {}).values():
            case["offload"] = case["offload"] | {"directory": str(folder / str(number))}
        engine = engine_of(**({"precision": "bf16", "summands": 4} | case))
        curve = train(engine, STEPS, 4)
        apart = [(e.category, e.place, e.planned, e.measured) for e in engine.memory
                 if e.planned not in (None, e.measured)]  # fmt: skip
        found.append((curve, engine.fingerprint(), apart))
    return found


HOST = {"optimizer": "host"}
PLACES = [{}, {"offload": HOST}, {"master": "split"}, {"offload": HOST | {"params": "host"}, "master": "split"},
          {"offload": {"optimizer": "disk", "params": "disk"}}, {"stage": 0, "offload": HOST}]  # fmt: skip


@pytest.mark.parametrize(
    "places", [[PLACES[0], PLACES[3]], pytest.param(PLACES, marks=pytest.mark.long)], ids=["few", "all"]
)
def test_halves_of_masters_and_states_off_the_device_change_no_bit(ranks, tmp_path, places):
    usual, *others = ranks(2, offloaded, tmp_path, places)[0]
    assert [each[:2] for each in others] == [usual[:2]] * len(others)
    assert [each[2] for each in (usual, *others)] == [[]] * len(places)


# --- other axes -------------------------------------------------------------------------------------

MESHES = [("llama", (1, 2, 1), 3), ("gpt2", (2, 2, 1), 1), ("moe", (1, 2, 2), 0), ("qwen3", (2, 1, 2), 2),
          ("gpt2", (1, 4, 1), 3), ("llama", (2, 2, 1), 2)]  # fmt: skip


def on_meshes(cases):
    """Losses and norms of cases (family, shape, of which shape the list is, stage) in fp64, and a last loss."""
    found = []
    with LiftCasts():
        for family, shape, like, stage in cases:
            count = meshes.count_of(like)
            engine = meshes.engine_of(
                meshes.model_of(family, like), meshes.mesh_of(shape), stage=stage, accumulate=count // shape[0],
                optimizer=muon(lr=0.02),
            )  # fmt: skip
            steps = [meshes.step(engine, number, count) for number in STEPS]
            found.append([*steps, (meshes.evaluated(engine, len(STEPS), count),)])
    return found


def model_and_list(case):
    """What one process needs to know of a case."""
    family, shape, _ = case
    return family, meshes.layers_of(shape), meshes.count_of(shape)


def check_meshes(ranks, cases):
    for world in (2, 4):
        own = [case for case in cases if meshes.world_of(case[1]) == world]
        if own:
            models = list({model_and_list(case): case for case in own}.values())
            alone = ranks(1, on_meshes, [(family, (1, 1, 1), shape, stage) for family, shape, stage in models])[0]
            wanted = dict(zip(map(model_and_list, models), alone, strict=True))
            for result in ranks(world, on_meshes, [(family, shape, shape, stage) for family, shape, stage in own]):
                for case, steps in zip(own, result, strict=True):
                    assert steps == [pytest.approx(step, rel=1e-9) for step in wanted[model_and_list(case)]], case


@pytest.mark.long  # of two meshes and their checkpoints: test_momenta_go_on_over_another_tp_and_pp
@pytest.mark.parametrize("cases", [MESHES], ids=["all"])
def test_meshes_train_like_one_process(ranks, cases):
    check_meshes(ranks, cases)


def with_experts(family, cases, precision="bf16"):
    """Curves of cases (ep, stage) in exact mode."""
    found = []
    for ep, stage in cases:
        engine = mixtures.engine_of(
            mixtures.mixture(family), ep=ep, stage=stage, accumulate=4 // torch.distributed.get_world_size(),
            exact=True, precision=precision, optimizer=muon(lr=0.02), clip_norm=0.05,
        )  # fmt: skip
        apart = [(e.category, e.planned, e.measured) for e in engine.memory if e.planned not in (None, e.measured)]
        assert apart == []
        found.append(mixtures.curve(engine, STEPS, summands=4))
    return found


@pytest.mark.parametrize(("family", "cases"), [
    ("qwen3_moe", [(2, 3)]),
    pytest.param("qwen3_moe", [(1, 3), (2, 1), (4, 3)], marks=pytest.mark.long),
    pytest.param("gpt_oss", [(2, 3), (4, 1)], marks=pytest.mark.long),
], ids=["qwen3_moe", "qwen3_moe at other ep", "gpt_oss"])  # fmt: skip
def test_experts_are_made_orthogonal_one_by_one_at_any_ep(ranks, family, cases):
    of_one = ranks(1, with_experts, family, [(1, 3)])[0]
    assert ranks(4, with_experts, family, cases)[0] == of_one * len(cases)


# --- going on ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_going_on_at_another_dp_is_the_uninterrupted_run(ranks, tmp_path):
    check_going_on(ranks, tmp_path)


# --- other parameters -------------------------------------------------------------------------------


class OddBlock(torch.nn.Module):
    """A convolution, matrices of one row and of one column, one that the next block has, too, and a frozen one."""

    def __init__(self, width, shared):
        super().__init__()
        self.line = torch.nn.Conv1d(width, width, 3, padding=1)
        self.thin, self.tall = torch.nn.Linear(width, 1), torch.nn.Linear(1, width, bias=False)
        self.shared, self.frozen = shared, torch.nn.Linear(width, width).requires_grad_(False)

    def forward(self, x):
        x = x + self.line(x.transpose(1, 2)).transpose(1, 2)
        return self.shared(torch.tanh(self.frozen(x + self.tall(self.thin(x)))))


class Odd(torch.nn.Module):
    def __init__(self, width=40):
        super().__init__()
        shared = torch.nn.Linear(width, width)
        self.embed = torch.nn.Embedding(VOCAB, width)
        self.blocks = torch.nn.ModuleList(OddBlock(width, shared) for _ in range(2))
        self.head = torch.nn.Linear(width, VOCAB)

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def odd():
    torch.manual_seed(7)
    return Odd()


ODD = {f"blocks.{i}.{name}.weight": lambda p: [p.flatten(1)] for i in (0, 1) for name in ("line", "thin", "tall")}
ODD["blocks.0.shared.weight"] = lambda p: [p]


def of_odd(stages, largest):
    """Of stages: curve, this rank's states. largest: elements of a round, so that matrices are larger."""
    usual, owners.ROUND = owners.ROUND, largest
    try:
        found = []
        for stage in stages:
            engine = engine_of(odd(), stage=stage)
            found.append((train(engine, STEPS), states_of(engine)))
        return found
    finally:
        owners.ROUND = usual


def test_convolutions_ties_and_narrow_matrices_have_torchs_bits_at_any_stage(ranks):
    results = ranks(2, of_odd, (0, 1, 3), 1000)
    norms = [float.fromhex(norm) for _, norm in results[0][0][0]]
    model = odd()
    wanted = written_out(model, ODD, norms, steps=len(STEPS))
    assert len(wanted) == 2 * 7 + 3 * 8  # master and momentum of matrices, two moments of embedding, head and biases
    for of_rank in results:
        for _, states in of_rank:
            assert {name for name, *_ in states} <= {name for name, _ in wanted}
            for name, key, start, values in states:
                assert torch.equal(values, wanted[name, key][start : start + len(values)]), (name, key)


# --- without exact mode -----------------------------------------------------------------------------


def plain(stages):
    found = []
    for stage in stages:
        engine = engine_of(stage=stage, exact=False)
        found.append(([(float.fromhex(a), float.fromhex(b)) for a, b in train(engine, range(3))], engine.fingerprint()))
    return found


@pytest.mark.long  # without exact mode in float64: test_momenta_go_on_over_another_tp_and_pp
@pytest.mark.parametrize("dp", [2, 4])
def test_without_exact_mode_the_first_step_agrees_and_later_ones_stay_near(ranks, dp):
    """Rounding of a sum turns into far more where an orthogonal matrix amplifies it: 1e-4 of a loss, measured 2e-5."""
    ((alone, _),) = ranks(1, plain, (1,))[0]
    for curve, _ in ranks(dp, plain, (1, 3))[0]:
        assert curve[0] == pytest.approx(alone[0], rel=1e-6)
        assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in alone], rel=1e-4)


# --- resumed on another mesh ------------------------------------------------------------------------


def on_mesh(folder, shape, stage, steps):
    """Load if there is something, train some steps in fp64, save: losses and norms."""
    with LiftCasts():
        engine = meshes.engine_of(
            meshes.model_of("llama", (1, 1, 2)), meshes.mesh_of(shape), stage=stage,
            accumulate=4 // shape[0], optimizer=muon(lr=0.02),
        )  # fmt: skip
        if steps.start:
            engine.load(folder)
        found = [meshes.step(engine, number, 4) for number in steps]
        engine.save(folder)
        return found


PARTS = [((2, 2, 1), 3, range(1)), ((1, 2, 2), 1, range(1, 2)), ((2, 1, 2), 0, range(2, 3)),
         ((4, 1, 1), 2, range(3, 5))]  # fmt: skip
FEW_PARTS = [((2, 2, 1), 3, range(1)), ((2, 1, 2), 1, range(1, 3))]


@pytest.mark.long
@pytest.mark.parametrize("parts", [FEW_PARTS, pytest.param(PARTS, marks=pytest.mark.long)], ids=["few", "all"])
def test_momenta_go_on_over_another_tp_and_pp(ranks, tmp_path, parts):
    straight = ranks(1, on_mesh, str(tmp_path / "straight"), (1, 1, 1), 1, range(parts[-1][2].stop))[0]
    curve = []
    for shape, stage, steps in parts:  # what a part does with its momenta shows in the next one
        curve += ranks(4, on_mesh, str(tmp_path / "cut"), shape, stage, steps)[0]
    for wanted, found in zip(straight, curve, strict=True):
        assert found == pytest.approx(wanted, rel=1e-8)


# --- refused ----------------------------------------------------------------------------------------


def refused(options):
    with pytest.raises(ConfigError) as caught:
        engine_of(**options)
    return str(caught.value)


def test_what_is_gathered_in_tiles_is_no_matrix(ranks):
    said = ranks(2, refused, {"gather_budget": 16384})[0]
    assert "in tiles" in said
    assert "name: adamw" in said


def averaged(decay):
    engine = engine_of(ema=decay)
    curve = train(engine, STEPS)
    apart = [(e.category, e.planned, e.measured) for e in engine.memory if e.planned not in (None, e.measured)]
    return curve, apart, engine.fingerprint()


@pytest.mark.long
def test_averages_of_weights_change_no_bit_of_training(ranks):
    (curve, apart, states), (usual, _, without) = (ranks(2, averaged, decay)[0] for decay in (0.9, None))
    assert curve == usual
    assert apart == []
    assert states != without


def without_matrices_here():
    """A pipeline whose last stage has none."""
    rule = muon(lr=0.02, match="model.layers.0.*")
    engine = meshes.engine_of(meshes.model_of("llama", (1, 1, 2)), meshes.mesh_of((1, 1, 2)), optimizer=rule, stage=1)
    meshes.step(engine, 0, 2)
    return engine.optimizer.orthogonal.scratch, engine.optimizer.orthogonal.traffic()


def test_a_stage_without_matrices_holds_nothing_for_them(ranks):
    (first, _), (last, sent) = ranks(2, without_matrices_here)
    assert first > 0
    assert (last, sent) == (0, [])
