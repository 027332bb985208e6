"""A small model for the planner's arithmetic: its figures tell each other apart, and no weight of it has padding.

Instants of a step are made the fullest in turn by what a part's backward needs beside what it kept.
"""

from zero3d.plan.memory import memory
from zero3d.plan.spec import ModelSpec, Operations, ParallelPlan, Part, Unit, Weight

LENGTH, HIDDEN, VOCAB, BLOCKS = 8, 16, 64, 4
TOKENS = 2 * LENGTH  # of a micro-batch of two
MUCH = 10.0**6  # bytes per token: more than all else
ENDS, UP, DOWN = 16_384, 16_384, 32_768  # elements: of the embedding and of the head; of a block's two matrices
BLOCK = UP + DOWN
# Bytes that a token keeps: cut by tp + whole on all tp ranks.
EMBEDDING_KEPT, BLOCK_KEPT, HEAD_KEPT = 3 + 5, 101 + 211, 401 + 43
ATTENTION, INPUT = 31, 32  # of a block's: what recomputing attention frees, and its input
BATCH = 16 * TOKENS  # ids and labels, int64
# Gradients travel as fp32, here over two ranks: a cast of the whole unit and the shard that arrives.
WIRE = {"ends": 4 * ENDS + 4 * ENDS / 2, "block": 4 * BLOCK + 4 * BLOCK / 2}
TRANSIENT = {"embedding": 7.0, "block": 11.0, "head": 13.0}


def model_of(much="", tied=False, blocks=BLOCKS, root=0, instants=()):
    """`much`: the kind of part whose backward is the fullest instant; `root`: elements of a norm in the root unit."""
    transient = TRANSIENT | ({much: MUCH} if much else {})
    inside = Operations(
        1.0,
        kept_cut=101.0,
        kept_whole=211.0,
        attention=31.0,
        input=32.0,
        transient=transient["block"],
        instants=instants,
    )
    before = Operations(0.0, kept_cut=3.0, kept_whole=5.0, transient=transient["embedding"])
    after = Operations(1.0, kept_cut=401.0, kept_whole=43.0, transient=transient["head"])
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


def at(model, wanted, **plan):
    """The parts of the fullest instant, which is the wanted one, beside the states."""
    found = memory(model, ParallelPlan(**{"stage": 3, "micro_batch": 2} | plan))
    assert found.instant == wanted
    assert found.allocated == sum(found.parts.values())
    return {name: size for name, size in found.parts.items() if name not in ("parameters", "gradients", "optimizer")}
