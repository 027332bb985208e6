"""Training runs of small models in and out of pipelines, and the cases that cover all pairs of their settings."""

from heapq import heappop, heappush
from itertools import combinations, product

import torch
from deep import deep
from models import Net, adamw, batch
from torch.nn import functional as F

import zero3d
from zero3d.activations.recomputation import recompute

FAMILIES = ("net", "llama", "gpt2", "qwen3", "qwen3_moe")
MESHES = ((1, 2), (2, 2), (1, 4))
STATES = ((0, "every_use"), (1, "every_use"), (2, "every_use"), (3, "every_use"), (3, "every_step"))  # stage, release
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
ACTIVATIONS = ("none", "full", "every:2")
SETTINGS = (FAMILIES, MESHES, STATES, SCHEDULES, ACTIVATIONS)
MICRO_BATCHES = 4


class Lm(Net):
    """A plain module whose forward takes token ids by name."""

    def forward(self, input_ids):
        return super().forward(input_ids)


def build(family, layers):
    """A model of one of FAMILIES without dropout: chunks on several ranks would draw other numbers than one rank."""
    torch.manual_seed(7)
    deep_name = family.replace("qwen3_moe", "moe")
    model = Lm(width=48, layers=layers) if family == "net" else deep(deep_name, layers=layers, inner=96)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


def sum_of(output, given):
    """The loss of a micro-batch: the sum over next tokens, and their number."""
    logits, ids = getattr(output, "logits", output), given["targets"]
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
    return total, float(ids[:, 1:].numel())


def micro_batches(step, rank, count=MICRO_BATCHES, **sizes):
    """`targets` are no entry of any model's forward."""
    rows = [batch(100 * step + i, rank, **sizes) for i in range(count)]
    return [{"input_ids": ids, "targets": ids} for ids in rows]


def engine_of(model, mesh, **options):
    made = {"precision": "fp32", "clip_norm": 0.5, "accumulate": MICRO_BATCHES, "loss": sum_of, "optimizer": adamw}
    return zero3d.Engine(model, mesh=mesh, **made | options)


def schedule_of(mesh, schedule):
    """What an Engine is told: without a pipeline there is no schedule."""
    return schedule if mesh.pp > 1 else None


def modules_of(engine):
    return [engine.module] if engine.pipeline is None else list(engine.chunks.values())


def weights_of(engine):
    with engine.full_params():
        return {name: p.detach().clone() for chunk in modules_of(engine) for name, p in chunk.named_parameters()}


def train(family, degrees, layers, cases, steps=2):
    """On each rank, for every ((stage, release), schedule, activations): losses, norms, this rank's weights."""
    dp, pp = degrees
    runs = []
    for (stage, release), schedule, activations in cases:
        mesh = zero3d.Mesh(dp=dp, pp=pp)
        model = build(family, layers)
        recompute(model, activations)
        how = {"stage": stage, "release": release, "reduce": "every_step", "schedule": schedule_of(mesh, schedule)}
        optimizer = (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)) if is_tied(family) else adamw
        engine = engine_of(model, mesh, optimizer=optimizer, **how)
        losses, norms = [], []
        for step in range(steps):
            losses.append(float(engine.train_batch(micro_batches(step, mesh.place.dp))))
            norms.append(float(engine.last_step.grad_norm))
        runs.append((losses, norms, weights_of(engine)))
    return runs


def is_tied(family):
    """Gradients of tied parameters are summed across pipeline stages, in another order than by autograd."""
    return family in ("gpt2", "qwen3")


def layers_for(pp, schedule):
    """A block for each chunk."""
    return 8 if pp == 4 and schedule in SCHEDULES[2:] else 4


def covering(settings, is_possible=lambda case: True, together=2, cost=lambda case: 0):
    """The fewest cases, found greedily, that have every combination of values of `together` settings.

    cost    case -> a number: of cases that have as much that is new, the cheapest is taken
    """
    all_of = {case: set(combinations(enumerate(case), together)) for case in product(*settings) if is_possible(case)}
    cases, missing = list(all_of), set().union(*all_of.values())
    heap = [
        (-len(all_of[case]), cost(case), place) for place, case in enumerate(cases)
    ]  # what each adds: never more than it did
    chosen = []
    while missing:
        _, price, place = heappop(heap)
        added = (-len(missing & all_of[cases[place]]), price, place)
        if heap and added > heap[0]:
            heappush(heap, added)
        else:
            missing -= all_of[cases[place]]
            chosen.append(cases[place])
    return chosen
