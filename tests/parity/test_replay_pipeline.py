"""health.replay in pipelines: all stages of a dp rank compute a neighbour's micro-batch; the stage at fault is named."""

from itertools import count, product

import pytest
import torch
from models import Block, adamw, hf
from pipelines import Lm, engine_of, micro_batches
from test_replay import break_down, flip

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.errors import CorruptionError
from zero3d.precision import LossScaling, Precision
from zero3d.zero.tokens import count_gathers

LONG = pytest.mark.long
STEPS = 4


def replaying(options):
    """An engine over dp=2 x pp=2, with dropout."""
    options = {"stage": 3, "dp": 2, "tied": False} | options
    torch.manual_seed(7)
    model = Lm(width=24, layers=4, dropout=0.2, tied=options.pop("tied"))
    recompute(model, options.pop("activations", "none"))
    engine = engine_of(model, zero3d.Mesh(dp=options.pop("dp"), pp=2), optimizer=adamw, **options)
    torch.manual_seed(100 + engine.world.rank)
    return engine


def batches(engine, step):
    rank = engine.dp.rank
    return micro_batches(step, rank, size=2 + rank, length=5 + rank)  # of different sizes


def train(engine, steps=STEPS):
    """What must be the same with replays and without them, and what the replays say."""
    found = []
    for step in range(steps):
        engine.gathers.events = []
        engine.traffic.reset()
        loss = engine.train_batch(batches(engine, step)).item().hex()
        peak = [engine.arena.peak(category) for category in ("bucket", "gathered")]
        found.append((loss, count_gathers(engine.gathers.events), sorted(engine.traffic), peak))
    state, clean = torch.get_rng_state().tolist(), engine.replay and (engine.replay.clean, engine.replay.count)
    return (found, engine.fingerprint(), state, engine.loss_scale.value), clean


def both(options):
    return [train(replaying(options | each)) for each in ({}, {"replay": 2})]


