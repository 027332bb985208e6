"""A plan as a file that starts it (a configuration of `zero3d train`, DeepSpeed's JSON), and a configuration as a plan.

ParallelPlan                      zero3d                      DeepSpeed
--------------------------------  --------------------------  ------------------------------------------------
mesh                              mesh.*, with effect         tensor_parallel.autotp_size (tp), others refused
zero                              zero.*, if not the default  zero_optimization.stage (stage), -
offload                           offload.*, the same         offload_optimizer, _param, .ratio (fraction), -
micro_batch, accumulate, tiles    train.*                     train_micro_batch_size_per_gpu, gradient_...
activations                       activations                 - (a setting of the model there)
precision, autocast               precision, autocast         bf16.enabled, -
optimizer                         optimizer.name              refused but AdamW
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from math import ceil, log10
from pathlib import Path
from typing import Any

from zero3d.config import Config, degrees_of, settle, zero_of
from zero3d.distributed.degrees import FOLDS, least_ranks
from zero3d.errors import ConfigError
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import AUTO, Offload
from zero3d.spec.optimizer import ADAMW, OPTIMIZERS
from zero3d.spec.sections import planned
from zero3d.spec.tiers import DISK, HOST, TIERS
from zero3d.spec.zero import Zero
from zero3d.tools.plan.goodput import Goodput
from zero3d.tools.plan.hardware import CATALOGUE, cluster
from zero3d.tools.plan.inputs import without_effect
from zero3d.tools.plan.search import LONG
from zero3d.tools.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan

NEW, WEIGHTS, ADAPTERS = "new weights", "a model's weights", "adapters"  # what a run trains
USUAL: Mapping[str, Mapping[str, Any]] = {  # sections of a first run of each, beside its plan
    NEW: {"optimizer": {"lr": 3e-4}, "schedule": {"name": "cosine", "warmup": 0.01, "final": 0.1}},
    WEIGHTS: {"optimizer": {"lr": 2e-5}, "schedule": {"name": "cosine", "warmup": 0.03, "final": 0.1}},
    ADAPTERS: {
        "optimizer": {"lr": 2e-4, "weight_decay": 0.0},
        "schedule": {"name": "cosine", "warmup": 0.03, "final": 0.1},
    },
}
FIRST = ("output", "model", "lora", "data", "train", "optimizer", "schedule")  # sections of a file, the others follow
HELD_OUT, EVALUATED = 0.01, 16  # of documents; micro-batches of a rank in an evaluation
HOUR = 3600.0  # of training, that a stop may cost at most where saves are cheap
NVME = "nvme"
DEEPSPEED = {HOST: "cpu", DISK: NVME}  # tiers as its JSON names them; it has no others


def train_config(model: ModelSpec, plan: ParallelPlan, path: str, tokenizer: str | None) -> dict[str, Any]:
    """Return the tree of a file for `zero3d train`. tokenizer: of data.tokenizer, None for the model's own.

    What is on a disk is in OUTPUT/offload, since the file names no folder for it. OUTPUT is runs/ and the model's name:
    launchers need one that all machines share.
    """
    folds = {fold.name for fold in FOLDS if getattr(plan, fold.name) == (fold.usual or plan.dp)}
    left_out = folds | without_effect(plan)
    mesh = {key: value for key, value in _non_default(plan.mesh, "experts").items() if key not in left_out}
    away = _non_default(plan.offload)
    sequences = plan.micro_batch * plan.accumulate * plan.rows
    saves = {"checkpoint": {"asynchronous": True}} if plan.asynchronous_saves else {}
    health = {"health": {"replay": plan.replay}} if plan.replay else {}
    return (
        {
            "output": f"runs/{_name(path)}",
            "model": {"path": path}
            | {key: value for key in ("linear", "quantize") if (value := getattr(plan, key)) is not None},
            "data": {"length": model.length}
            | ({"packing": False} if _unpacked(model) else {})
            | ({"tokenizer": tokenizer} if tokenizer else {}),
            "train": {"batch": sequences, "micro_batch": plan.micro_batch, "accumulate": plan.accumulate}
            | ({} if plan.ema is None else {"ema": plan.ema})
            | ({} if plan.tiled_loss == AUTO else {"tiled_loss": plan.tiled_loss})
            | ({"compile": True} if plan.compile else {}),
            "mesh": mesh,
            "zero": _non_default(plan.zero, "stage", "reduce_dtype"),
            "precision": plan.precision,
            "activations": plan.activations,
        }
        | ({"autocast": True} if plan.autocast else {})
        | ({"offload": away} if away else {})
        | ({"optimizer": {"name": plan.optimizer}} if plan.optimizer != ADAMW else {})
        | saves
        | health
    )


def planned_for(used: ClusterSpec, file: str | None = None) -> dict[str, Any]:
    """Return the section `plan`: the cluster that a run was planned for. file: that described it."""
    named = {"gpu": used.gpu.name} if used.gpu.name in CATALOGUE else {}
    usual = None
    with suppress(ConfigError):  # of GPUs that fill no such nodes
        usual = cluster(used.gpu.name, used.gpus).hosts
    nodes = {} if usual == used.hosts else {"nodes": used.hosts}
    return {"gpus": used.gpus, **named, **nodes} | ({} if file is None else {"cluster": file})


def whole_run(
    tree: Mapping[str, Any], trained: str, estimate: Estimate, save: Goodput, tokens: float | None
) -> dict[str, Any]:
    """Return a plan's file with all else that a first run says: how long, at what rates, when it saves and evaluates.

    trained  NEW, WEIGHTS or ADAPTERS
    tokens   of the whole training; without them it is one pass over the data
    """
    steps = None if tokens is None else max(1, ceil(tokens / estimate.tokens))
    every = _round_steps(min(save.every, max(HOUR, 10 * save.save)) / estimate.seconds.mid)
    every = every if steps is None else min(every, steps)
    sections = {name: {**tree.get(name, {}), **section} for name, section in USUAL[trained].items()}
    written = {
        **tree,
        "data": {name: tree["data"][name] for name in ("train", "tokenizer") if name in tree["data"]}
        | {"validation": HELD_OUT}
        | tree["data"],
        "train": ({"epochs": 1} if steps is None else {"steps": steps}) | tree["train"],
        **sections,
        "evaluate": {"every": every, "batches": EVALUATED},
        "checkpoint": {"every": every, **tree.get("checkpoint", {})},
    }
    return {name: written.pop(name) for name in FIRST if name in written} | written


def _round_steps(steps: float) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50, ... that is not above."""
    power: int = 10 ** int(log10(max(1.0, steps)))
    return next(each * power for each in (5, 2, 1) if each * power <= max(1.0, steps))


