"""A plan as a file that starts it (a configuration of `zero3d train`, DeepSpeed's JSON), and a configuration as a plan.

ParallelPlan                      zero3d                      DeepSpeed
--------------------------------  --------------------------  ------------------------------------------------
dp, tp, pp                        mesh.dp, .tp, .pp           -, tensor_parallel.autotp_size, refused
ep, experts                       mesh.ep, .experts           refused
schedule, sequence_parallel       mesh.schedule, ...          refused
stage                             zero.stage                  zero_optimization.stage
offload, params                   offload.optimizer, .params  zero_optimization.offload_optimizer, _param
gradients, fraction, moments, ... offload.*                   -, offload_optimizer.ratio (fraction), -
micro_batch, accumulate           train.*                     train_micro_batch_size_per_gpu, gradient_...
activations                       activations                 - (a setting of the model there)
partition_activations             mesh.partition_activations  -
offload_activations               offload.activations         -
precision                         precision                   bf16.enabled
optimizer                         optimizer.name              refused but AdamW
"""

from __future__ import annotations

from typing import Any

from zero3d.config import Config, asked_dp, resolve_batch
from zero3d.distributed.degrees import Degrees
from zero3d.errors import ConfigError
from zero3d.pipeline.schedules import Schedule
from zero3d.plan.inputs import in_parts
from zero3d.plan.spec import ModelSpec, ParallelPlan
from zero3d.spec.offload import AUTO, DISK, HOST, Offload
from zero3d.spec.optimizer import ADAMW, OPTIMIZERS

TIERS = ("optimizer", "params", "gradients", "fraction", "moments", "executor")  # keys of the section `offload`
DEEPSPEED = {HOST: "cpu", DISK: "nvme"}


def train_config(model: ModelSpec, plan: ParallelPlan, path: str, tokenizer: str | None) -> dict[str, Any]:
    """Return the tree of a file for `zero3d train`. tokenizer: of data.tokenizer, None for the model's own.

    What is on a disk is in OUTPUT/offload, since the file names no folder for it.
    """
    mesh: dict[str, Any] = {"dp": plan.dp, "tp": plan.tp, "pp": plan.pp}
    if plan.ep > 1:
        mesh |= {"ep": plan.ep, "experts": plan.experts}
    if plan.pp > 1:
        mesh["schedule"] = plan.schedule
    if plan.tp > 1 and plan.sequence_parallel:
        mesh["sequence_parallel"] = True
    if in_parts(plan):
        mesh["partition_activations"] = True
    policies = {
        key: value for key in ("release", "reduce", "reduce_scatter") if (value := getattr(plan, key)) != "auto"
    } | ({"master": plan.master} if plan.master != "fp32" else {})
    exact = {"exact": True} if plan.exact else {}
    plain, tiers = Offload(), plan.tiers
    away = {key: value for key in (*TIERS, "activations") if (value := getattr(tiers, key)) != getattr(plain, key)}
    sequences = plan.micro_batch * plan.accumulate * plan.dp
    saves = {"checkpoint": {"asynchronous": True}} if plan.asynchronous_saves else {}
    health = {"health": {"replay": plan.replay}} if plan.replay else {}
    return (
        {
            "model": {"path": path},
            "data": {"length": model.length} | ({"tokenizer": tokenizer} if tokenizer else {}),
            "train": {"batch": sequences, "micro_batch": plan.micro_batch, "accumulate": plan.accumulate}
            | ({} if plan.ema is None else {"ema": plan.ema}),
            "mesh": mesh,
            "zero": {"stage": plan.stage, "reduce_dtype": plan.reduce_dtype} | policies | exact,
            "precision": plan.precision,
            "activations": plan.activations,
        }
        | ({"offload": away} if away else {})
        | ({"optimizer": {"name": plan.optimizer}} if plan.optimizer != ADAMW else {})
        | saves
        | health
    )


