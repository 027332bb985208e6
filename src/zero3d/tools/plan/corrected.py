"""A cluster by what steps on it took: of one run, or of several that differ.

    one run        `corrected`: rates of products scaled until the plan's step takes as long
    several runs   `fitted`: each kind of work scaled, and what a step and a block take beside (`MeasuredStep`)
    either         the range of what a rank computes narrows (`ClusterSpec.spread`): to what published runs say of plans
                   on more GPUs, once those on fewer are known, or to how far off the fit is

step seconds of one run
  | \\                   matrices and attention shrink with the rates; links, memory and the rest do not
  |   `-._ measured      so the factor is found by halving
  |_________`------      and there is none below what the rest takes
      factor
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero3d.errors import ConfigError
from zero3d.tools.plan.constants import constant
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.kernels import KERNELS
from zero3d.tools.plan.spec import ClusterSpec, Link, MeasuredStep, ModelSpec, ParallelPlan
from zero3d.tools.plan.spec_json import to_json
from zero3d.tools.plan.time import straggling

LEAST, MOST, HALVINGS = 1e-4, 1e4, 40
SPREAD = constant("step", "spread")  # of plans on more GPUs, once runs on fewer have been measured


def corrected(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, seconds: float) -> ClusterSpec:
    """Return the cluster on which the plan's step takes `seconds`. Raises ConfigError if no rate of products does."""
    low, high = LEAST, MOST
    slowest, fastest = (evaluate(model, scaled(cluster, factor), plan).seconds.mid for factor in (low, high))
    if not fastest < seconds < slowest:
        raise ConfigError(
            f"a step of {seconds:.3g} s is none that rates of products explain: without them it is planned at "
            f"{fastest:.3g} s."
        )
    for _ in range(HALVINGS):
        middle = sqrt(low * high)
        slower = evaluate(model, scaled(cluster, middle), plan).seconds.mid > seconds
        low, high = (middle, high) if slower else (low, middle)
    return scaled(cluster, sqrt(low * high))