def _unpacked(model: ModelSpec) -> bool:
    """Return whether a plan is of one document in each sequence, as its run must have them then."""
    return "packed" not in model.provenance and (model.length >= LONG or model.provenance.startswith("traced"))


def _name(path: str) -> str:
    """Return the name of a model's folder, or of what makes it."""
    where = Path(path)
    return (where.parent.name or "model") if where.name == "config.json" else where.name.replace(":", "-")


def _non_default(section: Zero | Offload | Mesh, *always: str) -> dict[str, Any]:
    """Return the keys of a section that are not as by default, and those that are `always` said."""
    values = ((key, getattr(section, key.name)) for key in fields(section))
    return {key.name: value for key, value in values if value != key.default or key.name in always}


def plan_of(config: Config, gpus: int | None) -> ParallelPlan:
    """Return a configuration's plan on `gpus` ranks (None: as many as its mesh says). Raises ConfigError, MeshError.

    What `offload.optimizer=auto` would choose is not known here: all states are on the device.
    """
    mesh = config.mesh
    world = gpus or least_ranks(degrees_of(mesh))
    degrees, batch = settle(config, world)
    schedule = Schedule.of(mesh.schedule)
    if degrees.pp > 1:
        schedule.check(batch.accumulate, degrees.pp)
    sequence_parallel = mesh.sequence_parallel and degrees.tp > 1
    known = {**degrees._asdict(), "schedule": schedule.name, "sequence_parallel": sequence_parallel}
    place = "none" if config.offload.optimizer == AUTO else config.offload.optimizer
    return ParallelPlan(
        zero=planned(zero_of(config, degrees)),
        offload=replace(planned(config.offload), optimizer=place).settled,
        mesh=replace(planned(mesh), **known),
        precision=config.precision,
        autocast=config.autocast,
        activations=config.activations,
        optimizer=config.optimizer.name,
        ema=config.train.ema,
        replay=config.health.replay,
        linear=config.model.linear,
        quantize=config.model.quantize,
        micro_batch=batch.micro_batch,
        accumulate=batch.accumulate,
        tiled_loss=config.train.tiled_loss,
        compile=config.train.compile,
        virtual=schedule.chunks_per_rank if degrees.pp > 1 else 1,
        asynchronous_saves=config.checkpoint.asynchronous,
    )


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
    if plan.sp > 1:
        raise ConfigError(
            f"--emit-deepspeed: DeepSpeed's JSON cannot say sp={plan.sp}: its sequence axis is asked for in Python."
        )
    if plan.shard < plan.dp:
        raise ConfigError(
            f"--emit-deepspeed: DeepSpeed's JSON cannot say shard={plan.shard} of dp={plan.dp}: its MiCS is gone."
        )
    if plan.pp > 1 or plan.mesh.sequence_parallel:
        beside = " with sequence parallelism" if plan.mesh.sequence_parallel else ""
        raise ConfigError(
            f"--emit-deepspeed: DeepSpeed's JSON cannot say pp={plan.pp}{beside}: its pipelines are written in Python."
        )
    zero: dict[str, Any] = {"stage": plan.zero.stage, "overlap_comm": True, "contiguous_gradients": True}
    for key, place in (("offload_optimizer", plan.offload.optimizer), ("offload_param", plan.offload.params)):
        if place != "none":
            if place not in DEEPSPEED:
                raise ConfigError(
                    f"--emit-deepspeed: DeepSpeed's JSON has no states {TIERS[place].where}: pass --offload "
                    f"{' or '.join(DEEPSPEED)}."
                )
            device = DEEPSPEED[place]
            zero[key] = {"device": device, "pin_memory": True} | ({"nvme_path": "offload"} if device == NVME else {})
    device = DEEPSPEED.get(plan.offload.optimizer, "none")
    if device == "cpu" and plan.offload.fraction < 1:
        zero["offload_optimizer"]["ratio"] = plan.offload.fraction
    if device == NVME and plan.zero.stage != 3:
        raise ConfigError(
            f"--emit-deepspeed: DeepSpeed's JSON has optimizer states on a disk at stage 3 alone, and the plan is of "
            f"stage {plan.zero.stage}: pass --offload host."
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