OPTIONS = [
    *(
        pytest.param(options, marks=LONG)
        for options in (
            {"stage": 3, "schedule": "1f1b", "release": "every_use"},
            *({"stage": stage, "tied": stage < 2} for stage in (0, 1, 2, 3)),
            {"schedule": "gpipe", "activations": "full"},
            *({"schedule": name, "release": "every_use"} for name in ("interleaved", "zero-bubble", "zbv")),
            {"schedule": "zbv", "tied": True, "stage": 2, "reduce": "every_micro_batch"},
            {"stage": 2, "precision": Precision("fp16", LossScaling(16.0))},
            {"stage": 3, "exact": True, "activations": "full"},
            {"stage": 3, "exact": True, "schedule": "interleaved"},
            {"stage": 3, "offload": {"optimizer": "host", "params": "host"}},
            {"stage": 3, "precision": "bf16", "dp": 1},
        )
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_run_with_replays_is_the_run_without_them_bit_for_bit(ranks, options):
    for (plain, none), (replayed, clean) in ranks(2 * options.get("dp", 2), both, options):
        for one, other in zip(plain[0], replayed[0], strict=True):
            assert one == other
        assert plain[1:] == replayed[1:]
        assert (none, clean) == (None, (STEPS - 1, STEPS // 2))


def of_one_micro_batch():
    """Without replays and with them: losses and weights of steps of one micro-batch; the last step found clean."""
    found = []
    for replay in (0, 1):
        engine = replaying({"dp": 1, "stage": 1, "schedule": "gpipe", "accumulate": 1, "replay": replay})
        losses = [engine.train_batch(micro_batches(step, 0, 1)).item() for step in range(2)]
        found.append((losses, engine.fingerprint()))
    return *found, engine.replay.clean


def test_steps_of_one_micro_batch_are_replayed_apart_from_their_own_schedule(ranks):
    for plain, replayed, clean in ranks(2, of_one_micro_batch):
        assert replayed == plain
        assert clean == 1


@LONG
def test_dp_ranks_that_take_turns_see_nothing_in_a_sound_run(ranks):
    found = ranks(6, sound, {"dp": 3, "replay": 1})
    assert set(found) == {(2, 3)}


def sound(options):
    return train(replaying(options), steps=3)[1]


# --- faults -----------------------------------------------------------------------------------------


def break_forward(engine, rank, name, forwards):
    """Flip a bit of a module's output on one rank, in these of its forwards, counted from 1."""
    seen = count(1)
    if engine.world.rank == rank:
        module = engine.module.get_submodule(name)
        module.register_forward_hook(lambda *given: flip(given[-1], 5, 12) if next(seen) in forwards else None)


def break_input_gradient(engine, rank, name, backwards):
    """Flip a bit of what a block hands back on one rank."""
    seen = count(1)

    def watch(module, args):
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: flip(grad, 5, 12) if next(seen) in backwards else None)

    if engine.world.rank == rank:
        engine.module.get_submodule(f"{name}.norm").register_forward_pre_hook(watch)


def accused(rank, how, backwards, options, steps=1):
    """Train with a fault on one rank; its error, and whether anything was applied."""
    engine = replaying({"replay": 1} | options)
    block = next(name for name, module in engine.module.named_modules() if isinstance(module, Block))
    if how == "parameter":
        break_down(engine, rank, backwards, f"{block}.up.weight")
    else:
        (break_forward if how == "forward" else break_input_gradient)(engine, rank, block, backwards)
    before = engine.fingerprint()
    for step in range(steps):
        try:
            engine.train_batch(batches(engine, step))
        except CorruptionError as error:
            same = engine.fingerprint() == before and engine.steps == 0
            engine.train_batch(batches(engine, step))  # the pipeline is not broken
            return str(error), error.from_rank, error.exit_code, same, engine.steps
    return None


WHERE = {  # by pipeline stage
    "parameter": ["unit 'layers.0', parameter layers.0.up.weight", "unit 'layers.2', parameter layers.2.up.weight"],
    "forward": ["the output of model chunk 0 of 2 (units 'embed' to 'layers.1')",
                "the loss behind model chunk 1 of 2 (units 'layers.2' to 'head')"],
    "input gradient": ["unit 'embed', parameter embed.weight",
                       "the gradient that leaves model chunk 1 of 2 (units 'layers.2' to 'head')"],
}  # fmt: skip
# Of a step's four micro-batches the first is watched, in turn 1; the fifth of a rank is the neighbour's, computed again.


@pytest.mark.parametrize(
    ("how", "rank", "backward"),
    [
        pytest.param(*case, marks=() if case == ("forward", 0, 1) else LONG)
        for case in product(("parameter", "forward", "input gradient"), range(4), (1, 5))
    ],
)
def test_a_flip_is_found_before_the_update_and_its_rank_and_stage_named(ranks, how, rank, backward):
    told = ranks(4, accused, rank, how, (backward,), {})
    for message, _, code, same, steps in told:
        assert f"in step 1 rank {rank} (" in message
        assert "computed two different gradients of one micro-batch" in message
        assert [each for each in range(4) if f"rank {each} (" in message] == [rank]
        assert f"First in {WHERE[how][rank // 2]}. The step is not applied." in message
        assert (code, same, steps) == (1, True, 1)
    assert [from_rank for _, from_rank, *_ in told].count(None) == 1


def first_of_two(forward_of):
    """Train over pp=2 with four model chunks, with a fault in one's forward and in the last one's backward; the error.

    Both are in the watched micro-batch alone.
    """
    engine = replaying({"replay": 1, "dp": 1, "schedule": "interleaved"})
    for number, chunk in engine.chunks.items():
        block, module = next((name, each) for name, each in chunk.named_modules() if isinstance(each, Block))
        backwards, forwards = count(1), count(1)
        if number == 3:
            parameter = dict(chunk.named_parameters())[f"{block}.up.weight"]
            parameter.register_hook(lambda grad, seen=backwards: flip(grad, 5, 3) if next(seen) == 1 else grad)
        if number == forward_of:
            module.register_forward_hook(
                lambda *given, seen=forwards: flip(given[-1], 5, 12) if next(seen) == 1 else None
            )
    with pytest.raises(CorruptionError) as found:
        engine.train_batch(batches(engine, 0))
    return str(found.value)


@pytest.mark.parametrize(("forward_of", "named"), [
    (None, "unit 'layers.3', parameter layers.3.up.weight"), (3, "the loss behind model chunk 3 of 4"),
    (0, "the output of model chunk 0 of 4"),
], ids=["backward", "last", "first"])  # fmt: skip
def test_what_differs_in_a_forward_is_named_before_what_differs_in_a_backward(ranks, forward_of, named):
    for said in ranks(2, first_of_two, forward_of):
        assert f"First in {named}" in said


# --- with a tensor-parallel axis --------------------------------------------------------------------


def accused_of_eight(rank, backwards):
    """Train over dp=2 x tp=2 x pp=2; the alarm, or the losses."""
    engine = engine_of(hf("llama", vocab=64), zero3d.Mesh(dp=2, tp=2, pp=2), replay=1)
    name = next(name for name, _ in engine.module.named_parameters() if name.endswith("mlp.up_proj.weight"))
    break_down(engine, rank, backwards, name)
    try:
        return [engine.train_batch(batches(engine, step)).item() for step in range(2)], engine.replay.count
    except CorruptionError as error:
        return str(error)


@LONG
def test_of_eight_ranks_the_one_is_named(ranks):
    sound = ranks(8, accused_of_eight, 0, ())
    assert sound == sound[:1] * 8
    assert sound[0][1] == 2
    for rank in (1, 6):
        (message,) = set(ranks(8, accused_of_eight, rank, (1,)))
        assert [each for each in range(8) if f"rank {each} (" in message] == [rank]