def scaled(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Return the cluster with what products and attention reach of the peak times `factor`.

    A card's rates of its own go with what its memory really moves (`Kernels.rates_of`), so that is filled in, too.
    """
    gpu, rates = cluster.gpu, KERNELS.rates_of(cluster.gpu)
    gpu_rates = replace(
        gpu, bandwidth=rates.memory * gpu.bandwidth, matrix=factor * rates.matrix, flash=factor * rates.flash
    )  # a second time memory's part is 1
    return replace(cluster, gpu=gpu_rates)


# --- several runs -------------------------------------------------------------------------------

# Kinds of work whose rates were measured by themselves, and how far these rates may be wrong in steps. Least squares
# weigh such an error as much as one of NOISE in the seconds of a run.
TRUST = {"matrices": 0.1, "attention": 0.3, "optimizer": 0.5, "dp": 1.0}
NOISE = 0.02
BESIDE = ("rest", "block", "fixed")  # what only steps tell


class Timed(NamedTuple):
    """Holds a run: its model, its plan, and the seconds of its steps."""

    model: ModelSpec
    plan: ParallelPlan
    seconds: float


def fitted(cluster: ClusterSpec, runs: Sequence[Timed], what: str) -> ClusterSpec:
    """Return the cluster whose planned steps are nearest to these runs', as shares of each. what: its provenance.

    seconds = the sum over kinds of (a factor x the planned seconds) + block x blocks and micro-batches + fixed

    No factor is negative. Those of kinds that microbenchmarks measured stay near 1 (TRUST).
    """
    factors = _factors(cluster, runs)
    gpu = cluster.gpu
    assert gpu.matrix is not None  # a calibrated one
    assert gpu.flash is not None
    slower, hidden = max(1.0, factors["dp"]), max(0.0, 1.0 - factors["dp"])
    step = MeasuredStep(
        fixed=factors["fixed"],
        block=factors["block"],
        rest_passes=factors["rest"],
        update=factors["optimizer"],
        hide_dp=hidden if any(run.plan.dp > 1 for run in runs) else MeasuredStep().hide_dp,
    )
    matrix, flash = (max(LEAST, factors[kind]) for kind in ("matrices", "attention"))
    found = replace(
        cluster,
        gpu=replace(gpu, matrix=gpu.matrix / matrix, flash=gpu.flash / flash),
        inside=_slowed(cluster.inside, slower),
        across=_slowed(cluster.across, slower),
        step=step,
        provenance={**cluster.provenance, "step": what, "spread": what},
    )
    return replace(found, spread=max(SPREAD, farthest(found, runs)))


def _factors(cluster: ClusterSpec, runs: Sequence[Timed]) -> dict[str, float]:
    """Return the factor of each kind of work, and the seconds of a block and of a step beside."""
    bare = replace(cluster, step=MeasuredStep(fixed=0.0, rest_passes=1.0, hide_dp=0.0))
    kinds = (*TRUST, *BESIDE)
    steps = [[amount / run.seconds for amount in _amounts(bare, run, kinds)] for run in runs]
    weights = {kind: NOISE / trust for kind, trust in TRUST.items()}
    priors = [[weight if kind == each else 0.0 for each in kinds] for kind, weight in weights.items()]
    wanted = [*(1.0 for _ in runs), *weights.values()]
    return dict(zip(kinds, _not_negative(np.array(steps + priors), np.array(wanted)), strict=True))


def farthest(cluster: ClusterSpec, runs: Sequence[Timed]) -> float:
    """Return how far the planned step of some run is from what it took, at most, as a share of that."""
    return max(abs(evaluate(run.model, cluster, run.plan).seconds.mid / run.seconds - 1) for run in runs)


def _amounts(cluster: ClusterSpec, run: Timed, kinds: Sequence[str]) -> list[float]:
    """Return what a factor of each kind is multiplied with in a run's step."""
    parts = evaluate(run.model, cluster, run.plan).seconds.parts
    counts = {"block": len(run.model.blocks) * run.plan.accumulate, "fixed": 1}
    return [float(counts[kind] if kind in counts else parts[kind]) for kind in kinds]


def _not_negative(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> list[float]:
    """Solve least squares without negative unknowns: of all choices of unknowns that are 0, the best."""
    best, least = np.zeros(rows.shape[1]), inf
    for chosen in product((False, True), repeat=rows.shape[1]):
        some = np.array(chosen)
        found = np.zeros(len(some))
        found[some] = np.linalg.lstsq(rows[:, some], wanted, rcond=None)[0]
        error = float(((rows @ found - wanted) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return [float(each) for each in best]


def _slowed(link: Link, times: float) -> Link:
    """Return a link whose messages take so many times as long."""
    return replace(link, bandwidth=link.bandwidth / times, latency=link.latency * times)


# --- files --------------------------------------------------------------------------------------


def profile(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, seconds: float) -> str:
    """Return a run's profile as a cluster file that --cluster reads: one by which its step takes what it took.

    Where steps of this machine were measured before, the difference is the run's own: its fixed seconds. Else, and
    where that would be less than nothing, rates of products explain it. Raises ConfigError where they cannot.
    """
    what = (
        f"fitted on {seconds:.3g} s a step: {model.name}, {model.length:,} tokens, micro-batch {plan.micro_batch} x "
        f"{plan.accumulate}, {plan.world} ranks"
    )
    found, changed = _explained(model, cluster, plan, seconds)
    sources = {**found.provenance, **dict.fromkeys([*changed, "spread"], what)}
    spread = max(SPREAD, found.spread or 0.0)
    return json.dumps(to_json(replace(found, spread=spread, provenance=sources)), indent=2) + "\n"


def _explained(
    model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, seconds: float
) -> tuple[ClusterSpec, Sequence[str]]:
    """Return a cluster on which the step takes what it took, and the names of what is not as before."""
    if cluster.step is not None:
        more = seconds - evaluate(model, cluster, plan).seconds.mid
        fixed = cluster.step.fixed + more / (1 + straggling(plan, cluster))
        if fixed >= 0:
            return replace(cluster, step=replace(cluster.step, fixed=fixed)), ["step.fixed"]
    return corrected(model, cluster, plan, seconds), ["gpu.matrix", "gpu.flash"]
