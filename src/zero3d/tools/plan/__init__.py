"""The planner: what a plan needs and how long its step takes, by arithmetic, and the search for the best one.

    evaluate(model, cluster, plan, system="zero3d") -> Estimate
    ModelSpec, ClusterSpec, ParallelPlan                               its inputs, as data

spec, spec_json             models, clusters, plans, estimates as data; JSON there and back
preset_specs                traces of presets that are in the package
shapes, hardware            models by closed formulas; the GPU catalogue and cluster files
decided                     what an engine with a plan's settings decides: its blueprint
rank_model, states          a rank's chunks and units of a model, and the bytes of their states, exactly
footprint, windows,         activations of a part; buffers that come and go with units; micro-batches in flight
in_flight, inputs, memory   when a backward begins; inputs kept in parts or on the host; the fullest instant of all
traffic                     what a rank sends
sequence                    what ranks that share sequences keep and send around attention
mixers                      what kernels of recurrences and convolutions compute, make and keep
bounds                      bytes that a plan takes at least, and at most, for less work
kernels, network, timeline  seconds of a part, of a collective, of a pipeline; `time`: of a step
rollout                     a step of reinforcement learning, and its stream of weights
saves                       bytes of the copy that a save behind training writes
tier_time                   of states that leave the device
weights                     whether weights are kept or cast, where a plan leaves that open
profiles, profile_memory    other systems' ways with time and memory
estimate                    `evaluate`: all of these together
margin, judged              how far off its memory may be; what of it no published run was compared with
choice                      which of equal plans is recommended
lengths                     a step priced by how long a run's own sequences are
search, ladder, goodput     every plan that fits; ZeRO stages by bytes; how often to save
images                      patches of sequences: where they are known from, what a vision tower takes of a step
bill                        hours of GPUs, days, energy, money
links                       ways to train over slow links between hosts, and the fastest
relief                      settings that would need less memory, where a run has run out of it
emit                        a plan as a configuration, and a configuration as a plan
corrected                   a cluster as measured steps say it is
constants                   every constant, with the rows that it was fitted on
formulas, theory            published formulas; the ZeRO paper's tables
calibrate                   the rates of this machine, measured on real ranks: the one file here that imports torch

Names are loaded when first used: `zero3d plan --theory` needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero3d.tools.plan.estimate import evaluate
    from zero3d.tools.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan

__all__ = ["ClusterSpec", "Estimate", "ModelSpec", "ParallelPlan", "evaluate"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'zero3d.tools.plan' has no attribute {name!r}")
    value = getattr(import_module("zero3d.tools.plan.estimate"), name)
    globals()[name] = value
    return value
