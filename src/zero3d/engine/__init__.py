"""The public class, and what it is made of.

engine.py            `Engine`: forward, backward, step, train_batch, evaluate, generate, full_params; its public names
checkpoints.py       `engine.checkpoints`: save, load, slots of a disk, fingerprint, export
options.py           its settings as one record, and what they mean for a model on a mesh
checks.py            what is refused before anything is allocated
parts.py             what it is made of, in one record that grows while it is built
assembly.py          builds these in the order in which they need each other
foundation.py        axes, this rank's share of the model, the order of sums, the blueprint of its units
partition.py         the model over pp and tp
tiling.py            what is computed in tiles, and what cannot be
auto_offload.py      where optimizer states are and who updates them, where that is left open
runtime.py           units over dp, with what gathers, reduces and updates them
tower_calls.py       how often a vision tower runs in a forward, on all ranks alike
feature.py           what a run may have beside training itself: a method for each moment that may concern it
features.py          the features of an engine, one row each
summation.py         the order of sums: by ranks, or exact
autocast.py          a forward in torch's autocast: what goes in, and what comes out
execution.py         the way through the model: direct, or through pipeline stages
step.py              when a step is due, and what follows from it
statistics.py        a feature: running statistics of normalisation layers, alike on all ranks
health.py            a feature: values that are not finite are counted, and traced to the first unit
muon.py              a feature: matrices of units and their owners
averages.py          a feature: exponential moving averages of weights
replay/              a feature: a micro-batch computed twice
tower_gradients.py   a feature: which parameters of a vision tower have a gradient
expert_bias.py       a feature: counts of experts' tokens, and the bias that levels them
losses.py            what a batch gives the model, and what the output weighs
whole_parameters.py  full_params, export, a pipeline's weight phase
unshard.py           whole parameters until `reshard`, also with their masters' values
state.py             what checkpoints take
slots.py             which step in slots of a disk all ranks can go back to
accounting.py        bytes by formula, beside what the arena measures
transients.py        upper bounds of buffers that come and go, dtypes of all buffers
traffic_formulas.py  what each axis sends, by formula
report.py            `engine.report()`: bytes, traffic, time by part, settings, versions, as plain rows
report_view.py       a report as tables, in a terminal and in a notebook (no torch)
generation.py        tokens one after another
held_weights.py      whole weights for a generation at stage 3, where every rank has room
guards.py            copies of weights that are not there are refused
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Load the module of a public name when it is first used."""
    if name != "checkpoints":
        raise AttributeError(f"module 'zero3d.engine' has no attribute {name!r}")
    return import_module("zero3d.engine.checkpoints")
