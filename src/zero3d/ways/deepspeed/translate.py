"""DeepSpeed's values as keys of a configuration, with DeepSpeed's own defaults.

strong   the JSON says it: the caller may not say something else
weak     DeepSpeed's default where the JSON is silent: what the caller says wins
auto     the caller's, if there is one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zero3d.config.deepspeed_schedules import OPTIONS
from zero3d.config.hints import nearest
from zero3d.config.keys import KEYS
from zero3d.errors import short
from zero3d.ways.deepspeed.document import AUTO, Document, raise_all, shown
from zero3d.ways.deepspeed.keys import OPTIMIZER, PARAM, ZERO
from zero3d.ways.deepspeed.optimizer_kinds import IN_PROGRAMS, IN_RUNS, MATRICES, OPTIONS as OF_KIND, RATE, RATES, REST

DEVICES: Mapping[str | None, str] = {"none": "none", None: "none", "cpu": "host", "nvme": "disk"}
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfp16", "bfloat16", "torch.bfloat16"), "bf16"),
}
NEVER = 2.0**53  # steps without an overflow after which a fixed loss scale would double
CLIPPING = 1.0  # since 0.19.3, where the key is absent
ADAM = {"optimizer.lr": 1e-3, "optimizer.betas": (0.9, 0.999), "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.0}
TAKEN_FROM_RUN = ("total_num_steps", "warmup_num_steps", "warmup_max_lr")  # options of schedulers that may be auto


class Value(NamedTuple):
    """What a key of ours gets, and from which key of DeepSpeed's."""

    value: Any
    key: str
    strong: bool = True


@dataclass
class Translation:
    """What a JSON says, by our keys.

    autos        keys that are the caller's, with DeepSpeed's names
    precisions   what the caller's precision may be where it is auto
    """

    values: dict[str, Value] = field(default_factory=dict)
    autos: dict[str, str] = field(default_factory=dict)
    precisions: tuple[str, ...] = ()


def translate(document: Document, kinds: Collection[str] = IN_RUNS) -> Translation:
    """Return what a JSON says; kinds: of optimizers that are taken. Raises ConfigError."""
    reader = _Reader(document.values, kinds)
    for part in (_batch, _precision, _zero, _offload, _optimizer, _schedule, _others):
        part(reader)
    raise_all(document.name, reader.problems)
    return reader.made


class _Reader:
    """Takes values key by key, and collects what is wrong."""

    def __init__(self, given: Mapping[str, Any], kinds: Collection[str]) -> None:
        self.given, self.kinds = given, kinds
        self.made = Translation()
        self.problems: list[str] = []

    def carry(self, key: str, ours: str, change: Callable[[Any], Any] = lambda value: value) -> None:
        """Carry a value over to a key of ours, if there is one that is not null."""
        value = self.given.get(key)
        if value is None:
            return
        if value == AUTO:
            self.made.autos[ours] = key
            return
        self.put(ours, change(value), key)

    def put(self, ours: str, value: Any, key: str, strong: bool = True) -> None:
        """Give a key of ours a value, which is checked."""
        try:
            self.made.values[ours] = Value(KEYS[ours].read(value), key, strong)
        except ValueError as error:
            self.problems.append(f"{key}={shown(self.given.get(key))}: {error}")

    def switch(self, key: str) -> bool | None:
        """Return whether something is on; None where it is auto."""
        value = self.given.get(key)
        if value == AUTO:
            return None
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key}={shown(value)} is true, false or auto.")
        return value is True


def _batch(reader: _Reader) -> None:
    reader.carry("train_batch_size", "train.batch")
    reader.carry("train_micro_batch_size_per_gpu", "train.micro_batch")
    reader.carry("gradient_accumulation_steps", "train.accumulate")


def _precision(reader: _Reader) -> None:
    brain = "bfloat16.enabled" if "bfloat16.enabled" in reader.given else "bf16.enabled"
    keys = {"bf16": brain, "fp16": "fp16.enabled"}
    on = {name: reader.switch(key) for name, key in keys.items()}
    if on["bf16"] and on["fp16"]:
        reader.problems.append("bf16 and fp16 are both enabled: set one of them to false.")
    elif chosen := [name for name, is_on in on.items() if is_on]:
        reader.put("precision", chosen[0], keys[chosen[0]])
    elif autos := [name for name, is_on in on.items() if is_on is None]:
        reader.made.autos["precision"] = " and ".join(keys[name] for name in autos)
        reader.made.precisions = (*autos, "fp32")
    else:
        reader.put("precision", "fp32", " and ".join(keys.values()), any(key in reader.given for key in keys.values()))
    if on["fp16"] is False:
        return
    scale = reader.given.get("fp16.loss_scale", 0)
    if scale not in (0, None, AUTO):  # a fixed one
        reader.carry("fp16.loss_scale", "loss_scale.initial")
        reader.carry("fp16.loss_scale", "loss_scale.minimum")
        reader.put("loss_scale.window", NEVER, "fp16.loss_scale")
        return
    reader.carry("fp16.initial_scale_power", "loss_scale.initial", _power)
    reader.carry("fp16.loss_scale_window", "loss_scale.window")
    reader.carry("fp16.hysteresis", "loss_scale.hysteresis")
    reader.carry("fp16.min_loss_scale", "loss_scale.minimum")


