"""Counts what mixers' kernels compute, make and keep, by formula: gated delta rules, Mamba 1 and 2, short convolutions.

    B, T    rows, tokens of each, in chunks of c
    H, G    heads; of keys, or groups of B and C, of which each serves several heads
    K, V    widths of a head's keys and values: a delta rule's state is K x V numbers
    P, N    width of a head, and its state for each channel: Mamba 2's is P x N numbers

    of a chunk and head           forward                                     and its gradients
    ----------------------------  ------------------------------------------  --------------------------------------
    delta rule, gate by head      2 c^2 (3 K + 2 V) + 6 c K V + c^3 / 3       2 c^2 (10 K + 5 V) + 16 c K V + 4 c^3
    delta rule, gate by channel   the same                                    2 c^2 (7 K + 5 V) + 16 c K V + 4 c^3
    Mamba 2                       2 c^2 P + 4 c P N; 2 c^2 N of a group       6 c^2 P + 10 c P N; 6 c^2 N of a group
    Mamba 1, channel and token    6 N                                         18 N
    convolution of k taps         2 k of a channel and token                  4 k, and 2 k for an activation's

A delta rule's forward has K K^T, Q K^T, the inverse of a triangle (c^3 / 3), W and U by it, their products with the
state, and (Q K^T) V (Yang et al. 2024, arXiv 2412.06464, section 3.3). Mamba 2's has C B^T, (C B^T) x, states and their
outputs (Dao and Gu 2024, arXiv 2405.21060, section 6). Mamba 1's is a scan of products by element (Gu and Dao 2023,
arXiv 2312.00752, section 3.3). Halves that a mask hides are counted, as of attention. Backwards compute states, W and U
again.

Bytes are those of what released kernels allocate and save: fla 0.5.2 (ops/gated_delta_rule/chunk.py, ops/kda),
mamba_ssm 2.3.2 (ops/triton/ssd_combined.py, ops/selective_scan_interface.py, csrc/selective_scan), causal_conv1d
(causal_conv1d_interface.py). Sums that they split by a card's number of processors count once. No torch.
"""

from __future__ import annotations

from typing import NamedTuple

from zero3d.sequence.choice import delta_products, mamba2_products

FP32 = 4
DELTA_CHUNK = 64  # of fla, where none is given
DIAGONAL = 16  # tokens of the blocks whose triangles a delta rule's kernel inverts first
SCANNED = 2048  # tokens of Mamba 1's chunks, between which it keeps a state and a product of decays


class Kernel(NamedTuple):
    """Has what a kernel does with one micro-batch.

    kept       bytes that it makes and keeps for its backward, beside inputs and output
    forward    bytes alive at its forward's fullest, beyond these
    backward   bytes alive at its backward's fullest, beyond what was kept and gradients of its inputs
    products   multiplications and additions of the forward
    again      and of the backward
    """

    kept: int
    forward: int
    backward: int
    products: int
    again: int


class DeltaHeads(NamedTuple):
    """Heads of a delta rule: how many of keys, and of values, and their widths."""

    keys: int
    values: int
    key: int
    value: int


class SsdHeads(NamedTuple):
    """Heads of Mamba 2: how many, and their width; groups of B and C, and the state for each channel."""

    many: int
    width: int
    groups: int
    state: int


