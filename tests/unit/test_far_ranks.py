"""A step on 128 ranks, PP 8 x DP 16, and on 64, PP 8 x DP 8: what every class of ranks holds, computed by hand.

A fake process group sends nothing, so one process builds the engine of one rank after another. Classes are the
first, a middle and the last pipeline stage, each at the first, a middle and the last dp rank.

    Llama   hidden 64, inner 176, vocab 1000, 4 heads of 16 and 2 of keys and values, 8 blocks: one per rank
    unit    parameters, each from a multiple of 256 on, then padding up to a multiple of 64 x 256 = 16,384,
            cut into DP shards of one size
"""

import pytest
import torch
import torch.distributed as dist
import transformers
from models import adamw
from pipelines import sum_of
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero3d
from zero3d.memory.arena import STATES, TRANSIENT

PP, BLOCKS, MICRO_BATCHES = 8, 8, 8
HIDDEN, INNER, VOCAB, HEADS, KV_HEADS = 64, 176, 1000, 4, 2

EMBEDDING = HEAD = VOCAB * HIDDEN  # 64,000 = 250 x 256
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2  # q, o 4,096, k, v 2,048: 12,288 = 48 x 256
MLP = 3 * INNER * HIDDEN  # gate, up, down, 11,264 = 44 x 256 each: 33,792
NORM = HIDDEN  # 64, in a slot of 256
BLOCK = ATTENTION + MLP + 2 * NORM  # 46,208; with both slots of norms 12,288 + 33,792 + 512 = 46,592
MODEL = EMBEDDING + BLOCKS * BLOCK + NORM + HEAD  # 497,728

TOTAL = {
    "embedding": 4 * 16_384,  # 65,536 >= 64,000
    "block": 3 * 16_384,  # 49,152 >= 46,592
    "norm": 1 * 16_384,  # 16,384 >= 256
    "head": 4 * 16_384,
}
SHARD = {16: {"embedding": 4_096, "block": 3_072, "norm": 1_024, "head": 4_096},
         8: {"embedding": 8_192, "block": 6_144, "norm": 2_048, "head": 8_192}}  # fmt: skip
# Parameters in the shard of a dp rank: the first, each of those in the middle, the last.
#   DP 16: the last shard of the embedding begins at 15 x 4,096 = 61,440 and has 64,000 - 61,440 = 2,560; that of
#          a block at 15 x 3,072 = 46,080 = 12,288 + 33,792, where both norms of 64 remain. All before are full.
#   DP 8:  7 x 8,192 = 57,344 leaves 6,656; 7 x 6,144 = 43,008 leaves 46,080 - 43,008 = 3,072 and both norms.
USED = {16: {"embedding": (4_096, 4_096, 2_560), "block": (3_072, 3_072, 128), "norm": (64, 0, 0)},
        8: {"embedding": (8_192, 8_192, 6_656), "block": (6_144, 6_144, 3_200), "norm": (64, 0, 0)}}  # fmt: skip
UNITS = {"first": ("embedding", "block"), "middle": ("block",), "last": ("block", "norm", "head")}
NAMES = {"embedding": "model.embed_tokens", "norm": "root", "head": "lm_head"}
PP_RANK = {"first": 0, "middle": 4, "last": 7}


@pytest.fixture
def step(monkeypatch):
    """(stage, dp degree, pp, dp) -> the engine of that rank after a step.

    Nothing arrives on a fake group: the numbers that decide about the step are assumed, and so is that
    the neighbours in the pipeline know the shapes of what they send, which torch asks them.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.setattr("zero3d.distributed.collectives.Comm.read", lambda self, values, assumed: assumed)
    monkeypatch.setattr(dist, "recv", lambda tensor, *_, **__: tensor.fill_(1))

    def run(stage, degree, pp, dp):
        dist.init_process_group("fake", rank=pp * degree + dp, world_size=PP * degree, store=FakeStore())
        engine = zero3d.Engine(
            llama(), stage=stage, mesh=zero3d.Mesh(pp=PP, dp=degree), precision="bf16", optimizer=adamw,
            accumulate=MICRO_BATCHES, loss=sum_of, schedule="1f1b", release="every_use",
            reduce="every_micro_batch" if stage >= 2 else "every_step",
        )  # fmt: skip
        ids = torch.zeros(1, 3, dtype=torch.int64)
        engine.train_batch([{"input_ids": ids, "targets": ids}] * MICRO_BATCHES)
        dist.destroy_process_group()
        return engine

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB, "num_hidden_layers": BLOCKS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def state_bytes(stage, units, shards, used):
    """bf16 weights 2, fp32 gradients 4, masters, m and v 4 each; m and v only of what the rank updates."""
    total, shard = sum(TOTAL[unit] for unit in units), sum(shards[unit] for unit in units)
    updated = sum(shards[unit] for unit in units if used[unit])
    return {
        0: 2 * total + 4 * total + 12 * total,
        1: 2 * total + 4 * total + 4 * shard + 8 * updated,
        2: 2 * total + 4 * shard + 4 * shard + 8 * updated,
        3: 2 * shard + 4 * shard + 4 * shard + 8 * updated,
    }[stage]


def check(engine, stage, degree, place, position):
    """Every unit's sizes and all bytes; returns the parameters in this rank's shards."""
    shards, used = SHARD[degree], {unit: counts[position] for unit, counts in USED[degree].items()}
    used["head"] = used["embedding"]
    assert engine.last_step.applied
    assert [action.kind for action in engine.pipeline.recorded].count("B") == MICRO_BATCHES
    units = dict(zip(UNITS[place], engine.units, strict=True))
    for kind, unit in units.items():
        assert unit.name == NAMES.get(kind, f"model.layers.{PP_RANK[place]}")
        assert (unit.layout.total, unit.layout.shard) == (TOTAL[kind], shards[kind])
        assert unit.weights.shard.numel() == unit.gradients.shard.numel() == shards[kind]
        assert unit.weights.masters.stored.numel() == (TOTAL[kind] if stage == 0 else shards[kind])
        assert sum(p.stop - p.start for p in unit.layout.pieces(engine.dp.rank)) == used[kind]
        if kind == "block":  # its second norm begins a slot of 256 after the first
            assert unit.layout.slots[-1].start == ATTENTION + MLP + 256
        assert unit.weights.full.untyped_storage().nbytes() == (0 if stage == 3 else 2 * TOTAL[kind])
    assert sum(engine.arena.held(state) for state in STATES) == state_bytes(stage, units, shards, used)
    assert [engine.arena.live(category) for category in TRANSIENT] == [0] * len(TRANSIENT)
    return sum(used[kind] for kind in units)


@pytest.mark.parametrize(("degree", "stage"), [
    (16, 3), *(pytest.param(*case, marks=pytest.mark.long) for case in ((16, 0), (16, 1), (16, 2), (8, 1), (8, 3))),
])  # fmt: skip
def test_every_class_of_ranks_holds_what_is_computed_by_hand(step, stage, degree):
    whole = 0
    for place, ranks_there in (("first", 1), ("middle", 6), ("last", 1)):
        for position, (dp, ranks_here) in enumerate([(0, 1), (5, degree - 2), (degree - 1, 1)]):
            engine = step(stage, degree, PP_RANK[place], dp)
            whole += ranks_there * ranks_here * check(engine, stage, degree, place, position)
    assert whole == MODEL == 497_728
