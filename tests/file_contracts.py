"""Runs of `zero3d train` that go on with one key of their file changed: every key, and another value for each.

The contract is that of `contracts.py`, and a line that is not bitwise names the key, with the value to type.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

from contracts import WHOLE_MLP
from training import save_rows, start, traced_once, tree

STEPS, SAVED = 5, 2  # of the run, and those behind its first checkpoint
SEEN = ("step", "loss", "grad_norm", "lr")


class Key(NamedTuple):
    """Another value of a key.

    base   of BASES: the run that is changed
    keeps  whether no bit changes, so that the line has to begin with "bitwise"
    with_it  other keys that have to change with it
    """

    name: str
    value: object
    base: str = "plain"
    keeps: bool = False
    with_it: tuple = ()

    @property
    def id(self):
        return f"{self.base}: {self.name}={self.value}"


BASES = {  # ranks, and sections beside those of a plain run
    "plain": (1, {}),
    "dp": (2, {}),
    "tp": (2, {"mesh": {"tp": 2}, "activations": "full"}),
    "pp": (2, {"mesh": {"pp": 2}, "train": {"accumulate": 4}}),
    "sp": (2, {"mesh": {"sp": 2}}),
    "copies": (2, {"mesh": {"shard": 1}}),
    "coded copies": (2, {"mesh": {"shard": 1}, "zero": {"slow_wire": "int8"}}),
    "bf16": (2, {"precision": "bf16"}),
    "fp16": (1, {"precision": "fp16", "loss_scale": {"initial": 8.0}}),
    "offload": (2, {"offload": {"optimizer": "host"}}),
    "recomputed": (1, {"activations": "full"}),
    "lora": (1, {"lora": {"rank": 4}}),
    "muon": (1, {"optimizer": {"name": "muon"}}),
    "wsd": (1, {"schedule": {"name": "wsd", "decay": 2}}),
    "WarmupLR": (1, {"schedule": {"name": "WarmupLR", "warmup": 0, "options": {"warmup_num_steps": 4}}}),
    "grouped": (1, {"data": {"packing": False}}),
}
EXCUSED = {
    "callbacks": "classes of the user's own",
    "output": "each case of these has one of its own",
    "data.images": "vision-language models: a place in other data is refused (test_resume_guards.py)",
    "data.group_by_modality": "the same",
    "data.patches": "the same",
    "model.linear": "fp8: refused on CPUs (unit/test_fp8.py)",
    "model.part": "a folder of a type with towers: parity/test_parts.py",
    "train.compile": "takes a minute; an engine's is changed in test_resume_contract.py",
    "mesh.ep": "mixtures of experts: parity/test_experts.py",
    "mesh.experts": "the same; an engine's is changed in test_resume_contract.py",
    "mesh.ep_plan": "the same",
    "train.expert_bias_rate": "the same",
    "checkpoint.to": "object stores: parity/test_store_checkpoints.py",
    "log.to": "trackers: unit/test_trackers.py",
    "log.project": "the same",
    "log.report": "what is printed: unit/test_report.py",
    "log.port": "the same: unit/test_endpoints.py",
    "log.host": "the same",
    "log.on": "commands of the user's own: unit/test_event_commands.py",
    "plan.cluster": "plans choose nothing of a run but mesh.shard and what is sent, which are keys of their own",
    "plan.links": "the same",
    "plan.gpus": "what zero3d plan and zero3d simulate are told: unit/test_plan_cli.py",
    "plan.gpu": "the same",
    "plan.nodes": "the same",
    "health.min_ranks": "ranks that are lost: parity/test_elastic.py",
    "evaluate.function": "a function of the user's own",
    "evaluate.prompt": "written at the end of a run",
    "evaluate.best": "a value of evaluate.function",
    "data.workers": "processes that take seconds to start: unit/test_data_batches.py",
    "mesh.dp": "another number of ranks: parity/test_resume.py",
}
KEYS = [
    Key("seed", 1),
    Key("precision", "bf16"),
    Key("autocast", True, "bf16"),
    Key("activations", "full", keeps=True),
    Key("freeze", ["*.embed_tokens"]),
    Key("model.path", "other"),
    Key("model.init", "random", keeps=True),
    Key("model.attn", "eager"),
    Key("model.quantize", "nf4", "lora"),
    Key("lora.rank", 8, "lora"),
    Key("lora.alpha", 3, "lora"),
    Key("lora.targets", ["q_proj"], "lora"),
    Key("lora.dropout", 0.5, "lora"),
    Key("lora.train_also", ["lm_head"], "lora"),
    Key("lora.rslora", True, "lora"),
    Key("lora.dora", True, "lora"),
    Key("lora.init", "gaussian", "lora", keeps=True),
    Key("data.train", "others.npy"),
    Key("data.validation", 0.3),
    Key("data.format", "npy", keeps=True),
    Key("data.tokenizer", "bytes"),
    Key("data.length", 8),
    Key("data.packing", "best_fit"),
    Key("data.group_by_length", True, "grouped"),
    Key("data.streaming", True, "grouped"),
    Key("data.shuffle", True),
    Key("data.skip_bad_lines", True, keeps=True),
    Key("data.processes", 1, keeps=True),
    Key("data.cache", "cache 2", keeps=True),
    Key("data.cache_limit", "2GB", keeps=True),
    Key("train.steps", 6),
    Key("train.steps", 6, "wsd"),
    Key("train.epochs", 2, with_it=(("train.steps", None),)),
    Key("train.batch", 8),
    Key("train.micro_batch", 4, with_it=(("train.accumulate", None),)),
    Key("train.accumulate", 1),
    Key("train.ema", 0.5, keeps=True),
    Key("train.tiled_loss", True),
    Key("train.deterministic", True, keeps=True),
    Key("optimizer.name", "muon"),
    Key("optimizer.lr", 2e-2),
    Key("optimizer.betas", [0.5, 0.6]),
    Key("optimizer.eps", 1e-3),
    Key("optimizer.weight_decay", 3.0),
    Key("optimizer.no_decay", "*"),
    Key("optimizer.groups", [{"match": "lm_head", "lr": 0.1}]),
    Key("optimizer.muon", {"momentum": 0.5}, "muon"),
    Key("optimizer.split", {"*.q_proj.weight": "equal:2"}, "muon"),
    Key("optimizer.clip_norm", 0.01),
    Key("schedule.name", "linear"),
    Key("schedule.options", {"warmup_num_steps": 5}, "WarmupLR"),
    Key("schedule.warmup", 4),
    Key("schedule.decay", 3, "wsd"),
    Key("schedule.final", 0.9),
    Key("loss_scale.initial", 16.0, "fp16", keeps=True),
    Key("loss_scale.window", 1, "fp16"),
    Key("loss_scale.hysteresis", 1, "fp16"),
    Key("loss_scale.minimum", 2.0, "fp16"),
    Key("health.nonfinite", "stop", keeps=True),
    Key("health.max_skips", 3, keeps=True),
    Key("health.timeout", 0, keeps=True),
    Key("health.slow_timeout", 0, keeps=True),
    Key("health.replay", 1, keeps=True),
    Key("zero.stage", 1, "dp"),
    Key("zero.stage", 2, "dp", keeps=True),
    Key("zero.reduce_dtype", "bf16", "bf16"),
    Key("zero.release", "every_step", "dp", keeps=True),
    Key("zero.reduce", "every_step", "dp"),
    Key("zero.reduce_scatter", "native", "dp"),
    Key("zero.master", "split", "bf16", keeps=True),
    Key("zero.weights", "cast", "bf16", keeps=True),
    Key("zero.gather_budget", 2048, "dp"),
    Key("zero.gather_wire", "int8", "dp"),
    Key("zero.second_shard", 2, "dp", keeps=True),
    Key("zero.slow_wire", "bf16", "copies"),
    Key("zero.slow_rounding", "stochastic", "coded copies"),
    Key("zero.communicators", 1, "dp", keeps=True),
    Key("zero.exact", True, "dp"),
    Key("offload.optimizer", "host", "dp", keeps=True),
    Key("offload.params", "host", "offload", keeps=True),
    Key("offload.gradients", "host", "offload", keeps=True),
    Key("offload.activations", "host", "recomputed", keeps=True),
    Key("offload.fraction", 0.5, "offload", keeps=True),
    Key("offload.directory", "disk", "offload", keeps=True),
    Key("offload.moments", "bf16", "offload"),
    Key("offload.gradient_dtype", "bf16", "offload", with_it=(("offload.gradients", "host"),)),
    Key("offload.executor", "host", "offload", keeps=True),
    Key("offload.host_budget", "8GB", "offload", keeps=True),
    Key("mesh.tp", 2, "dp"),
    Key("mesh.pp", 2, "dp", with_it=(("train.accumulate", 4),)),
    Key("mesh.sp", 2, "dp"),
    Key("mesh.shard", 1, "dp"),
    Key("mesh.sp_kind", "gather", "sp"),
    Key("mesh.sp_mixers", "prefix", "sp", keeps=True),
    Key("mesh.sp_mask_budget", "1GB", "sp", keeps=True),
    Key("mesh.schedule", "gpipe", "pp", keeps=True),
    Key("mesh.blocks", "model.layers", "pp"),
    Key("mesh.tp_plan", WHOLE_MLP, "tp"),
    Key("mesh.sequence_parallel", True, "tp"),
    Key("mesh.partition_activations", True, "tp", keeps=True),
    Key("evaluate.every", 1, keeps=True, with_it=(("data.validation", 0.0),)),
    Key("evaluate.batches", 1, keeps=True),
    Key("evaluate.highest", True, keeps=True),
    Key("evaluate.patience", 3),
    Key("checkpoint.every", 1, keeps=True),
    Key("checkpoint.keep", 1, keeps=True),
    Key("checkpoint.best", False, keeps=True),
    Key("checkpoint.asynchronous", True, keeps=True),
    Key("checkpoint.on_error", "warn", keeps=True),
    Key("checkpoint.export", True, keeps=True),
    Key("checkpoint.verify", True),
    Key("log.every", 1, keeps=True),
    Key("profile.steps", 1, keeps=True),
    Key("profile.after", 1, keeps=True),
]


def file_of(folder, base, output):
    """The file of a base's run, as a tree; gradients are clipped in every step."""
    kept = {"every": SAVED, "keep": 9, "export": False}
    made = tree(folder, output, checkpoint=kept, optimizer={"lr": 1e-2, "clip_norm": 0.5})
    for name, value in BASES[base][1].items():
        made[name] = {**made.get(name, {}), **value} if isinstance(value, dict) else value
    return made


