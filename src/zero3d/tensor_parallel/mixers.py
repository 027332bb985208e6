"""Mamba2 mixers on tp ranks: each has some heads, with the B and C of their groups.

    x --in_proj--> [ gate | x | B | C | dt ] --conv1d of [x | B | C]--> scan by heads --> norm, times gate --out_proj-->
                     I      I   G N G N  H

tp cuts each of these segments, of the matrix and of the convolution. Where it divides the number of groups, G, a rank
computes on its own. Where there are fewer groups than ranks, heads of several ranks share the B and C of a group:

    B, C   every rank computes 1/tp of their channels, and all are gathered, with the convolution's filters for them
    norm   the mean square of a group's channels is that of several ranks' channels: sums of squares are added up

Everything that is stored is cut all the same, and no rank has what another has too: norms of gradients, checkpoints
and optimizers see cut parameters only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from zero3d.errors import ConfigError
from zero3d.models.wrappers import wrap_forward
from zero3d.tensor_parallel.regions import Regions

SCALES = "mup_vector"  # Falcon-H1's buffer of factors, one for each output of in_proj


class Groups(NamedTuple):
    """Says how the groups of one mixer lie on tp ranks.

    total   of all
    ranks   of the tp axis
    states  channels of B, and of C, for each group
    """

    total: int
    ranks: int
    states: int

    @property
    def shared(self) -> bool:
        """Return whether ranks share groups, so that they gather B and C."""
        return self.ranks > self.total

    @property
    def local(self) -> int:
        """Count the groups whose B and C one rank's heads use."""
        return max(1, self.total // self.ranks)

    def first(self, rank: int) -> int:
        """Return the first group that a rank's heads use."""
        return rank * self.total // self.ranks

    @property
    def width(self) -> int:
        """Count the channels of all B and C."""
        return 2 * self.total * self.states


def take_groups(regions: Regions, name: str, mixer: Any, count: int) -> None:
    """Let a mixer whose matrices are cut compute with this rank's groups of `count`. Raises ConfigError."""
    groups = Groups(count, regions.channel.size, mixer.ssm_state_size)
    if count % groups.ranks and groups.ranks % count:
        raise ConfigError(
            f"{name}: B and C of {count} groups do not go on tp={groups.ranks} ranks, for neither number divides the "
            "other: pass a tp of which one does, or give in_proj colwise_gather_output, out_proj rowwise_split_input "
            "and the rest of it 'none' in the tensor-parallel plan, so that it is whole between them."
        )
    local = LocalMixer(mixer, groups, regions, name)
    wrap_forward(mixer, local.around)
    mixer.n_groups = groups.local
    mixer.conv_dim = local.inner + 2 * groups.local * groups.states
    if groups.shared:
        mixer.in_proj.register_forward_hook(local.gather)
        if not isinstance(mixer.norm, nn.Identity):
            mixer.norm.forward = SharedNorm(mixer.norm, groups, regions, f"{name}.norm")
    elif hasattr(mixer.norm, "n_groups"):  # others have the size of a group
        mixer.norm.n_groups = groups.local


class LocalMixer:
    """Lends a mixer, while its own forward runs with this rank's heads and groups, what that reads beside its weights.

    inner  channels of x, and of the gate, on this rank
    """

    def __init__(self, mixer: Any, groups: Groups, regions: Regions, name: str) -> None:
        self.inner = (mixer.conv_dim - groups.width) // groups.ranks
        self._mixer = mixer
        self._groups, self._regions = groups, regions
        self._name = f"{name}.in_proj"

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the mixer's forward that is lent this, and gives it back."""

        @wraps(forward)
        def lent(*args: Any, **kwargs: Any) -> Any:
            conv, buffers = self._mixer.conv1d, self._mixer._buffers
            filters, scales = dict(conv._parameters), buffers.get(SCALES)
            if scales is not None:
                buffers[SCALES] = self._own(scales)
            try:
                return forward(*args, **kwargs)
            finally:  # a recomputation may end in between
                conv._parameters.update(filters)
                if scales is not None:
                    buffers[SCALES] = scales

        return lent

    def _own(self, scales: Tensor) -> Tensor:
        """Return the factors of this rank's outputs of in_proj, of those of all."""
        groups, rank = self._groups, self._regions.channel.rank
        inner, states = self.inner * groups.ranks, groups.total * groups.states
        *halves, b, c, heads = torch.split(
            scales, [inner, inner, states, states, scales.shape[-1] - 2 * (inner + states)], -1
        )
        gate, x, dt = (part.chunk(groups.ranks, -1)[rank] for part in (*halves, heads))
        own = (part.narrow(-1, groups.first(rank) * groups.states, groups.local * groups.states) for part in (b, c))
        return torch.cat([gate, x, *own, dt], -1)

    @_disable_dynamo
    def gather(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Put B and C of this rank's group into in_proj's output, and their filters into the convolution."""
        groups, conv = self._groups, self._mixer.conv1d
        part = groups.width // groups.ranks
        before, b_c, after = torch.split(output, [2 * self.inner, part, output.shape[-1] - 2 * self.inner - part], -1)
        filters = {key: p for key, p in conv._parameters.items() if p is not None}
        channels = [b_c.movedim(-1, 0), *(p[self.inner :].to(output.dtype) for p in filters.values())]
        sent = torch.cat([each.reshape(-1) for each in channels])
        received = self._regions.gather_parts(sent, self._name).view(groups.ranks, -1)
        together = groups.ranks // groups.total  # ranks of a group
        of_group = received.narrow(0, self._regions.channel.rank // together * together, together)
        found = [
            each.reshape(together, 2, -1, *like.shape[1:]).transpose(0, 1).flatten(0, 2)  # all of B, then all of C
            for each, like in zip(torch.split(of_group, [each.numel() for each in channels], 1), channels, strict=True)
        ]
        for (key, p), own in zip(filters.items(), found[1:], strict=True):
            conv._parameters[key] = torch.cat([p[: self.inner], own.to(p.dtype)])
        return torch.cat([before, found[0].movedim(0, -1), after], -1)


class SharedNorm:
    """The forward of a mixer's norm over groups of channels, each of which several ranks have parts of.

    Sends one number for each token and group: the sum of squares.
    """

    def __init__(self, norm: Any, groups: Groups, regions: Regions, name: str) -> None:
        self._norm, self._groups = norm, groups
        self._regions, self._name = regions, name

    def __call__(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        norm, groups, dtype = self._norm, self._groups, hidden_states.dtype
        last = getattr(norm, "norm_before_gate", False)
        x = hidden_states.to(torch.float32)
        if gate is not None and not last:
            x = x * F.silu(gate.to(torch.float32))
        first = groups.first(self._regions.channel.rank)
        squares = F.pad(x.pow(2).sum(-1, keepdim=True), (first, groups.total - 1 - first))
        of_group = self._regions.sum_parts(squares, self._name)[..., first : first + 1]
        x = x * torch.rsqrt(of_group * groups.total / (x.shape[-1] * groups.ranks) + norm.variance_epsilon)
        weight: Tensor = norm.weight
        if not hasattr(norm, "norm_before_gate"):
            return weight * x.to(dtype)
        x = weight * x  # Falcon-H1's
        if gate is not None and last:
            x = x * F.silu(gate.to(torch.float32))
        return x.to(dtype)
