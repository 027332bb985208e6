"""Rows of optimizers: what each says is what its optimizer has, once it is built and has made a step."""

from dataclasses import fields
from inspect import signature
from pkgutil import resolve_name

import pytest
import torch

from zero3d.blueprint.layout import ALIGN, GROUP
from zero3d.config.sections import Optimizer
from zero3d.spec.dtypes import BF16, FP32, FP64
from zero3d.spec.optimizer import ALL, MATRICES, NAMES, OPTIMIZERS, REST, host_can_update, why_not_on_host
from zero3d.train.setup.optimizer import optimizer_of


def after_a_step(name, matrix):
    """The optimizer of a section over one piece, and the piece's states that are as long as it."""
    piece = torch.zeros(ALIGN)
    built = optimizer_of(Optimizer(name=name))([{"params": [piece], "matrices": matrix}])
    piece.grad = torch.ones_like(piece)
    built.step()
    return built, {key: value for key, value in built.state[piece].items() if key != "step"}


@pytest.mark.parametrize("matrix", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_has_the_class_and_the_states_of_its_row(name, matrix):
    row = OPTIMIZERS[name]
    built, states = after_a_step(name, matrix)
    assert type(built).__name__ == row.kind
    assert set(states) == {key for key, of in row.states.items() if of in (ALL, MATRICES if matrix else REST)}


@pytest.mark.parametrize("name", NAMES)
def test_states_in_8_bits_are_those_of_rows_that_say_so_and_of_the_same_names_as_in_fp32(name):
    row = OPTIMIZERS[name]
    built, states = after_a_step(name, matrix=False)
    assert {isinstance(state, torch.Tensor) for state in states.values()} == {not row.coded}
    assert getattr(optimizer_of(Optimizer(name=name)), "block", GROUP) == (ALIGN if row.coded else GROUP)
    if row.codes is not None:
        assert built.row is optimizer_of(Optimizer(name=name)).row is row  # by which rules know it
        assert row.states == OPTIMIZERS[row.codes].states


@pytest.mark.parametrize("name", NAMES)
def test_a_row_gives_its_function_what_that_takes_of_keys_that_the_section_has(name):
    row, keys = OPTIMIZERS[name], {each.name for each in fields(Optimizer)}
    signature(resolve_name(row.call)).bind(**dict.fromkeys([*row.takes, *row.options]))
    assert keys >= {*row.takes.values(), *([name] if row.options else [])}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_host_updates_is_torchs_fused_adamw(name):
    built, _ = after_a_step(name, matrix=False)
    assert OPTIMIZERS[name].on_host == (type(built) is torch.optim.AdamW and built.defaults["fused"])


@pytest.mark.parametrize(("kind", "fused", "states", "can"), [
    ("Adam", True, [FP32, FP32], True), ("AdamW", True, [FP32, FP32], True), ("AdamW", False, [FP32, FP32], False),
    ("AdamW", True, [FP32] * 3, False), ("AdamW", True, [FP64, FP64], False), ("AdamW", True, [FP32, BF16], False),
    ("SGD", True, [FP32], False), ("", True, [FP32, FP32], False),
])  # fmt: skip
def test_the_host_updates_the_two_fp32_moments_of_torchs_fused_adams(kind, fused, states, can):
    assert host_can_update(kind, fused, states) == can


@pytest.mark.parametrize(("name", "precision", "said"), [
    ("adamw", "bf16", ""), ("adamw", "fp32", ""), ("adamw", "fp64", "no fp64 adamw"), ("muon", "bf16", "no bf16 muon"),
])  # fmt: skip
def test_of_a_row_it_is_said_why_the_host_cannot_update(name, precision, said):
    assert why_not_on_host(name, precision) == (said and f"the host updates fp32 states of AdamW alone, {said}")
