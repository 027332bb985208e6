"""Generation by a trainer's model: stage 3 with whole weights, by use, and stage 2 have the same tokens and losses."""

import contextlib
import io

import pytest
import torch
from models import VOCAB, hf
from trainers import arguments, launched

from zero3d import ConfigError
from zero3d.errors import OutOfBudget

LONGEST = 6  # tokens of rank 0; of each other rank three less
long = pytest.mark.long


class Loop:
    """A loop on an Accelerator that samples, takes log-probabilities, and trains on what it has sampled.

    tight  the rank that has room for no more than 1 kB
    """

    def __init__(self, stage, gather=None, tight=None):
        from zero3d.engine import held_weights
        from zero3d.engine.auto_offload import Room
        from zero3d.ways.huggingface.accelerate import Accelerator

        model = hf("llama", inner=96)
        self.accelerator = Accelerator(cpu=True, stage=stage, gather_for_generation=gather)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.engine, self.rank = self.accelerator.engine, self.accelerator.process_index
        self.new = LONGEST - 3 * self.rank
        self.calls, self.forwards, self.gathers = 0, [], []
        self._rooms = held_weights, held_weights.room_of
        if self.rank == tight:
            held_weights.room_of = lambda *given: Room(1000, None, False, 2)
        model.register_forward_pre_hook(lambda *given: self._count())

    def _count(self):
        self.calls += 1

    def sample(self, rows=3):
        before = self.gathered(), self.calls
        torch.manual_seed(5 + self.rank)
        ids = torch.randint(3, VOCAB, (rows, 4), generator=torch.Generator().manual_seed(self.rank))
        with torch.no_grad():
            tokens = self.model.generate(
                input_ids=ids, max_new_tokens=self.new, do_sample=True, top_k=0, eos_token_id=1, pad_token_id=2
            )
        self.gathers.append(self.gathered() - before[0])
        self.forwards.append(self.calls - before[1])
        return tokens

    def gathered(self):
        return sum(entry.calls for entry in self.engine.traffic if entry.op == "all_gather")

    @property
    def whole(self):
        """Units whose weights are there behind a forward without grad."""
        return [unit for unit in self.engine.units if unit.users]

    def close(self):
        held_weights, held_weights.room_of = self._rooms
        self.accelerator.free_memory()


