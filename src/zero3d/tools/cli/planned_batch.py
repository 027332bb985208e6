"""The micro-batch that nobody gives: "auto" in a JSON of DeepSpeed's, without a value of the caller's.

1, 2, 4, ... sequences    as far as the planner says that they fit    ->    the largest that is worth its memory
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zero3d.config import Config
from zero3d.errors import ConfigError
from zero3d.tools.plan.emit import plan_of
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster, named
from zero3d.tools.plan.margin import margin_for, usable
from zero3d.tools.plan.network import CPU
from zero3d.tools.plan.spec import ClusterSpec, Estimate, Forward, ModelSpec

MOST = 64  # sequences of a micro-batch
WORTH = 0.9  # of the seconds a token, for which twice the memory is taken


def planned_micro_batch(config: Config, ranks: int) -> int:
    """Return the micro-batch for so many ranks on cards of this machine. Raises ConfigError where none fits."""
    hardware = cluster_of_these(config, ranks)
    found, least, most = 0, float("inf"), None
    for micro_batch, estimate, margin in _estimates(config, ranks, hardware):
        most = estimate if most is None else most
        if estimate.memory.device > usable(hardware.gpu.memory, margin) or estimate.memory.lacks(hardware):
            break
        seconds = estimate.seconds.mid / estimate.tokens
        if seconds < WORTH * least:
            found, least = micro_batch, seconds
    if not found:
        why = (
            "no micro-batch divides the batch"
            if most is None
            else (
                f"the smallest micro-batch needs {most.memory.device / 1e9:.1f} GB of a card with "
                f"{hardware.gpu.memory / 1e9:.1f} GB"
            )
        )
        raise ConfigError(
            f"train_micro_batch_size_per_gpu is auto, and {why}: type train.micro_batch=1, a higher zero.stage or "
            "offload.optimizer=host. zero3d plan explain shows what each takes."
        )
    return found


def cluster_of_these(
    config: Config,
    ranks: int,
    nodes: int | None = None,
    asked: str = "train_micro_batch_size_per_gpu is auto",
    instead: str = "train.micro_batch=1",
) -> ClusterSpec:
    """Return what is known of this machine's cards: of plan.cluster, else of the catalogue. Raises ConfigError.

    nodes  that the ranks are on; None: one, or as many as these cards are too few for
    asked  why they must be known; instead: what to type where they are not
    """
    import torch

    if not torch.accelerator.is_available():
        return cluster("cpu", ranks, nodes or 1, config.plan.cluster)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    device = str(module.get_device_name(0))
    name = named(device)
    if name is None:
        raise ConfigError(
            f"{asked}, and {device} is not in the planner's catalogue: type {instead}, "
            "or plan.cluster=FILE as zero3d calibrate writes it."
        )
    return cluster(name, ranks, nodes or max(1, ranks // int(module.device_count())), config.plan.cluster)


def model_of(config: Config, on_card: bool = False) -> ModelSpec:
    """Trace the model of a configuration, with mixers as kernels, as on a card, or in torch. Raises ConfigError."""
    from zero3d.tools.sim.model_spec import open_spec

    return open_spec(
        config.model.path,
        config.data.length,
        config.model,
        config.lora,
        bool(config.data.packing),
        config.freeze,
        forward=Forward(on_card, config.autocast),
    )


def _estimates(config: Config, ranks: int, hardware: ClusterSpec) -> Iterator[tuple[int, Estimate, float]]:
    """Yield each micro-batch that the batch can be made of, with what it takes, and the margin beyond it."""
    model, micro_batch = model_of(config, hardware.gpu.name != CPU), 1
    while micro_batch <= MOST:
        try:
            plan = plan_of(replace(config, train=replace(config.train, micro_batch=micro_batch)), ranks)
        except ConfigError:  # it does not divide the batch
            plan = None
        if plan is not None:
            yield micro_batch, evaluate(model, hardware, plan), margin_for(None, model, plan).share
        micro_batch *= 2
