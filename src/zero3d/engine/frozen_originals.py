"""Values of frozen parameters that came in a wider dtype than an engine computes in, to give them back as they came.

    kept      when the engine is built: this rank's share over dp, on the host, of those that all ranks came with alike
    original  when the model is made whole: gathered. An element was written since if its weight no longer is the cast
              of the kept value; it then has its weight's value

Nothing is kept where the engine loads the parameters itself (`weights`), for they are in files, and where the model is
cut over tp, pp or ep, for it is not given back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.distributed.collectives import Comm
from zero3d.precision import to_compute
from zero3d.zero.masters import bits


class FrozenOriginals:
    """Owns this rank's share of original values, by parameters' names: 1/N of their bytes, on the host."""

    def __init__(self, kept: Mapping[str, Tensor], dp: Comm) -> None:
        self._kept, self._dp = kept, dp

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype, dp: Comm) -> FrozenOriginals:
        """Keep shares of frozen parameters whose values `dtype` does not have, where all ranks came with the same."""
        frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        wide = [
            name for name, p in frozen.items() if p.is_floating_point() and not p.is_meta and not _holds(dtype, p.dtype)
        ]
        kept = _alike(frozen, wide, dp) if wide else []  # of others rank 0's weights win, and ranks lack its values
        return cls({name: _share(frozen[name], dp) for name in kept}, dp)

    @torch.no_grad()
    def original(self, name: str, weights: Tensor) -> Tensor:
        """Return a parameter in the dtype in which it came, of its whole weights; moves (N-1)/N of its bytes.

        All ranks call it for the same parameters in the same order. Where nothing is kept: `weights`.
        """
        share = self._kept.get(name)
        if share is None:
            return weights
        whole = torch.empty(share.numel() * self._dp.size, dtype=share.dtype, device=weights.device)
        self._dp.all_gather(whole, share.to(weights.device), name).wait()
        found = whole[: weights.numel()].view(weights.shape)
        wide = found.float() if weights.dtype.itemsize < 4 else found  # as when the engine was built
        return torch.where(bits(to_compute(wide, weights.dtype)) == bits(weights), found, weights.to(found.dtype))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the host that the shares take."""
        return sum(share.nbytes for share in self._kept.values())


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a dtype has all values of another."""
    return torch.promote_types(dtype, other) == dtype


def _alike(frozen: Mapping[str, Tensor], wide: Sequence[str], dp: Comm) -> Sequence[str]:
    """Return the names in `wide` of tensors that have the same bits on all ranks, by a checksum of each.

    All ranks send as many numbers, those of other tensors too, whose dtypes may differ over ranks.
    """
    if dp.size == 1 or isinstance(frozen[wide[0]], FakeTensor):
        return wide
    sums = dict.fromkeys(frozen, -1.0) | {name: _checksum(frozen[name]) for name in wide}
    own = torch.tensor(list(sums.values()), dtype=torch.float64)
    same = (dp.exchange(own) == own).all(0).tolist()
    alike = {name for name, found in zip(sums, same, strict=True) if found}
    return [name for name in wide if name in alike]


def _checksum(values: Tensor) -> float:
    raw: Any = values.contiguous().view(-1).cpu().view(torch.uint8).numpy()
    return float(xxhash.xxh32(raw).intdigest())


def _share(values: Tensor, dp: Comm) -> Tensor:
    """Return a copy of this rank's share of a tensor, [numel/N] with the last one's filled up."""
    size = -(-values.numel() // dp.size)
    share = values.new_zeros(size, device="cpu")
    own = values.reshape(-1)[dp.rank * size : (dp.rank + 1) * size]
    share[: own.numel()].copy_(own)
    return share