def run(made, resume=None, settings="given"):
    """Records of a run, and the line that says what it goes on as."""
    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.run import run as train

    lines = []

    class Noted(Progress):
        def say(self, text):
            lines.append(text)

    with traced_once():
        result = train(load(made), start("test", resume, settings=settings), Noted(Console(quiet=True)))
    told = [line for line in lines if line.startswith(("bitwise", "not bitwise"))]
    return [{name: record[name] for name in SEEN} for record in result.history], (told or [""])[0]


def behind(records):
    """Those of the steps behind the first checkpoint: of earlier ones rank 0 alone has any when a run goes on."""
    return [record for record in records if SAVED < record["step"] <= STEPS]


def put(made, name, value):
    section, _, key = name.rpartition(".")
    target = made.setdefault(section, {}) if section else made
    target[key] = value


def go_on(folder, base, numbers):
    """Of each key whether the curve is that of the run without a change, None where it is refused; and the line."""
    import torch.distributed as dist

    from zero3d.errors import Zero3dError

    made = file_of(folder, base, f"{base} whole")
    wanted, _ = run(made)
    found = []
    for number in numbers:
        key = KEYS[number]
        changed = file_of(folder, base, f"{base} {number}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.copytree(Path(made["output"]), changed["output"])
        for name, value in ((key.name, key.value), *key.with_it):
            placed = name in ("data.train", "data.cache", "model.path", "offload.directory")
            put(changed, name, str(Path(folder) / value) if placed else value)
        if dist.is_initialized():
            dist.barrier()
        try:
            records, line = run(changed, f"{changed['output']}/checkpoints/step-{SAVED}")
            found.append((behind(records) == behind(wanted), line))
        except Zero3dError as error:
            found.append((None, str(error)))
    return found


def save_others(folder):
    save_rows(Path(folder) / "others.npy", seed=1)
