"""A run that goes on says "bitwise" only where it has the bits of one that was not interrupted, whatever was changed."""

import inspect
from functools import partial

import pytest
import torch
from contracts import BASES, CHANGES, EXCUSED, Rows, adamw, changed, drawn, engine_of as engine_of_base, step_lr
from torch.optim.lr_scheduler import ConstantLR, CyclicLR, LambdaLR, OneCycleLR, SequentialLR

import zero3d
from zero3d.engine.state import engine_state
from zero3d.errors import ConfigError
from zero3d.precision import LossScaling, Precision


def test_every_keyword_of_an_engine_is_changed_or_excused():
    keywords = set(inspect.signature(zero3d.Engine).parameters)
    assert {change.keyword for change in CHANGES} | EXCUSED.keys() == keywords
    assert {change.base for change in CHANGES} == BASES.keys()


def of_base(base):
    return [number for number, change in enumerate(CHANGES) if change.base == base]


def checked(ranks, base, numbers, folder):
    """Hold the lines of all ranks to the bits that they had."""
    for of_rank in ranks(2, changed, base, numbers, str(folder)):
        for number, (same, line) in zip(numbers, of_rank, strict=True):
            change = CHANGES[number]
            if same is None:
                assert not change.keeps, line
                continue
            assert line.startswith(("bitwise: ", "not bitwise: ")), change.id
            named = (change.says or change.keyword) in line
            assert same or (line.startswith("not bitwise: ") and named), f"{change.id}: {line}"
            assert line.startswith("bitwise: ") or not change.keeps, f"{change.id}: {line}"
            assert named or change.keyword != "optimizer", f"{change.id}: {line}"


@pytest.mark.parametrize("base", BASES)
@pytest.mark.long
def test_where_a_changed_keyword_moves_the_curve_the_line_names_it(ranks, tmp_path, base):
    checked(ranks, base, of_base(base), tmp_path)


def test_a_share_of_all_changed_keywords_is_named_where_it_moves_the_curve(ranks, tmp_path):
    numbers = [number for number, change in enumerate(CHANGES) if drawn(change.id)]
    for base in {CHANGES[number].base for number in numbers}:
        checked(ranks, base, [number for number in numbers if CHANGES[number].base == base], tmp_path / base)


NOTED = [  # base, another value of keywords, and the notes that are others then
    ("sp", {"sp_kind": "heads"}, set()),
    ("sp", {"sp_kind": "gather"}, {"sp_kind"}),
    ("pp", {"schedule": "gpipe"}, set()),
    ("pp", {"schedule": "interleaved"}, {"chunks"}),
    ("pp", {"schedule": "zbv"}, {"chunks"}),
    ("llama", {"ep_plan": {"layers": "none"}}, set()),
    ("llama", {"experts": "fast"}, set()),
    ("rows", {"reduce": "every_micro_batch"}, set()),
    ("rows", {"reduce": "every_step"}, {"reduce"}),
    ("bf16", {"reduce_dtype": "bf16"}, {"wire"}),
    ("bf16", {"master": "split"}, set()),
    ("fp16", {"precision": Precision("fp16", LossScaling(8.0))}, set()),
    ("fp16", {"precision": Precision("fp16", LossScaling(window=2))}, {"loss_scale"}),
]


def noted(cases):
    """The names of notes that differ in each of these cases; nothing is trained."""
    return [other_notes(base, keywords) for base, keywords in cases]


def other_notes(base, keywords):
    was, now = (engine_state(engine_of_base(base, **each)._parts).about for each in ({}, keywords))
    return {name for name in was | now if was[name] != now[name]}


def test_notes_are_of_what_settings_come_to(ranks):
    for of_rank in ranks(2, noted, [(base, keywords) for base, keywords, _ in NOTED]):
        for (base, keywords, names), found in zip(NOTED, of_rank, strict=True):
            assert found == names, f"{base}: {keywords}"


# --- whose settings count -------------------------------------------------------------------------


def engine_of(scheduler=None, **options):
    torch.manual_seed(0)
    return zero3d.Engine(Rows(), precision="fp32", optimizer=adamw(**options), scheduler=scheduler)


def trained(engine, first, last):
    losses = []
    for step in range(first, last):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
        losses.append(engine(x).pow(2).mean())
        engine.backward(losses[-1])
        engine.step()
    return [loss.item() for loss in losses]


def saved(tmp_path, steps=3, **options):
    engine = engine_of(**options)
    trained(engine, 0, steps)
    engine.save(tmp_path)
    return engine


def rates(engine):
    return [group["lr"] for group in engine.optimizer.torch.param_groups]