@contextlib.contextmanager
def loop(*given, **options):
    """A Loop, and what this rank has printed since it is there."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    said = io.StringIO()
    with launched(), contextlib.redirect_stdout(said):
        made = Loop(*given, **options)
        try:
            yield made, said
        finally:
            made.close()


def lines(said):
    return [line for line in said.getvalue().splitlines() if "generation" in line]


def learnt(stage, gather=None, tight=None):
    """Tokens and losses of three steps, each behind a generation and a forward without grad; what they gathered."""
    with loop(stage, gather, tight) as (made, said):
        steps = []
        for _ in range(3):
            tokens = made.sample()
            with torch.no_grad():
                before = float(made.model(input_ids=tokens, labels=tokens).loss)
            left = len(made.whole)
            loss = made.model(input_ids=tokens, labels=tokens).loss
            made.accelerator.backward(loss)
            made.optimizer.step()
            made.optimizer.zero_grad()
            steps.append((tokens.tolist(), before, float(loss.detach())))
        return steps, made.forwards, made.gathers, (left, len(made.engine.units)), lines(said)


@pytest.mark.parametrize("gather", [None, False, pytest.param(True, marks=long)])
def test_stage_3_generates_and_trains_with_the_bits_of_stage_2(ranks, gather):
    found, wanted = ranks(2, learnt, 3, gather), ranks(2, learnt, 2)
    assert [steps for steps, *_ in found] == [steps for steps, *_ in wanted]
    assert len({loss for _, _, loss in found[0][0]}) == 3
    by_use, own = gather is False, [forwards for _, forwards, *_ in wanted]
    for rank, (_, forwards, gathers, (left, units), said) in enumerate(found):
        assert forwards == (list(map(max, *own)) if by_use else own[rank])
        assert gathers == [units * count for count in (forwards if by_use else [1] * 3)]
        assert left == (0 if by_use else units)
        assert len(said) == (1 if rank == 0 else 0)
    assert max(own[1]) < min(own[0])  # the other rank has fewer forwards where it need not stay in step
    assert ("for each token, and ranks stay in step as asked" in found[0][4][0]) == by_use


@pytest.mark.parametrize(("tight", "gather"), [
    (1, None), pytest.param(0, None, marks=long), pytest.param(0, True, marks=long), pytest.param(1, True, marks=long),
])  # fmt: skip
def test_the_rank_with_the_least_room_decides_for_all(ranks, tight, gather):
    found = ranks(2, learnt, 3, gather, tight)
    for _, forwards, gathers, (_, units), _ in found:
        assert gathers == [units * count for count in ([1] * 3 if gather else forwards)]
    [said] = found[0][4]
    assert f"rank {tight}, the tightest, has room for only 1.00 kB" in said
    assert f"gather_for_generation={not gather}" in said


def too_tight(gather):
    """What `engine.generate` and `generate_batch` say where rank 1 has no room, and the tokens of a generation by use."""
    with loop(3, gather, tight=1) as (made, _):
        said, ids = [], torch.tensor([[3, 4, 5]])
        for ask in (lambda: made.engine.generate(ids, 4), lambda: made.model.generate_batch([[3, 4, 5]])):
            try:
                ask()
            except (OutOfBudget, ConfigError) as error:
                said.append(f"{type(error).__name__}: {error}")
        by_use = made.engine.generate(ids, 4, keep_full=False).tolist()
        return said, by_use, len(made.whole)


def test_generations_that_keep_the_whole_weights_are_refused_where_a_rank_has_no_room(ranks):
    for said, by_use, whole in ranks(2, too_tight, None):
        by_token, of_batch = said
        assert by_token.startswith("OutOfBudget: generate() keeps the whole weights until training goes on")
        assert "rank 1, the tightest, has room for 1.00 kB. Pass keep_full=False" in by_token
        assert of_batch.startswith("ConfigError: generate_batch() at stage 3 is not supported")
        assert "use_transformers_continuous_batching=False" in of_batch
        assert len(by_use[0]) > 3
        assert whole == 0


def bytes_of_units():
    with loop(3) as (made, said):
        made.sample()
        units = made.engine.units
        return sum(unit.layout.total * unit.dtype.itemsize for unit in units), lines(said)


def test_the_arithmetic_is_of_the_units_gathered(ranks):
    from zero3d.spec.sizes import decimal

    nbytes, [said] = ranks(2, bytes_of_units)[0]
    assert f"they take {decimal(nbytes)} beside the shards" in said


def again_alone():
    """Tokens that rank 0 generates by itself, behind a generation of all ranks, and inside full_params()."""
    with loop(3) as (made, said):
        made.sample()
        alone = made.sample().tolist() if made.rank == 0 else None
        with made.engine.full_params():
            opened = made.sample().tolist() if made.rank == 0 else None
        return alone, opened, made.gathers, lines(said)


def test_whole_weights_are_neither_gathered_nor_asked_about_again(ranks):
    alone, opened, gathers, said = ranks(2, again_alone)[0]
    assert alone == opened
    assert gathers[1:] == [0, 0]
    assert len(said) == 1


def let_go():
    """Units that are there behind an evaluation, and behind a generation by use after it."""
    with loop(3, False) as (made, _), torch.no_grad():
        ids = torch.ones(1, 3, dtype=torch.long)
        made.model(input_ids=ids)
        kept = len(made.whole)
        made.sample()
        return kept, len(made.whole), len(made.engine.units)


def test_what_an_evaluation_has_kept_is_let_go_by_use(ranks):
    for kept, left, units in ranks(2, let_go):
        assert kept == units
        assert left == 0


def args_of_trl(folder, kept):
    """What TRL's argument, and one of `patch`, mean for a Trainer's Accelerator."""
    from transformers import TrainingArguments

    from zero3d.ways.huggingface.transformers import Trainer

    with launched():
        args = arguments(folder, TrainingArguments)
        args.ds3_gather_for_generation = kept[0]
        trainer = Trainer(hf("llama"), args, stage=3, gather_for_generation=kept[1])
        return trainer.accelerator._gather


@pytest.mark.parametrize(("kept", "wanted"), [
    ((True, None), None), ((False, None), False), ((False, True), True), ((True, False), False),
])  # fmt: skip
def test_trls_argument_is_honoured(tmp_path, kept, wanted):
    assert args_of_trl(tmp_path, kept) is wanted
