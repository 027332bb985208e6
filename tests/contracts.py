"""Runs that go on with one setting changed: every keyword of an Engine, and another value for each.

The contract is kept where the line of the resume begins with "bitwise" and all bits are those of the run that went on
without a change, or with "not bitwise" and names what was changed; a refusal keeps it, too.
"""

import hashlib
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from tensors import tiny
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import zero3d
from zero3d.activations import recompute
from zero3d.errors import Zero3dError
from zero3d.precision import LossScaling, Precision

SHARE = 20  # one case of so many is drawn for `make test`
BEFORE, AFTER = 2, 3  # steps until the checkpoint, and from there
ROWS, WIDTH = 4, 24


def drawn(name):
    """Whether `make test` runs a case: one in twenty of all, others for each commit."""
    return hashed(name) % SHARE == 0


def hashed(name):
    """A number for a name, another one for each commit."""
    return int(hashlib.sha256(f"{_commit()} {name}".encode()).hexdigest(), 16)


@cache
def _commit():
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


class Change(NamedTuple):
    """Another value of a keyword.

    base   of BASES, which the checkpoint is of
    says   what a line has to name, where that is not the keyword; for options of an optimizer in either case
    keeps  whether no bit changes, so that the line has to begin with "bitwise"
    """

    keyword: str
    value: object
    base: str = "rows"
    says: str = ""
    keeps: bool = False

    @property
    def id(self):
        shown = self.says if callable(self.value) else getattr(self.value, "name", self.value)
        return f"{self.base}: {self.keyword}={shown}"


def adamw(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **options):
    """What builds AdamW with these options."""
    options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "fused": True} | options
    return lambda parameters: torch.optim.AdamW(parameters, **options)


def step_lr(gamma):
    return lambda optimizer: StepLR(optimizer, 2, gamma)


def lambda_lr(base):
    return lambda optimizer: LambdaLR(optimizer, lambda step: base**step)


def squares(output, batch):
    return output.float().pow(2).sum(), output.numel()


def cubes(output, batch):
    return output.float().abs().pow(3).sum(), output.numel()