def test_given_settings_go_on_where_their_schedule_would_be(tmp_path):
    saved(tmp_path, scheduler=step_lr(0.5))
    engine = engine_of(step_lr(0.1), lr=0.3, weight_decay=0.0)
    engine.load(tmp_path, settings="given")
    assert rates(engine) == pytest.approx([0.3 * 0.1])
    assert engine.optimizer.torch.param_groups[0]["weight_decay"] == 0.0
    assert engine.resumed.startswith("not bitwise: scheduler StepLR(gamma=0.5, step_size=2) -> StepLR(gamma=0.1, ")
    assert "; lr 0.01 -> 0.3 (the update uses it); weight_decay 0.1 -> 0.0 (the update uses it)" in engine.resumed
    trained(engine, 3, 4)
    assert rates(engine) == pytest.approx([0.3 * 0.1 * 0.1]), "the fourth step ends the second two"


def test_a_schedule_that_is_given_to_a_run_without_one_begins_at_its_step(tmp_path):
    saved(tmp_path)
    engine = engine_of(step_lr(0.5))
    engine.load(tmp_path, settings="given")
    assert rates(engine) == pytest.approx([0.01 * 0.5])
    assert engine.resumed.startswith("not bitwise: scheduler none -> StepLR(gamma=0.5, step_size=2) (learning rates")


@pytest.mark.parametrize("settings", ["saved", "given"])
def test_where_settings_are_the_same_it_does_not_matter_whose_count(tmp_path, settings):
    first = saved(tmp_path, scheduler=step_lr(0.5))
    engine = engine_of(step_lr(0.5))
    engine.load(tmp_path, settings=settings)
    assert engine.resumed == "bitwise: as if it had not been interrupted, in batches and micro-batches of the same size"
    assert trained(engine, 3, 6) == trained(first, 3, 6)


def of_two(first, second):
    return lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, first), LambdaLR(optimizer, second)], milestones=[2]
    )


def test_functions_of_schedules_within_schedules_are_compared_by_what_they_give(tmp_path):
    saved(tmp_path, scheduler=of_two(lambda step: 1.0, lambda step: 0.5**step))
    engine = engine_of(of_two(lambda step: 1.0, lambda step: 2.0**-step))
    engine.load(tmp_path)
    assert engine.resumed.startswith("bitwise: "), "other functions of the same values"
    engine = engine_of(of_two(lambda step: 1.0, lambda step: 0.5**step if step < 20 else 0.0))
    engine.load(tmp_path)
    assert engine.resumed.startswith("not bitwise: other learning rates from here on (the schedule's functions")


def test_functions_of_schedules_are_compared_at_the_steps_that_come_next(tmp_path):
    def but_at(other):
        return lambda optimizer: LambdaLR(optimizer, lambda step: 0.0 if step == other else 0.5**step)

    saved(tmp_path, scheduler=but_at(None))
    engine = engine_of(but_at(3 + 15))
    engine.load(tmp_path)
    assert engine.resumed.startswith("not bitwise: other learning rates from here on (")


def in_turn(milestone):
    return lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.5, 99), ConstantLR(optimizer, 0.1, 99)], milestones=[milestone]
    )


def cyclic(**changed):
    return partial(CyclicLR, **{"base_lr": 0.1, "max_lr": 0.2, "step_size_up": 5, "cycle_momentum": False, **changed})


def one_cycle(**changed):
    return partial(OneCycleLR, **{"max_lr": 0.1, "total_steps": 99, **changed})


@pytest.mark.parametrize(
    ("was", "now", "shown"),
    [
        (in_turn(6), in_turn(8), "SequentialLR(_milestones=[8], "),
        (cyclic(), cyclic(max_lr=0.3), "max_lrs=[0.3]"),
        (cyclic(), cyclic(step_size_up=9), "total_size=18.0, step_ratio=0.5"),
        (one_cycle(), one_cycle(pct_start=0.5), "... 48.5, "),
    ],
)
def test_what_a_schedule_keeps_under_other_names_than_its_arguments_is_compared(tmp_path, was, now, shown):
    saved(tmp_path, scheduler=was)
    same, other = engine_of(was), engine_of(now)
    same.load(tmp_path, settings="given")
    assert same.resumed.startswith("bitwise: ")
    assert "in place of" not in same.resumed
    other.load(tmp_path, settings="given")
    assert other.resumed.startswith("not bitwise: scheduler ")
    assert shown in other.resumed


def test_momenta_that_a_schedule_has_moved_are_not_said_to_be_in_place_of_those_at_its_start(tmp_path):
    saved(tmp_path, scheduler=one_cycle())
    engine = engine_of(one_cycle())
    engine.load(tmp_path)
    assert engine.resumed == "bitwise: as if it had not been interrupted, in batches and micro-batches of the same size"


def test_what_the_checkpoint_has_put_in_place_of_given_settings_is_named(tmp_path):
    saved(tmp_path)
    engine = engine_of(step_lr(0.5), lr=0.3)
    engine.load(tmp_path)
    assert engine.resumed.startswith("not bitwise: scheduler none -> StepLR(")
    engine = engine_of(lr=0.3)
    engine.load(tmp_path)
    assert engine.resumed == (
        "bitwise: as if it had not been interrupted, in batches and micro-batches of the same size; the checkpoint's "
        "values count: lr 0.01 in place of 0.3 (load(..., settings='given') takes this engine's)"
    )


