"""Optimizers beside torch's own: Muon, which looks at whole matrices, over shards, and AdamW with moments of 8 bits.

matrices         how a parameter is seen as matrices; what they cost (no torch)
find             which parameters of a model are matrices, and what is fused in them
newton_schulz    a matrix made orthogonal
muon_optimizer   Muon for matrices, AdamW for the rest, on pieces
owners           which rank makes which matrix orthogonal, and what is sent (no torch)
orthogonal       pieces to their owners and back, in a step
blockwise        a state in 8 bits, block by block
eight_bit        AdamW on pieces whose moments are such states
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero3d.optim.eight_bit import adamw8bit as adamw8bit
    from zero3d.optim.muon_optimizer import muon as muon

__all__ = ["adamw8bit", "muon"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zero3d.optim' has no attribute {name!r}")
    from zero3d.optim import eight_bit, muon_optimizer

    return getattr(muon_optimizer if name == "muon" else eight_bit, name)
