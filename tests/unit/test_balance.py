"""Where chains of blocks are cut."""

import itertools
import random
from pathlib import Path

import pytest

from zero3d.errors import ConfigError
from zero3d.pipeline.balance import TOKENS, Tower, Weights, chain_costs, cut


def every_cut(blocks, chunks):
    for inner in itertools.combinations(range(1, blocks), chunks - 1):
        bounds = [0, *inner, blocks]
        yield [b - a for a, b in itertools.pairwise(bounds)]


def loads(costs, counts, before, after):
    starts = list(itertools.accumulate(counts, initial=0))
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(starts)]
    sums[0] += before
    sums[-1] += after
    return sums


def test_the_dearest_group_is_as_cheap_as_the_best_of_all_cuts():
    draw = random.Random(0)
    for _ in range(60):
        costs = [draw.randint(1, 9) for _ in range(draw.randint(1, 8))]
        chunks, before, after = draw.randint(1, len(costs)), draw.randint(0, 12), draw.randint(0, 12)

        def rank(counts, costs=costs, before=before, after=after):
            sums = loads(costs, counts, before, after)
            return max(sums), sum(s * s for s in sums), [-c for c in counts]

        assert cut(costs, chunks, before, after) == min(every_cut(len(costs), chunks), key=rank)


def test_the_72b_example_says_how_many_blocks_its_stages_have():
    hidden, inner, vocab, kv = 8192, 29568, 152064, 1024
    block = Weights(2 * hidden * (hidden + kv) + 3 * hidden * inner + 3 * hidden + 2 * kv)
    costs = chain_costs(vocab * hidden, [block] * 80, vocab * hidden + hidden, 2048, hidden, vocab)
    assert cut(costs.blocks, 8, costs.before, costs.after) == [10, 11, 10, 10, 10, 10, 10, 9]
    text = (Path(__file__).parents[2] / "examples" / "72b_128gpu.yaml").read_text()
    assert "80 blocks: 10, 11 (stage 1), 10 ..., 9;" in text


def test_a_tower_that_sees_many_patches_leaves_fewer_blocks_to_the_first_stage():
    given = 1000, [Weights(1000)] * 8, 1000, 16, 10, 100
    blind, seeing = chain_costs(*given), chain_costs(*given, Tower(1000, 640))
    assert cut(blind.blocks, 2, blind.before, blind.after)[0] > cut(seeing.blocks, 2, seeing.before, seeing.after)[0]


def test_equal_blocks_fill_earlier_stages_first():
    assert cut([1] * 5, 3) == [2, 2, 1]
    assert cut([1] * 4, 4) == [1, 1, 1, 1]
    assert cut([7], 1) == [1]


def test_a_dear_head_leaves_fewer_blocks_to_the_last_stage_and_equal_shares_to_the_others():
    assert cut([1] * 6, 3, after=5) == [3, 2, 1]
    assert cut([1] * 6, 2, before=2) == [2, 4]


def test_every_group_has_a_block_even_if_one_costs_more_than_all_others():
    assert cut([100, 1, 1], 3) == [1, 1, 1]
    assert cut([1, 1, 100], 2) == [2, 1]


def test_a_chain_of_a_hundred_blocks_is_cut_into_thirty_two():
    counts = cut([3] * 100, 32, after=9)
    assert sum(counts) == 100
    assert max(loads([3] * 100, counts, 0, 9)) == 12


def test_the_head_costs_flops_and_logits_and_the_embedding_only_bytes():
    block, tokens, hidden, vocab = 12 * 64 * 64, 1000, 64, 5000
    before, blocks, after = chain_costs(vocab * hidden, [Weights(block)] * 4, vocab * hidden, tokens, hidden, vocab)
    flops = 4 * 6 * block * tokens + 6 * hidden * vocab * tokens
    memory = 16 * (2 * vocab * hidden + 4 * block) + 4 * 34 * tokens * hidden + 10 * tokens * vocab
    assert before == 16 * vocab * hidden * flops
    assert blocks == [6 * block * tokens * memory + (16 * block + 34 * tokens * hidden) * flops] * 4
    assert before + sum(blocks) + after == 2 * flops * memory
    assert cut(blocks, 2, before, after) == [3, 1]


def test_experts_that_a_token_does_not_meet_cost_bytes_but_no_flops():
    dense, sparse = (
        chain_costs(0, [Weights(1000, active), Weights(10)], 1, 5, 4, 3).blocks[0] for active in (None, 10)
    )
    assert sparse < dense


@pytest.mark.parametrize("chunks", [0, 3])
def test_more_chunks_than_blocks_or_none_are_refused(chunks):
    with pytest.raises(ConfigError, match=rf"^2 blocks cannot make {chunks} chunks: pass chunks=1 to 2\.$"):
        cut([1, 1], chunks)


def test_a_model_is_cut_for_micro_batches_of_2048_tokens():
    """Blocks of 302,621 parameters are cut in halves up to 2,048 tokens, of 302,620 up to 2,047: one more, one less shows."""
    found = []
    for block in (302_621, 302_620):
        before, blocks, after = chain_costs(64_000, [Weights(block)] * 4, 64_000, TOKENS, 64, 1000)
        found.append(cut(blocks, 2, before, after))
    assert found == [[2, 2], [3, 1]]
