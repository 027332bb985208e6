"""A small model for the planner's arithmetic: its figures tell each other apart, and no weight of it has padding.

Instants of a step are made the fullest in turn by what a part's backward needs beside what it kept.
"""

from zero3d.tools.plan.memory import instants, memory
from zero3d.tools.plan.spec import ModelSpec, Operations, ParallelPlan, Part, Unit, Weight

LENGTH, HIDDEN, VOCAB, BLOCKS = 8, 16, 64, 4
TOKENS = 2 * LENGTH  # of a micro-batch of two
MUCH = 10.0**6  # bytes per token: more than all else
ENDS, UP, DOWN = 16_384, 16_384, 32_768  # elements: of the embedding and of the head; of a block's two matrices
BLOCK = UP + DOWN
KEPT = {"embedding": (3.0, 5.0), "block": (101.0, 211.0), "head": (401.0, 43.0)}  # bytes of a token: cut by tp, whole
EMBEDDING_KEPT, BLOCK_KEPT, HEAD_KEPT = (sum(KEPT[kind]) for kind in KEPT)
INSTANTS = {"embedding": "backward of the embedding", "head": "logits and loss"}
ATTENTION, INPUT = 31, 32  # of a block's: what recomputing attention frees, and its input
STATES = ("parameters", "gradients", "optimizer")
BATCH = 16 * TOKENS  # ids and labels, int64
# Gradients of one micro-batch travel as bf16: the terms of all ranks arrive, as much as the unit.
WIRE = {"ends": 2 * ENDS, "block": 2 * BLOCK}
TRANSIENT = {"embedding": 7.0, "block": 11.0, "head": 13.0}


def model_of(much="", tied=False, blocks=BLOCKS, root=0, instants=(), instants_of_head=()):
    """`much`: the kind of part whose backward is the fullest instant; `root`: elements of a norm in the root unit."""
    transient = TRANSIENT | ({much: MUCH} if much else {})
    inside = Operations(
        1.0,
        kept_cut=KEPT["block"][0],
        kept_whole=KEPT["block"][1],
        attention=31.0,
        input=32.0,
        transient=transient["block"],
        instants=instants,
    )
    before = Operations(
        0.0, kept_cut=KEPT["embedding"][0], kept_whole=KEPT["embedding"][1], transient=transient["embedding"]
    )
    after = Operations(
        1.0,
        kept_cut=KEPT["head"][0],
        kept_whole=KEPT["head"][1],
        transient=transient["head"],
        instants=instants_of_head,
    )
    embed = Unit("embed", (Weight("embed.weight", (64, 256), cut=0),))
    units = [Unit("head", (Weight("head.weight", (64, 256), cut=0),), copy_of="embed" if tied else None)]
    if root:
        units.insert(0, Unit("root", (Weight("norm.weight", (root,)),)))
    parts = [Part("embedding", (embed,), before)]
    for i in range(blocks):
        up = Weight(f"blocks.{i}.up", (128, 128), cut=0)
        down = Weight(f"blocks.{i}.down", (128, 256), cut=1)
        parts.append(Part("block", (Unit(f"blocks.{i}", (up, down)),), inside))
    parts.append(Part("head", tuple(units), after))
    return ModelSpec("by hand", tuple(parts), LENGTH, HIDDEN, VOCAB, heads=4, kv_heads=4)


def at(model, instant, **plan):
    """The parts of an instant beside the states. It is the fullest but for gradients, which come during the backward."""
    plan = ParallelPlan(**{"stage": 3, "micro_batch": 2} | plan)
    found, most = dict(instants(model, plan)), memory(model, plan)
    assert most.allocated == sum(most.parts.values())
    where = instant.partition(", pipeline")[0]
    if plan.accumulate > 1 or where == "optimizer step":
        assert most.instant == instant
    else:
        come = ("gradients", "padding")
        beside = {name: sum(parts[each] for each in parts if each not in come) for name, parts in found.items()}
        assert beside[where] == max(beside.values())
    return {name: size for name, size in found[where].items() if size and name not in STATES}


def fullest(kind, pp_stage=None, **plan):
    """The parts of the instant of an embedding or a head, on one of two pipeline stages where there are any."""
    where = "" if pp_stage is None else f", pipeline stage {pp_stage} of 2"
    return at(model_of(kind), INSTANTS[kind] + where, **plan)


def kept(kind, tp, sequence_parallel=False):
    """Bytes that a token keeps in a part.

    Sequence parallelism cuts sequences in blocks alone; inputs of attention and MLP are gathered whole for the backward.
    """
    cut, whole = KEPT[kind]
    if kind != "block" or not sequence_parallel:
        return cut / tp + whole
    return cut / tp + (whole - 4 * HIDDEN) / tp + 4 * HIDDEN
