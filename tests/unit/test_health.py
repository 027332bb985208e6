"""What is not finite: counted, named, refused where it enters and where it would leave; in one process."""

import warnings
from itertools import product

import pytest
import torch
from models import batch, bits, build, loss_of
from torch import nn

import zero3d
from zero3d.errors import ConfigError, NonFiniteError
from zero3d.precision import LossScaling, Precision

STAGES = (0, 1, 2, 3)


def make(model="net", stage=3, **options):
    model = build(model) if isinstance(model, str) else model
    return zero3d.Engine(model, **({"stage": stage, "precision": "fp32"} | options))


def step(engine, number=0, factor=1.0, weight=None):
    engine.backward(loss_of(engine, batch(number)) * factor, weight)
    return engine.step()


def weights(engine):
    with engine.full_params():
        return bits(engine.module.parameters())


# --- what a step says -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_says_why_it_was_or_was_not_applied(stage):
    engine = make(stage=stage, accumulate=2)
    assert step(engine).reason == "not due"
    assert step(engine, 1).reason == "applied"
    step(engine)
    assert step(engine, factor=float("nan")).reason.startswith("NaN loss on rank 0")
    step(engine, weight=0.0)
    assert step(engine, 1, weight=torch.zeros(())).reason == "no targets"
    assert step(engine)._fields[-1] == "reason"


@pytest.mark.parametrize(("stage", "precision"), [
    case if case in ((0, "fp32"), (1, "bf16"), (2, "fp64"), (3, "fp16"), (3, "bf16")) else pytest.param(*case, marks=pytest.mark.long)
    for case in product(STAGES, ("fp32", "bf16", "fp16", "fp64"))
])  # fmt: skip
def test_a_step_that_is_not_finite_changes_nothing_at_any_precision(stage, precision):
    engine = make(stage=stage, precision=precision)
    assert step(engine).reason == "applied"
    before, states = weights(engine), engine.fingerprint()
    for factor, reason in ((float("nan"), "NaN loss on rank 0"), (float("inf"), "overflow")):
        assert step(engine, 1, factor).reason.startswith(reason)
        assert (weights(engine), engine.fingerprint()) == (before, states)
    assert step(engine, 2).reason == "applied"


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_targets_moves_nothing(stage):
    engine = make(stage=stage)
    step(engine)
    before, states = weights(engine), engine.fingerprint()
    for weight in (0.0, torch.zeros(())):
        assert step(engine, 1, weight=weight).reason == "no targets"
        assert (weights(engine), engine.fingerprint()) == (before, states)
    assert engine.health.in_a_row == 0


# --- counting -------------------------------------------------------------------------------------


def test_steps_that_are_not_finite_are_counted_in_a_row():
    engine, counted = make(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for factor, weight in ((1.0, None), (float("inf"), None), (1.0, 0.0), (float("nan"), None), (1.0, None)):
            step(engine, factor=factor, weight=weight)
            counted.append(engine.health.in_a_row)
    assert counted == [0, 1, 1, 2, 0]


def test_what_was_counted_is_not_that_of_a_checkpoint(tmp_path):
    engine = make()
    step(engine)
    saved = engine.save(tmp_path)
    step(engine, factor=float("inf"))
    assert engine.health.in_a_row == 1
    engine.load(saved)
    assert engine.health.in_a_row == 0


@pytest.mark.parametrize(("rule", "counted"), [
    ({"initial": 4.0, "minimum": 1.0, "hysteresis": 1}, [0, 0, 1]),  # 4 -> 2 -> 1, then nothing is left
    ({"initial": 1.0, "minimum": 1.0, "hysteresis": 3}, [1, 2, 3]),
])  # fmt: skip
def test_overflows_count_once_the_loss_scale_cannot_fall(rule, counted):
    engine, found, last = make(precision=Precision("fp16", LossScaling(**rule))), [], []
    with pytest.raises(NonFiniteError, match="minimum loss scale"):
        while True:
            last.append(engine.health.is_last(99))
            try:
                step(engine, factor=float("inf"))
            finally:
                found.append(engine.health.in_a_row)
    assert found == counted
    assert last == [False, False, True]


# --- tracing --------------------------------------------------------------------------------------


def traced(engine, factor=float("inf"), number=0, run=None):
    with engine.health.tracing():
        assert step(engine, number, factor).reason == "overflow" if run is None else run()
    with pytest.raises(NonFiniteError) as error:
        engine.health.fail("1 step was not finite.", "Look at it.")
    return str(error.value)


def spoil(parameter):
    parameter.register_hook(lambda grad: grad * float("nan"))


@pytest.mark.parametrize("stage", STAGES)
def test_the_unit_where_backward_first_met_one_is_named(stage):
    model = build("net")
    spoil(model.layers[0].up.weight)
    spoil(model.layers[1].down.weight)  # backward meets this first
    said = traced(make(model, stage), factor=1.0)
    assert "First in the last one: unit 'layers.1', parameter layers.1.down.weight on rank 0. Look at it." in said
    assert "parameter head.weight" in traced(make(stage=stage))  # the loss itself


def test_a_norm_beyond_the_largest_number_is_no_units_fault():
    said = traced(make(), factor=1e30)
    assert "each rank's own gradients are finite" in said
    assert "on rank" not in said


def test_nothing_is_looked_at_unless_it_is_traced():
    engine = make()
    step(engine, factor=float("inf"))
    with pytest.raises(NonFiniteError, match="each rank's own"):
        engine.health.fail("1 step.", "")
    assert engine.reductions.watch is None


def test_sparse_gradients_are_looked_at():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(61, 8, sparse=True)

        def forward(self, ids):
            return self.table(ids)

    engine = make(Sparse(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1))

    def run():
        engine.backward(engine(batch(0)).sum() * float("inf"))
        return engine.step().reason == "overflow"

    assert "parameter table.weight" in traced(engine, run=run)


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("trainable", [True, False])
def test_weights_that_are_not_finite_are_refused_by_name(stage, trainable):
    model = build("net")
    with torch.no_grad():
        model.layers[1].up.weight[3, 5] = float("nan")
        model.head.weight[0, 0] = float("inf")
    model.head.weight.requires_grad_(trainable)
    with pytest.raises(ConfigError) as error:
        make(model, stage)
    assert "layers.1.up.weight in fp32" in str(error.value)
    assert "head.weight in fp32" in str(error.value)


def test_weights_that_do_not_fit_fp16_are_refused():
    model = build("net")
    with torch.no_grad():
        model.norm.bias[0] = 1e5
    make(model)
    model = build("net")
    with torch.no_grad():
        model.norm.bias[0] = 1e5
    with pytest.raises(ConfigError, match=r"norm\.bias in fp16"):
        make(model, precision="fp16")


def test_weights_that_are_not_finite_are_not_exported(tmp_path):
    engine = make("llama", stage=3)
    with engine.full_params(), torch.no_grad():
        engine.module.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        engine.export(tmp_path / "hf")
    assert not list(tmp_path.iterdir())