def _power(value: Any) -> Any:
    return 2.0**value if _is_number(value) and abs(value) < 64 else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _zero(reader: _Reader) -> None:
    if f"{ZERO}.stage" in reader.given:
        reader.carry(f"{ZERO}.stage", "zero.stage")
    else:
        reader.put("zero.stage", 0, f"{ZERO}.stage", strong=False)
    for name, ours in (("weights", "zero.gather_wire"), ("gradients", "zero.slow_wire")):
        if reader.switch(key := f"{ZERO}.zero_quantized_{name}"):
            reader.put(ours, "int8", key)
    if reader.given.get(key := f"{ZERO}.zero_hpz_partition_size") not in (0, 1):
        reader.carry(key, "zero.second_shard")


def _offload(reader: _Reader) -> None:
    stage = reader.given.get(f"{ZERO}.stage", 0)
    folders: list[Any] = []
    for section, ours, old, least in (
        (OPTIMIZER, "offload.optimizer", ("cpu_offload",), 1),
        (PARAM, "offload.params", ("cpu_offload_params", "cpu_offload_param"), 3),
    ):
        device, key = reader.given.get(f"{section}.device"), f"{section}.device"
        for name in old:
            if reader.switch(f"{ZERO}.{name}") and device is None:
                device, key = "cpu", f"{ZERO}.{name}"
        if not (device is None or isinstance(device, str)) or device not in DEVICES:
            reader.problems.append(f"{key}={shown(device)} is none, cpu or nvme.")
            continue
        if DEVICES[device] != "none" and isinstance(stage, int) and stage < least:
            reader.problems.append(
                f"{key}={device} needs {ZERO}.stage {least} or higher, and it is {stage}: there is nothing to offload."
            )
            continue
        if DEVICES[device] != "none":
            reader.put(ours, DEVICES[device], key)
        if device == "nvme" and (folder := reader.given.get(f"{section}.nvme_path")) is not None:
            folders += [folder] if folder not in folders else []
            reader.carry(f"{section}.nvme_path", "offload.directory")
    if len(folders) > 1:
        reader.problems.append(f"nvme_path is {' and '.join(map(short, folders))}: give one folder.")
    if reader.given.get(f"{OPTIMIZER}.ratio") not in (None, 1, 1.0) and "offload.optimizer" in reader.made.values:
        reader.carry(f"{OPTIMIZER}.ratio", "offload.fraction")


def _optimizer(reader: _Reader) -> None:
    if "gradient_clipping" not in reader.given:
        reader.put("optimizer.clip_norm", CLIPPING, "gradient_clipping", strong=False)
    elif reader.given["gradient_clipping"] in (0, None):
        reader.put("optimizer.clip_norm", None, "gradient_clipping")
    else:
        reader.carry("gradient_clipping", "optimizer.clip_norm")
    kind = reader.given.get("optimizer.type")
    if kind is None:
        if some := [key for key in reader.given if key.startswith("optimizer.params.")]:
            reader.problems.append(f"{some[0]} is of an optimizer without optimizer.type: add AdamW.")
        return
    name = kind.lower() if isinstance(kind, str) else ""
    if name not in reader.kinds:
        reader.problems.append(f"optimizer.type={shown(kind)} is refused: {_instead(name, reader.kinds)}.")
        return
    for key in reader.given:
        option = key.removeprefix("optimizer.params.")
        if option != key and option not in OF_KIND[name] and reader.given[key] is not None:
            reader.problems.append(f"{key} is not of {kind}, which has {', '.join(OF_KIND[name])}.")
    {"muon": _muon, "adam": _adam, "adamw": _adam}.get(name, _of_program)(reader)


def _instead(name: str, kinds: Collection[str]) -> str:
    """Return why an optimizer is not taken, and what is."""
    taken = "AdamW or Muon" if "muon" in kinds else "AdamW"
    if name in IN_PROGRAMS:
        return f"it is for programs; use {taken}, or zero3d.ways.deepspeed.initialize in one"
    return f"it is not supported; use {taken}, or zero3d.Engine(optimizer=...) in a program"


