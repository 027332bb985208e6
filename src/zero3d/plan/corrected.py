"""A cluster corrected by a measured step: rates of products scaled until the plan's step takes as long.

step seconds
  | \\                   matrices and attention shrink with the rates; links, memory and the rest do not
  |   `-._ measured      so the factor is found by halving
  |_________`------      and there is none below what the rest takes
      factor
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import yaml

from zero3d.errors import ConfigError
from zero3d.plan.estimate import evaluate
from zero3d.plan.hardware import base_of, read_file
from zero3d.plan.kernels import KERNELS
from zero3d.plan.spec import ClusterSpec, Gpu, ModelSpec, ParallelPlan
from zero3d.plan.spec_json import to_json

LEAST, MOST, HALVINGS = 1e-4, 1e4, 40


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


def profile(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, seconds: float) -> str:
    """Return a run's profile as a cluster file that --cluster reads: rates by which its step takes what it took.

    Raises ConfigError where no rate of products explains the step.
    """
    what = (
        f"fitted on {seconds:.3g} s a step: {model.name}, {model.length:,} tokens, micro-batch {plan.micro_batch} x "
        f"{plan.accumulate}, {plan.world} ranks"
    )
    found = corrected(model, cluster, plan, seconds)
    sources = {**found.provenance, **dict.fromkeys(("gpu.matrix", "gpu.flash"), what)}
    return json.dumps(to_json(replace(found, provenance=sources)), indent=2) + "\n"


def write_rates(file: Path | str, gpu: Gpu, bandwidth_from: str) -> None:
    """Put a card's rates into a cluster file; all else in it stays. Raises ConfigError.

    bandwidth_from  the provenance of the bandwidth
    """
    tree, path = read_file(file), Path(file)
    rates = {"bandwidth": gpu.bandwidth, "matrix": gpu.matrix, "flash": gpu.flash}
    provenance = {"gpu.bandwidth": bandwidth_from, "gpu.matrix": "measured", "gpu.flash": "measured"}
    card = tree.get("gpu") or {}
    tree["gpu"] = {**({"name": base_of(tree)} if isinstance(card, str) else card), **rates}
    tree["provenance"] = {**(tree.get("provenance") or {}), **provenance}
    as_json = path.suffix == ".json"
    text = json.dumps(tree, indent=2) + "\n" if as_json else yaml.safe_dump(tree, sort_keys=False)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}).") from error
