"""health.replay: gradients computed twice. A replay changes no bit and no count; a flipped bit is found and named."""

from itertools import count, product
from unittest import mock

import pytest
import torch
from models import adamw, batch, hf
from torch import nn

import zero3d
from zero3d.engine.replay.replay import machine_of
from zero3d.errors import ConfigError, CorruptionError
from zero3d.precision import LossScaling, Precision
from zero3d.zero.tokens import count_gathers

WIDTH, ROWS, MICRO = 24, 6, 2


class Norms(nn.Module):
    """Blocks with dropout, batch norm, and a buffer that the forward both reads and writes."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        self.calls.mul_(1.01)
        return self.calls * self.head(x)


def squares(output, given):
    return output.float().square().sum(), float(len(output))


def inputs(step, rank, k, rows):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + k)
    return torch.randn(rows, WIDTH, generator=generator)


def engine_of(model=None, mesh=None, **options):
    torch.manual_seed(7)
    norm = nn.BatchNorm1d if options.get("precision", "fp32") == "fp32" else nn.LayerNorm  # torch's needs one dtype
    model = Norms(norm) if model is None else model
    made = {"precision": "fp32", "optimizer": adamw, "clip_norm": 0.05, "loss": squares, "accumulate": MICRO} | options
    engine = zero3d.Engine(model, mesh=mesh, **made)
    torch.manual_seed(100 + engine.dp.rank)
    return engine


def batches(engine, step, micro=MICRO):
    rank = engine.dp.rank
    return [inputs(step, rank, k, ROWS + rank + k) for k in range(micro)]  # of different sizes


def train(steps, options):
    """What must be the same with replays and without them, and what the replays say."""
    engine = engine_of(**options)
    losses, gathers = [], []
    for step in range(steps):
        engine.gathers.events = []
        losses.append(engine.train_batch(batches(engine, step)).item().hex())
        gathers.append(count_gathers(engine.gathers.events))
    clean = None if engine.replay is None else (engine.replay.clean, engine.replay.count)
    buffers = [buffer.tolist() for buffer in engine.module.buffers()]
    state = torch.get_rng_state().tolist()
    return (
        losses,
        engine.fingerprint(),
        buffers,
        state,
        gathers,
        sorted(engine.traffic),
        engine.loss_scale.value,
    ), clean


LONG = pytest.mark.long
OPTIONS = [
    {"stage": 3},
    *(
        pytest.param(options, marks=LONG)
        for options in (
            {"stage": 0, "exact": True, "reduce": "every_step"},
            *({"stage": stage} for stage in (0, 1, 2)),
            {"stage": 3, "release": "every_step"},
            {"stage": 3, "reduce": "every_step", "precision": "bf16"},
            {"stage": 2, "precision": Precision("fp16", LossScaling(16.0))},
            {"stage": 3, "exact": True},
            {"stage": 3, "offload": {"optimizer": "host", "params": "host"}},
        )
    ),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_run_with_replays_is_the_run_without_them_bit_for_bit(ranks, options):
    plain = ranks(2, train, 4, options)
    replayed = ranks(2, train, 4, options | {"replay": 2})
    assert [same for same, _ in plain] == [same for same, _ in replayed]
    assert {clean for _, clean in replayed} == {(3, 2)}


@pytest.mark.parametrize("world", [pytest.param(1, marks=LONG), 3])
def test_one_rank_and_three_that_take_turns_see_nothing_in_a_sound_run(ranks, world):
    found = ranks(world, train, 4, {"stage": 3, "replay": 1})
    assert {clean for _, clean in found} == {(3, 4)}


# --- faults -----------------------------------------------------------------------------------------

LAYER, ALWAYS = "layers.1.0.weight", range(1, 100)


def flip(grad, place, bit):
    """A gradient with one bit changed."""
    changed = grad.clone()
    words = changed.view(-1).view({2: torch.int16, 4: torch.int32}[grad.element_size()])
    words[place % len(words)] ^= 1 << bit
    return changed


def break_down(engine, rank, backwards, name=LAYER, place=5, bit=3):
    """Flip a bit of a parameter's gradient on one rank, in these of its backwards, counted from 1."""
    seen = count(1)
    if engine.world.rank == rank:
        p = dict(engine.module.named_parameters())[name]
        p.register_hook(lambda grad: flip(grad, place, bit) if next(seen) in backwards else grad)


def accused(rank, backwards, options, steps=1):
    """Train with a fault on one rank; its error, and whether anything was applied."""
    engine = engine_of(**{"replay": 1} | options)
    break_down(engine, rank, backwards)
    before = engine.fingerprint()
    for step in range(steps):
        try:
            engine.train_batch(batches(engine, step))
        except CorruptionError as error:
            return str(error), error.from_rank, error.exit_code, engine.fingerprint() == before, engine.steps
    return None


@pytest.mark.parametrize(
    ("stage", "rank", "backward"),
    [
        pytest.param(*case, marks=() if case in ((3, 1, 1), (0, 0, 2)) else LONG)
        for case in product((0, 3), (0, 1), (1, 2))  # again, or in the step
    ],
)
def test_a_flip_is_found_before_the_update_and_its_rank_named(ranks, stage, rank, backward):
    told = ranks(2, accused, rank, (backward,), {"stage": stage})
    for message, _, code, same, steps in told:
        assert f"in step 1 rank {rank} (" in message
        assert "computed two different gradients of one micro-batch" in message
        assert f"First in unit 'layers.1', parameter {LAYER}. The step is not applied." in message
        assert (code, same, steps) == (1, True, 0)
    assert [from_rank for _, from_rank, *_ in told].count(None) == 1  # it is told once


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=LONG), pytest.param(2, marks=LONG)])
def test_two_ranks_outvote_one_that_is_wrong_each_time(ranks, rank):
    told = ranks(3, accused, rank, ALWAYS, {"stage": 3}, 2)  # in the first turn one of three is alone
    assert {f"rank {rank} (" in message for message, *_ in told} == {True}
    assert {"another gradient of one micro-batch than two other ranks, each time" in told[0][0]} == {True}
    assert sum(f"rank {each} (" in told[0][0] for each in range(3)) == 1