def _adam(reader: _Reader) -> None:
    for ours, default in ADAM.items():
        _take(reader, ours, f"optimizer.params.{ours.partition('.')[2]}", default)


def _take(reader: _Reader, ours: str, key: str, default: Any) -> None:
    reader.put(ours, default, key, strong=False)
    if reader.given.get(key) == AUTO:
        del reader.made.values[ours]
    reader.carry(key, ours)


def _muon(reader: _Reader) -> None:
    """Translate Muon, whose rate is that of matrices and of all else, but for muon_lr and adam_lr."""
    above, given = "optimizer.params.", reader.given
    reader.put("optimizer.name", "muon", "optimizer.type")
    _take(reader, "optimizer.lr", f"{above}{'lr' if given.get(f'{above}adam_lr') is None else 'adam_lr'}", REST)
    _take(reader, "optimizer.betas", f"{above}betas", (0.9, 0.95))
    _take(reader, "optimizer.eps", f"{above}eps", 1e-10)
    _take(reader, "optimizer.weight_decay", f"{above}weight_decay", 0.0)
    own: dict[str, Any] = {"adjust_lr": "original", "momentum": 0.95, "lr": MATRICES}
    for key, name in ((f"{above}momentum", "momentum"), (f"{above}lr", "lr"), (f"{above}muon_lr", "lr")):
        if given.get(key) == AUTO:
            own.pop(name)
        elif given.get(key) is not None:
            own[name] = given[key]
    reader.put("optimizer.muon", own, "optimizer.params")


def _of_program(reader: _Reader) -> None:
    """Translate the rate alone: the optimizer takes its options as they are."""
    autos = [key for key, value in reader.given.items() if key.startswith("optimizer.params.") and value == AUTO]
    for key in autos:
        reader.problems.append(f"{key} cannot be auto: give a number.")
    if not autos:
        name = str(reader.given["optimizer.type"]).lower()
        _take(reader, "optimizer.lr", "optimizer.params.lr", RATES.get(name, RATE))


def _schedule(reader: _Reader) -> None:
    name, params = reader.given.get("scheduler.type"), reader.given.get("scheduler.params")
    if name is None:
        return
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        reader.problems.append(f"scheduler.params is a section, and has {shown(params)}.")
        return
    if not isinstance(name, str) or name not in OPTIONS:
        near = nearest(name, OPTIONS) if isinstance(name, str) else None
        reader.problems.append(
            f"scheduler.type={shown(name)} is refused: DeepSpeed has {', '.join(OPTIONS)}; "
            + (f"did you mean {near}?" if near else "use one of them, or none.")
        )
        return
    options = dict(params)
    for key, value in params.items():
        if value != AUTO:
            continue
        if key in ("warmup_min_lr", "warmup_min_ratio"):
            options[key] = 0.0
        elif key in TAKEN_FROM_RUN:
            options[key] = None
        else:
            reader.problems.append(f"scheduler.params.{short(key)} cannot be auto: give a number.")
            return
    reader.put("schedule.name", name, "scheduler.type")
    if options:
        reader.put("schedule.options", options, "scheduler.params")


def _others(reader: _Reader) -> None:
    if reader.given.get("communication_data_type") not in (None, AUTO):
        dtype = reader.given["communication_data_type"]
        reader.put("zero.reduce_dtype", DTYPES.get(short(dtype), dtype), "communication_data_type")
    if reader.given.get("tensor_parallel.autotp_size") not in (None, 0, 1):
        reader.carry("tensor_parallel.autotp_size", "mesh.tp")
    if reader.given.get("sequence_parallel_size") not in (None, 1):
        reader.carry("sequence_parallel_size", "mesh.sp")
    if reader.given.get("zero_optimization.mics_shard_size") not in (None, -1, 0):
        reader.carry("zero_optimization.mics_shard_size", "mesh.shard")
    every = reader.given.get("steps_per_print")
    if every is not None and not (isinstance(every, float) and math.isinf(every)):
        reader.carry("steps_per_print", "log.every")
    if trackers := [name for name in ("tensorboard", "wandb") if reader.switch(f"{name}.enabled")]:
        reader.put("log.to", trackers, " and ".join(f"{name}.enabled" for name in trackers))
    if "wandb" in trackers:
        project = reader.given.get("wandb.project")
        is_named = project not in (None, AUTO)
        reader.put("log.project", project if is_named else "deepspeed", "wandb.project", strong=is_named)
    if reader.switch("compile.enabled"):
        reader.put("train.compile", True, "compile.enabled")
    reader.carry("seed", "seed")