def delta_rule(
    rows: int,
    tokens: int,
    heads: DeltaHeads,
    width: int,
    chunk: int = DELTA_CHUNK,
    by_channel: bool = False,
    normed: bool = True,
) -> Kernel:
    """Price a gated delta rule.

    width       bytes of a number
    by_channel  gates are of channels, not of heads: Kimi delta attention
    normed      the kernel divides keys and queries by their norms
    """
    chunks, (_, _, key, value) = -(-tokens // chunk), heads
    of_keys, of_heads = rows * tokens * heads.keys, rows * tokens * heads.values
    states = width * rows * chunks * heads.values * key * value
    kept = normed * 2 * of_keys * (width * key + FP32)  # keys and queries, their norms
    products, again = delta_products(chunk, key, value, by_channel)
    if by_channel:
        kept += of_heads * (FP32 * key + 2 * width * chunk)  # sums of gates; Q K^T, inverted K K^T
        forward = of_heads * (width * (2 * key + 2 * value) + FP32 * DIAGONAL) + states
        backward = of_heads * (width * (3 * key + 2 * value) + FP32 * (6 * key + 2 * chunk)) + 2 * states
    else:
        kept += of_heads * (FP32 + width * chunk)
        forward = of_heads * width * (key + 2 * value) + states
        backward = of_heads * width * (3 * key + 3 * value) + 2 * states
        backward += (heads.keys != heads.values) * of_keys * width * key  # gradients of keys by head, summed
    many = rows * chunks * heads.values
    return Kernel(kept, forward, backward, many * products, many * again)


def mamba2(rows: int, tokens: int, shape: SsdHeads, chunk: int, width: int, gated: bool = False) -> Kernel:
    """Price Mamba 2's scan. gated: it multiplies by a gate, and keeps its output before that."""
    chunks, (heads, head, groups, state) = -(-tokens // chunk), shape
    many, padded = rows * chunks, rows * chunks * chunk
    steps = FP32 * padded * heads  # of dt, or of its sums
    states = many * heads * head * state
    scores = FP32 * padded * groups * chunk
    kept = steps + gated * width * rows * tokens * heads * head
    forward = steps + max((FP32 + width) * states, width * states + scores)
    sums = 2 * FP32 * rows * tokens * groups * state  # gradients of B and C
    backward = width * rows * tokens * heads + 2 * steps + scores
    backward += max((2 * FP32 + 2 * width) * states, 2 * width * states + sums + scores)
    squares, of_head = 2 * chunk * chunk, mamba2_products(chunk, head, state)
    products, again = (n * squares * state * groups + heads * each for n, each in zip((1, 3), of_head, strict=True))
    return Kernel(kept, forward, backward, many * products, many * again)


def mamba1(rows: int, tokens: int, channels: int, state: int, width: int, gated: bool = False) -> Kernel:
    """Price Mamba 1's scan. gated: it multiplies by a gate, and keeps its output before that."""
    between = FP32 * rows * channels * -(-tokens // SCANNED) * 2 * state
    kept = between + gated * width * rows * tokens * channels
    products = 6 * rows * tokens * channels * state
    return Kernel(kept, 0, 2 * FP32 * rows * tokens * state, products, 3 * products)


def convolution(rows: int, tokens: int, channels: int, taps: int, active: bool) -> Kernel:
    """Price a short convolution of channels. active: it applies an activation, whose input it computes again."""
    products = 2 * taps * rows * tokens * channels
    return Kernel(0, 0, 0, products, (3 if active else 2) * products)


def fused_mamba2(rows: int, tokens: int, shape: SsdHeads, chunk: int, width: int, taps: int) -> Kernel:
    """Price Mamba 2's mixer behind in_proj in one: convolution, scan, gated norm; it keeps the scan's output.

    The product with out_proj's weight is not in it.
    """
    scan, (heads, head, groups, state) = mamba2(rows, tokens, shape, chunk, width), shape
    inner = heads * head
    conv = convolution(rows, tokens, inner + 2 * groups * state, taps, True)
    token = rows * tokens
    mixed = width * token * (inner + 2 * groups * state)
    return Kernel(
        token * (width * inner + FP32 * groups),
        mixed + scan.kept + scan.forward,
        2 * mixed + 3 * width * token * inner + scan.backward,
        scan.products + conv.products,
        scan.again + conv.again + conv.products,
    )


def fused_mamba1(rows: int, tokens: int, channels: int, state: int, rank: int, width: int, taps: int) -> Kernel:
    """Price Mamba 1's mixer behind in_proj in one: it keeps what it splits into dt, B and C.

    rank  of the matrix of time steps
    """
    scan = mamba1(rows, tokens, channels, state, width, gated=True)
    conv = convolution(rows, tokens, channels, taps, True)
    token = rows * tokens
    split = width * token * (rank + 2 * state)
    return Kernel(
        scan.kept + split + 2 * width * token * state,
        3 * width * token * channels,
        6 * width * token * channels + split + scan.backward,
        scan.products + conv.products,
        scan.again + conv.again + conv.products,
    )
