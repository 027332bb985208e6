"""Published formulas, to the printed digit: parameters, operations, activations, ZeRO-Infinity, recomputation.

    source                                  functions
    --------------------------------------  --------------------------------------------------------------
    Narayanan et al. 2021, eq. 2 and 3      `parameters`, `step_flops`
    Korthikanti et al. 2022, table 2        `layer_activations`, `model_activations`, `megatron_states`
    Rajbhandari et al. 2020, section 3, 6   `zero_activations`, `checkpoints`, `recomputed`
    Rajbhandari et al. 2021, section 3, 4   `infinity_memory`, `infinity_efficiency`

l layers, h hidden, a heads, s sequence, b batch or micro-batch, V vocabulary, t tensor-parallel degree; bytes.
"""

from __future__ import annotations

from fractions import Fraction
from math import sqrt
from typing import NamedTuple

from zero3d.errors import ConfigError

ZERO_FACTOR = 12  # activation elements per token, layer and hidden unit: ZeRO's footnote on GPT-2
MEGATRON_BYTES = 18  # per parameter: fp16 weight 2, fp32 gradient 4, master 4, m 4, v 4
INFINITY_BYTES = 20  # ... and an fp16 gradient of 2 that is kept beside the fp32 one
LORA_FLOPS, FULL_FLOPS = 4, 6  # per parameter and token: weight gradients of a frozen model are not computed


def parameters(layers: int, h: int, vocab: int, s: int) -> int:
    """Count parameters: 12 l h^2 (1 + 13/12h + (V + s)/12lh), a whole number."""
    return 12 * layers * h * h + 13 * layers * h + (vocab + s) * h


def step_flops(batch: int, s: int, layers: int, h: int, vocab: int, recompute: bool) -> int:
    """Count the operations of a step over `batch` sequences: forward, backward, a second forward if `recompute`.

    recomputed  96 B s l h^2 (1 + s/6h + V/16lh)
    else        72 B s l h^2 (1 + s/6h + V/12lh)
    """
    blocks = (96 if recompute else 72) * batch * s * layers * h * h
    return blocks + blocks * s // (6 * h) + 6 * batch * s * h * vocab


# --- activations --------------------------------------------------------------------------------

TECHNIQUES = ("TP baseline", "TP+SP", "TP+selective", "TP+SP+selective", "full recompute")


def layer_activations(technique: str, s: int, b: int, h: int, a: int, t: int) -> Fraction:
    """Return the bytes one layer keeps on one rank (Korthikanti table 2). Raises ConfigError for unknown techniques."""
    scores = Fraction(5 * a * s, h)
    whole, cut = Fraction(10), Fraction(24)
    per_element = {
        "TP baseline": whole + cut / t + scores / t,
        "TP+SP": (whole + cut + scores) / t,
        "TP+selective": whole + cut / t,
        "TP+SP+selective": (whole + cut) / t,
        "full recompute": Fraction(2),
    }
    if technique not in per_element:
        raise ConfigError(f"technique={technique!r} is unknown: pass one of {', '.join(TECHNIQUES)}.")
    return s * b * h * per_element[technique]


def interleave_factor(p: int, v: int) -> Fraction:
    """Return layers alive on the first stage over its layers: 1 + (p - 1)/(p v) with v > 1 chunks per rank, else 1."""
    return 1 + Fraction(p - 1, p * v) if v > 1 else Fraction(1)


def model_activations(layer: Fraction, layers: int, p: int, v: int) -> Fraction:
    """Return the bytes of the first pipeline stage under 1F1B, of one layer's: p micro-batches of layers/p layers."""
    return layers * interleave_factor(p, v) * layer


def megatron_states(layers: int, h: int, t: int, p: int) -> Fraction:
    """Return the bytes of parameters and optimizer of a pipeline stage's layers: 18 B x 12 h^2 l/(p t) (figure 1)."""
    return Fraction(MEGATRON_BYTES * 12 * h * h * layers, p * t)


def zero_activations(layers: int, h: int, s: int, b: int) -> int:
    """Return 12 b s h l elements of 2 bytes: ZeRO's count. Without the 12, the checkpoints alone are left."""
    return ZERO_FACTOR * b * s * h * layers * 2


def checkpoints(layers: int, h: int, s: int, b: int, every: int = 1, parts: int = 1) -> int:
    """Return the bytes of the inputs that a GPU keeps, one for each `every` layers, each in so many parts (P_a)."""
    return b * s * h * 2 * -(-layers // every) // parts


class RecomputationPeaks(NamedTuple):
    """Bytes at the peak: inputs kept and one segment's interior, for segments of one layer and of sqrt(l)."""

    per_layer: int
    sqrt: int


def recomputed(layers: int, h: int, s: int, b: int) -> RecomputationPeaks:
    """Return both peaks. GPT-2 1.5B at s 1K, b 32: 6.3 and 9.5 GB; the paper's "about 8 GB" lies between."""
    every = round(sqrt(layers))
    interior = zero_activations(1, h, s, b)
    per_layer = checkpoints(layers, h, s, b) + interior
    return RecomputationPeaks(per_layer, checkpoints(layers, h, s, b, every) + every * interior)


# --- ZeRO-Infinity ------------------------------------------------------------------------------


class InfinityMemory(NamedTuple):
    """Figure 2a's columns, bytes. Working memory: of one GPU, 4 sequences on it; activations: a batch of 32."""

    states: int
    activations: int
    checkpoints: int
    working_states: int
    working_activations: int


def infinity_memory(layers: int, h: int, a: int, s: int = 1024, batch: int = 32, on_gpu: int = 4) -> InfinityMemory:
    """Compute 12 l h^2 parameters of 20 B; b s l (16 h + 2 a s); a checkpoint per layer; the largest matrix, h x 4h.

    The figure counts the working memory of activations in bytes where it counts all activations as 2-byte elements.
    """
    per_layer = 16 * h + 2 * a * s
    return InfinityMemory(
        INFINITY_BYTES * 12 * layers * h * h,
        2 * batch * s * per_layer * layers,
        checkpoints(layers, h, s, batch),
        4 * h * 4 * h,
        on_gpu * s * per_layer,
    )


def infinity_efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Return the fraction of the peak that compute reaches: ait x bw / (ait x bw + peak), nothing overlapped."""
    reached = intensity * bandwidth
    return reached / (reached + peak)