class Rows(nn.Module):
    """Blocks on rows of numbers, with norms and biases."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


USUAL = {"stage": 3, "precision": "fp32", "clip_norm": 0.05, "optimizer": adamw(), "scheduler": step_lr(0.5)}
OF_ROWS = {"loss": squares, "param_groups": [{"match": "*bias", "weight_decay": 0.0}]}
BASES = {  # degrees, keywords beside USUAL; those with a loss are of Rows, the others of a small Llama
    "rows": ({}, OF_ROWS),
    "by hand": ({}, OF_ROWS),
    "bf16": ({}, OF_ROWS | {"precision": "bf16"}),
    "fp16": ({}, OF_ROWS | {"precision": "fp16"}),
    "functions": ({}, OF_ROWS | {"scheduler": lambda_lr(0.9)}),
    "offload": ({}, OF_ROWS | {"offload": {"optimizer": "host"}, "scheduler": None}),
    "copies": ({"shard": 1}, OF_ROWS),
    "coded copies": ({"shard": 1}, OF_ROWS | {"slow_wire": "int8"}),
    "llama": ({}, {}),
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2}, {}),
    "sp": ({"sp": 2}, {}),
}
SPLIT = {"optimizer": "host"}
WHOLE = "colwise_gather_output"
WHOLE_MLP = {
    "layers.*.mlp.gate_proj": WHOLE,
    "layers.*.mlp.up_proj": WHOLE,
    "layers.*.mlp.down_proj": "rowwise_split_input",
}
CHANGES = [
    Change("stage", 2, keeps=True),
    Change("stage", 1, says="reduce"),
    Change("precision", "bf16"),
    Change("precision", Precision("fp16", LossScaling(window=2)), "fp16", says="loss_scale"),
    Change("autocast", True, "bf16"),
    Change("reduce_dtype", "bf16", "bf16", says="wire"),
    Change("optimizer", adamw(lr=5e-2), says="lr", keeps=True),
    Change("optimizer", adamw(betas=(0.5, 0.6)), says="betas", keeps=True),
    Change("optimizer", adamw(eps=1e-3), says="eps", keeps=True),
    Change("optimizer", adamw(weight_decay=2.0), says="weight_decay", keeps=True),
    Change("optimizer", adamw(maximize=True), says="maximize", keeps=True),
    Change("optimizer", adamw(amsgrad=True), says="amsgrad", keeps=True),
    Change("scheduler", None),
    Change("scheduler", step_lr(0.3), says="scheduler", keeps=True),
    Change("scheduler", step_lr(0.5), "offload", says="scheduler"),
    Change("scheduler", lambda_lr(0.7), "functions", says="learning rates"),
    Change("param_groups", [{"match": "*layers*bias", "weight_decay": 0.0}], says="groups"),
    Change("clip_norm", 0.5),
    Change("clip_norm", None),
    Change("accumulate", 2, "by hand"),
    Change("loss", cubes, says="loss"),
    Change("units", ["layers.*.1"]),
    Change("compile", "eager", says="compiled"),
    Change("linear", "fp8"),
    Change("release", "every_step", keeps=True),
    Change("reduce", "every_step"),
    Change("reduce_scatter", "native", says="algorithm"),
    Change("master", "split", "bf16", keeps=True),
    Change("offload", SPLIT, keeps=True),
    Change("offload", {"optimizer": "host", "params": "host"}, keeps=True),
    Change("offload", SPLIT | {"moments": "bf16"}, "offload", says="moments"),
    Change("offload", SPLIT | {"gradients": "host", "gradient_dtype": "bf16"}, "offload", says="gradient_dtype"),
    Change("offload", SPLIT | {"fraction": 0.5}, "offload", keeps=True),
    Change("offload", SPLIT | {"executor": "host"}, "offload", keeps=True),
    Change("exact", True),
    Change("schedule", "gpipe", "pp", keeps=True),
    Change("schedule", "interleaved", "pp", says="chunks"),
    Change("schedule", "zbv", "pp", says="chunks"),
    Change("blocks", "model.layers", "pp"),
    Change("tp_plan", WHOLE_MLP, "tp"),
    Change("sequence_parallel", True, "tp"),
    Change("partition_activations", True, "tp", keeps=True),
    Change("sp_kind", "gather", "sp"),
    Change("sp_mixers", "prefix", "sp", keeps=True),
    Change("sp_mask_budget", "1MB", "sp", keeps=True),
    Change("ep_plan", {"layers": "none"}),
    Change("experts", "fast", keeps=True),
    Change("gather_budget", 1024),
    Change("weight_shards", "cast", "bf16", keeps=True),
    Change("gather_wire", "int8"),
    Change("second_shard", 2, keeps=True),
    Change("slow_wire", "bf16", "copies"),
    Change("slow_rounding", "stochastic", "coded copies"),
    Change("communicators", 1, keeps=True),
    Change("tiled_loss", True, "llama"),
    Change("replay", 1, keeps=True),
    Change("ema", 0.5, keeps=True),
    Change("expert_bias_rate", 0.1, "llama"),
]
EXCUSED = {
    "model": "a checkpoint of another model is refused",
    "mesh": "degrees: parity/test_checkpoint.py and test_mesh_checkpoint.py",
    "weights": "a load replaces what they are",
}


def engine_of(base, **changed):
    degrees, keywords = BASES[base]
    torch.manual_seed(3)
    cut = "tp" in degrees
    model = Rows() if "loss" in keywords else tiny("llama", kv_heads=4, layers=4, dropout=0.1 if cut else 0.0)
    if cut:
        recompute(model, "full")  # partition_activations is about its inputs
    return zero3d.Engine(model, mesh=zero3d.Mesh(**degrees), **{**USUAL, **keywords, **changed})


def micro_batches(base, step, rank):
    """Two micro-batches of a step: rows of numbers of each rank, or tokens, which ranks of tp, pp and sp share."""
    degrees, keywords = BASES[base]
    together = set(degrees) & {"tp", "pp", "sp"}
    generator = torch.Generator().manual_seed(100 * step + (0 if together else rank))
    if "loss" in keywords:
        return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)]
    ids = (torch.randint(3, 61, (2, 16), generator=generator) for _ in range(2))
    return [{"input_ids": each, "labels": each} for each in ids]


def trained(engine, base, first, last):
    """Losses of these steps, and a hash of the weights behind them."""
    losses = []
    for step in range(first, last):
        batches = micro_batches(base, step, engine.mesh.rank)
        if base != "by hand":
            losses.append(engine.train_batch(batches).item())
            continue
        for batch in batches:
            loss = engine(batch).pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    with engine.full_params():
        told = b"".join(p.detach().double().numpy().tobytes() for p in engine.module.parameters())
    return losses, hashlib.sha256(told).hexdigest()


def go_on(folder, base, changes):
    """Of each (keyword, value) whether the bits were those of a run without it, None where refused, and the line."""
    first = engine_of(base)
    trained(first, base, 0, BEFORE)
    first.save(folder)
    wanted = trained(first, base, BEFORE, BEFORE + AFTER)
    found = []
    for keyword, value in changes:
        try:
            engine = engine_of(base, **{keyword: value})
            engine.load(folder)
            found.append((trained(engine, base, BEFORE, BEFORE + AFTER) == wanted, engine.resumed))
        except Zero3dError as error:
            found.append((None, str(error)))
    return found


def changed(base, numbers, folder):
    """What `go_on` says of some of CHANGES, by their numbers: what builds optimizers cannot be sent to ranks."""
    return go_on(folder, base, [(CHANGES[number].keyword, CHANGES[number].value) for number in numbers])
