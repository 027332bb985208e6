"""Training on meshes with a tp axis against one process: cases that cover all pairs of settings, and how to run one."""

import torch
from models import LiftCasts, batch
from pipelines import covering
from tensors import tiny

import zero3d
from zero3d.activations.recomputation import recompute

FAMILIES = ("llama", "qwen3", "gpt2", "moe")
COSTS = {(1, 2, 1): 3, (2, 2, 1): 7, (1, 2, 2): 23, (2, 1, 2): 7, (2, 2, 2): 28, (1, 4, 1): 8}  # tenths of a second
MESHES = tuple(COSTS)  # dp, tp, pp
DEAR = ((1, 2, 2), (2, 2, 2), (1, 4, 1))
STAGES = (0, 1, 2, 3)
SCHEDULES = (None, "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
SEQUENCE = (False, True)
ACTIVATIONS = ("none", "full", "every:2", "selective")
LOSSES = ("model's", "given")  # local logits, or joined ones
SETTINGS = (FAMILIES, MESHES, STAGES, SCHEDULES, SEQUENCE, ACTIVATIONS, LOSSES)
STEPS, CLIP = 2, 0.1


def is_possible(case):
    """Pipelines have schedules; routers of experts need whole sequences."""
    family, (_, tp, pp), _, schedule, sequence, *_ = case
    return (schedule is None) == (pp == 1) and not (sequence and (family == "moe" or tp == 1))


def cost_of(case):
    return COSTS[case[1]]


def pairs():
    """The fewest cases that have every possible pair of two settings' values."""
    return covering(SETTINGS, is_possible, cost=cost_of)


def pairs_on(mesh):
    """Likewise on one mesh: three settings of which one is the mesh. Of a dear mesh they are the pairs of all meshes.

    tp = 4 differs from tp = 2 in sizes alone. Any three of a pipeline's settings are in tests/parity/test_pipeline.py.
    """
    if mesh in DEAR:
        return [case for case in pairs() if case[1] == mesh]
    return covering(SETTINGS, lambda case: is_possible(case) and case[1] == mesh)


def layers_of(mesh):
    """A block for each part of any schedule."""
    return 4 if mesh[2] > 1 else 2


def model_of(family, mesh, **options):
    return tiny(family, kv_heads=4, layers=layers_of(mesh), **options)


def count_of(shape):
    """Micro-batches of a step, over all replicas."""
    return 4 if shape[2] > 1 else 2


def micro_batches(step, count):
    """Those of all replicas; each leaves out other labels."""
    found = []
    for i in range(count):
        ids = batch(100 * step + i, size=2, length=8)
        labels = ids.clone()
        labels[0, : 2 + i] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def own(given, place, dp):
    """A replica's share of all micro-batches."""
    count = len(given) // dp
    return given[place * count : (place + 1) * count]


def sum_of(output, given):
    """The sum of losses of whole logits, and its number of targets."""
    labels = given["labels"][:, 1:]
    logits = output.logits[:, :-1]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, float((labels != -100).sum())


def sgd(params):
    """No division by small gradients: what differs stays as small as it is."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def engine_of(model, mesh, **options):
    made = {"precision": "fp64", "clip_norm": CLIP, "optimizer": sgd, "accumulate": 2}
    return zero3d.Engine(model, mesh=mesh, **made | options)


def world_of(shape):
    dp, tp, pp = shape
    return dp * tp * pp


def mesh_of(shape):
    dp, tp, pp = shape
    return zero3d.Mesh(dp=dp, tp=tp, pp=pp)


def share_of(engine, number, count=None):
    """This replica's share of `count` micro-batches of a step."""
    mesh = engine.mesh
    return own(micro_batches(number, count or count_of((mesh.dp, mesh.tp, mesh.pp))), mesh.place.dp, mesh.dp)


def step(engine, number, count=None):
    """Loss and gradient norm of one step; `count` micro-batches over all replicas."""
    return float(engine.train_batch(share_of(engine, number, count))), float(engine.last_step.grad_norm)


def evaluated(engine, number, count=None):
    """The loss of what would be another step."""
    return float(engine.evaluate(share_of(engine, number, count)))


def run(case, precision, **options):
    """[(loss, norm), ...] of one engine."""
    family, shape, stage, schedule, sequence, activations, loss = case
    model, mesh = model_of(family, shape, **options), mesh_of(shape)
    recompute(model, activations)
    engine = engine_of(
        model, mesh, precision=precision, stage=stage, schedule=schedule, sequence_parallel=sequence,
        release="every_use" if stage == 3 and activations != "none" else "auto",
        loss=None if loss == "model's" else sum_of,
    )  # fmt: skip
    return [step(engine, number) for number in range(STEPS)]


def run_all(cases, precision, **options):
    with LiftCasts():
        return [run(case, precision, **options) for case in cases]


def oracle(family, shape, loss, precision="fp64", made=lambda model: (sgd(model.parameters()), None), **options):
    """The same of one process and no engine: the mean over all targets, clipped, stepped.

    made    model -> its optimizer and a scheduler or None
    """
    model = model_of(family, shape, **options)
    for p in model.parameters():  # buffers keep their dtype, as in an engine
        p.data = p.data.to(zero3d.precision.DTYPES[precision])
    (optimizer, scheduler), found = made(model), []
    with LiftCasts():
        for number in range(STEPS):
            total, weight = 0.0, 0.0
            for given in micro_batches(number, count_of(shape)):
                output = model(**given)
                summed, count = sum_of(output, given)
                total = total + (output.loss * count if loss == "model's" else summed)
                weight += count
            optimizer.zero_grad()
            (total / weight).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            found.append((float(total.detach() / weight), float(norm)))
    return found