def groups_of(*decays):
    """An engine of weights and biases with these decays."""
    torch.manual_seed(0)
    groups = [{"match": "*bias", "weight_decay": decays[1]}]
    return zero3d.Engine(Rows(), precision="fp32", optimizer=adamw(weight_decay=decays[0]), param_groups=groups)


@pytest.mark.parametrize(("decays", "said"), [((0.1, 0.5), "0.0 -> 0.5"), ((0.7, 0.0), "0.1 -> 0.7")])
def test_options_of_every_group_are_compared(tmp_path, decays, said):
    groups_of(0.1, 0.0).save(tmp_path)
    engine = groups_of(*decays)
    engine.load(tmp_path, settings="given")
    assert engine.resumed == f"not bitwise: weight_decay {said} (the update uses it)"


def test_a_load_of_any_step_is_no_beginning_for_given_settings(tmp_path):
    saved(tmp_path, steps=0)
    engine = engine_of()
    engine.load(tmp_path)
    with pytest.raises(ConfigError, match="this engine has trained or loaded"):
        engine.load(tmp_path, settings="given")


def test_given_options_that_need_states_which_are_not_saved_are_refused(tmp_path):
    saved(tmp_path)
    engine = engine_of(amsgrad=True)
    with pytest.raises(ConfigError, match="amsgrad=True needs states that the checkpoint does not have"):
        engine.load(tmp_path, settings="given")
    engine.load(tmp_path)
    trained(engine, 3, 4)


def test_what_was_open_before_refused_settings_is_open_again(tmp_path):
    engine = saved(tmp_path)
    engine.unshard()
    whole = [p.detach().clone() for p in engine.module.parameters()]
    with pytest.raises(ConfigError, match="this engine has trained"):
        engine.load(tmp_path, settings="given")
    for p, values in zip(engine.module.parameters(), whole, strict=True):
        assert p.untyped_storage().nbytes() >= values.nbytes, "it is whole"
        assert torch.equal(p, values)
    engine.reshard()


@pytest.mark.parametrize(
    ("before", "settings", "message"),
    [
        (0, "file", "settings='file'): pass 'saved' or 'given'"),
        (1, "given", "this engine has trained or loaded"),
        (0, "given", "OneCycleLR cannot be moved to the checkpoint's step (ValueError: Tried to step 3 times"),
    ],
)
def test_a_load_that_cannot_have_its_settings_is_refused_and_changes_nothing(tmp_path, before, settings, message):
    saved(tmp_path, steps=4)
    engine = engine_of(partial(OneCycleLR, max_lr=0.1, total_steps=2))
    trained(engine, 0, before)
    print_before, rate, place = engine.fingerprint(), rates(engine), engine.scheduler.state_dict()
    with pytest.raises(ConfigError) as error:
        engine.load(tmp_path, settings=settings)
    assert message in str(error.value)
    assert (engine.fingerprint(), rates(engine), engine.steps) == (print_before, rate, before)
    assert engine.scheduler.state_dict() == place
    assert engine.resumed == ""


class Own(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of the user's own, whose state does not have its factor."""

    def __init__(self, optimizer, factor):
        self.factor = factor
        super().__init__(optimizer)

    def get_lr(self):
        return [lr * self.factor**self.last_epoch for lr in self.base_lrs]

    def state_dict(self):
        return {"last_epoch": self.last_epoch}


def cyclic(power):
    return lambda optimizer: CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False, scale_fn=lambda x: power ** (x - 1)
    )


@pytest.mark.parametrize(
    ("before", "after"), [(partial(Own, factor=0.5), partial(Own, factor=0.4)), (cyclic(0.5), cyclic(0.4))]
)
@pytest.mark.parametrize("settings", ["saved", "given"])
def test_what_a_schedule_keeps_beside_its_state_is_compared(tmp_path, before, after, settings):
    saved(tmp_path, scheduler=before)
    for scheduler, said in ((before, "bitwise: "), (after, "not bitwise: other state of the scheduler (learning ra")):
        engine = engine_of(scheduler)
        engine.load(tmp_path, settings=settings)
        assert engine.resumed.startswith(said), engine.resumed


def test_given_options_are_all_that_an_engine_has_and_are_not_said_to_be_replaced(tmp_path):
    saved(tmp_path, scheduler=step_lr(0.5))
    engine = engine_of(lr=0.02)
    engine.load(tmp_path, settings="given")
    [group] = engine.optimizer.torch.param_groups
    assert group["lr"] == 0.02
    assert "initial_lr" not in group, "a later schedule begins with lr"
    assert "count" not in engine.resumed