def test_of_two_ranks_that_differ_each_time_both_are_named(ranks):
    message, *_ = ranks(2, accused, 1, ALWAYS, {"stage": 3})[0]
    assert "rank 0 (" in message
    assert "rank 1 (" in message
    assert "one of them is wrong, and a third dp rank would say which" in message


def on_other_kernels(backwards):
    """Train where rank 1 has kernels of another name, and other bits in these of its backwards."""
    name = f"kernels of rank {torch.distributed.get_rank()}"
    with mock.patch("zero3d.engine.replay.replay.products", return_value=name):
        told = accused(1, backwards, {"stage": 3}, 3)
        return told, engine_of(replay=1).notes


def test_ranks_whose_kernels_differ_accuse_nobody_of_it_and_say_so(ranks):
    for told, notes in ranks(2, on_other_kernels, ALWAYS):
        assert told is None
        assert len(notes) == 1
        assert "kernels of rank 0" in notes[0]
        assert "rank 1 on" in notes[0]
        assert (
            "each rank computes its own micro-batch twice; a fault that a rank repeats each time is not seen"
            in notes[0]
        )
    assert [told[0].count("rank 1 (") for told, _ in ranks(2, on_other_kernels, (2,))] == [1, 1], "what it does once is"


class Grows(nn.Module):
    """A table that longer inputs make longer, and how long it is beside it, as dynamic NTK has them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        self.linear, self.longest = nn.Linear(WIDTH, 1), 2

    def forward(self, x):
        if len(x) > self.longest:
            self.longest, self.table = torch.tensor(len(x)), self.table * len(x)
        return self.linear(x * self.table) / self.longest


def growing(replay):
    """Losses of micro-batches that get longer, and how long the table is."""
    torch.manual_seed(7)
    engine = engine_of(Grows(), replay=replay)
    losses = [engine.train_batch(batches(engine, step)).item() for step in range(2)]
    return losses, int(engine.module.longest)


def test_numbers_beside_buffers_are_those_of_the_micro_batch_that_is_computed(ranks):
    assert ranks(2, growing, 1) == ranks(2, growing, 0)


def test_ranks_with_other_threads_are_unlike(monkeypatch):
    here = machine_of(torch.device("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert machine_of(torch.device("cpu")) != here


def test_a_rank_alone_finds_what_it_does_not_do_twice(alone):
    message, *_ = alone(accused, 0, (2,), {"stage": 3})
    assert "rank 0 (" in message


def recovered(options):
    """Losses of a run that meets a fault in its second step, and takes that step again."""
    engine = engine_of(**options)
    break_down(engine, 1, (6,) if options["replay"] else ())  # the 4th to 6th: of the second step
    losses = []
    for step in (0, 1, 1, 2):
        state = torch.get_rng_state()
        held = [buffer.clone() for buffer in engine.module.buffers()]
        try:
            losses.append(engine.train_batch(batches(engine, step)).item().hex())
        except CorruptionError:
            torch.set_rng_state(state)
            for buffer, values in zip(engine.module.buffers(), held, strict=True):
                buffer.copy_(values)
    return losses


@LONG
def test_after_an_alarm_the_engine_is_as_before_the_step(ranks):
    found = ranks(2, recovered, {"stage": 3, "replay": 1})
    assert len(found[0]) == 3
    plain = ranks(2, train, 3, {"stage": 3})
    assert found == [same[0] for same, _ in plain]


# --- with a tensor-parallel axis --------------------------------------------------------------------


def accused_of_four(rank, backwards):
    """Train a model over dp=2 x tp=2; the alarm, or the losses."""
    engine = zero3d.Engine(
        hf("llama", vocab=64), mesh=zero3d.Mesh(dp=2, tp=2), stage=3, precision="fp32", optimizer=adamw, replay=1
    )
    break_down(engine, rank, backwards, "model.layers.0.mlp.up_proj.weight")
    try:
        losses = []
        for step in range(2):
            ids = batch(10 * step + engine.dp.rank)
            losses.append(engine.train_batch([{"input_ids": ids, "labels": ids}]).item())
        return losses, sorted(engine.traffic)
    except CorruptionError as error:
        return str(error)


@LONG
def test_four_ranks_that_share_layers_see_nothing_in_a_sound_run(ranks):
    sound = ranks(4, accused_of_four, 0, ())
    assert len({tuple(losses) for losses, _ in sound}) == 1


@pytest.mark.parametrize("rank", [pytest.param(0, marks=LONG), 3])
def test_of_four_ranks_that_share_layers_the_one_is_named_on_which_it_began(ranks, rank):
    messages = set(ranks(4, accused_of_four, rank, (2,)))
    (message,) = messages
    assert [each for each in range(4) if f"rank {each} (" in message] == [rank]
    assert "parameter model.layers.0.mlp.up_proj.weight" in message


# --- refused ----------------------------------------------------------------------------------------


def test_a_number_below_zero_is_refused(alone):
    alone(refuse_negative)


def refuse_negative():
    with pytest.raises(ConfigError, match="replay=-1"):
        zero3d.Engine(Norms(), replay=-1)