def plan_of(config: Config, gpus: int | None) -> ParallelPlan:
    """Return a configuration's plan on `gpus` ranks (None: as many as its mesh says). Raises ConfigError, MeshError."""
    mesh = config.mesh
    world = gpus or (mesh.dp or mesh.ep or 1) * (mesh.tp or 1) * (mesh.pp or 1)
    degrees = Degrees.resolve(world, asked_dp(config), mesh.tp, mesh.pp, mesh.ep)
    batch = resolve_batch(config.train, degrees.dp)
    schedule = Schedule.of(mesh.schedule)
    if degrees.pp > 1:
        schedule.check(batch.accumulate, degrees.pp)
    return ParallelPlan(
        degrees.dp,
        degrees.tp,
        degrees.pp,
        config.zero.stage,
        batch.micro_batch,
        batch.accumulate,
        config.activations,
        mesh.sequence_parallel and degrees.tp > 1,
        schedule.name,
        schedule.chunks_per_rank if degrees.pp > 1 else 1,
        config.precision,
        config.zero.reduce_dtype,
        config.zero.release,
        config.zero.reduce,
        exact=config.zero.exact,
        reduce_scatter=config.zero.reduce_scatter,
        master=config.zero.master,
        **_tiers(config),
        partition_activations=mesh.partition_activations,
        offload_activations=config.offload.activations,
        asynchronous_saves=config.checkpoint.asynchronous,
        replay=config.health.replay,
        ema=config.train.ema,
        ep=degrees.ep,
        experts=mesh.experts,
        optimizer=config.optimizer.name,
    )


def _tiers(config: Config) -> dict[str, Any]:
    """Return a plan's settings of what leaves the device. `auto` is none of its own: a plan says what it would be."""
    section = config.offload
    settings = {key: getattr(section, key) for key in TIERS if key != "optimizer"}
    return settings | {"offload": "none" if section.optimizer == AUTO else section.optimizer}


def deepspeed_config(plan: ParallelPlan) -> dict[str, Any]:
    """Return DeepSpeed's JSON of a run without pipelines. Raises ConfigError."""
    if plan.optimizer != ADAMW:
        raise ConfigError(
            f"--emit-deepspeed: DeepSpeed's JSON is written for AdamW alone, and the plan is for "
            f"{OPTIMIZERS[plan.optimizer].title}: pass --optimizer adamw."
        )
    if plan.ep > 1:
        raise ConfigError(
            f"--emit-deepspeed: DeepSpeed's JSON cannot say ep={plan.ep}: its experts are layers written for it."
        )
    if plan.pp > 1 or plan.sequence_parallel:
        raise ConfigError(
            f"--emit-deepspeed: DeepSpeed's JSON cannot say pp={plan.pp}"
            f"{' with sequence parallelism' if plan.sequence_parallel else ''}: its pipelines are written in Python."
        )
    zero: dict[str, Any] = {"stage": plan.stage, "overlap_comm": True, "contiguous_gradients": True}
    for key, place in (("offload_optimizer", plan.offload), ("offload_param", plan.params)):
        if place != "none":
            zero[key] = {"device": DEEPSPEED[place], "pin_memory": True} | (
                {"nvme_path": "offload"} if place == DISK else {}
            )
    if plan.offload == HOST and plan.fraction < 1:
        zero["offload_optimizer"]["ratio"] = plan.fraction
    if plan.offload == DISK and plan.stage != 3:
        raise ConfigError(
            f"--emit-deepspeed: DeepSpeed's JSON has optimizer states on a disk at stage 3 alone, and the plan is of "
            f"stage {plan.stage}: pass --offload host."
        )
    tree: dict[str, Any] = {
        "train_batch_size": plan.micro_batch * plan.accumulate * plan.dp,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulate,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    }
    if plan.precision in ("bf16", "fp16"):
        tree[plan.precision] = {"enabled": True}
    if plan.tp > 1:
        tree["tensor_parallel"] = {"autotp_size": plan.tp}
    return tree
