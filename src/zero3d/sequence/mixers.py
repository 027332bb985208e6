"""Convolutions and recurrences over sequences that ranks share out, by the model's own functions (models/mixing.py).

    convolution    this rank's rows with the few before them, from ranks on the left: the halo
    scan           rows x all heads -> all-to-all -> all rows x some heads -> scan -> all-to-all -> rows again

    of a scan          is cut by heads            is sent where heads need it     is sliced, as all ranks have it
    -----------------  -------------------------  ------------------------------  -------------------------------
    delta rules        value, g, beta             query, key
    Mamba2             hidden_states, dt, z       B, C                            A, D, dt_bias
    Mamba1 (channels)  hidden_states, dt, z       B, C                            A, D, delta_bias

A head of keys, or a group of B and C, that heads of several ranks need goes to each of them; its gradients are added
in rank order. Inside are whole sequences, so that documents are kept apart as on one rank; outside a mixer's own
matrices and norms see rows. Fused shortcuts go on in pieces.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from zero3d.distributed.collectives import Comm
from zero3d.errors import ConfigError
from zero3d.models.mask_code import code_of
from zero3d.models.mixing import SCANS, Call, mixers
from zero3d.models.packed_documents import Documents, Inside, Shared
from zero3d.sequence.choice import delta_products, mamba2_products
from zero3d.sequence.exchange import passed, to_parts, to_rows
from zero3d.sequence.prefix import CHUNK, STATES, scan_rows
from zero3d.sequence.shares import Cut, Halo, Scanned, States, even_parts, needed
from zero3d.spec.mesh import HEADS, PREFIX


class Roles(NamedTuple):
    """Says what is done with the tensors of a scan; the first that is cut by heads tells how many there are."""

    cut: tuple[str, ...]
    sent: tuple[str, ...]
    sliced: tuple[str, ...] = ()


DELTA = Roles(("value", "g", "beta"), ("query", "key"))
ROLES = {
    "torch_chunk_gated_delta_rule": DELTA,
    "chunk_kimi_delta_attention": DELTA,
    "mamba2_chunk_scan": Roles(("hidden_states", "dt", "z"), ("B", "C"), ("A", "D", "dt_bias")),
    "mamba_selective_scan": Roles(("hidden_states", "dt", "z"), ("B", "C"), ("A", "D", "delta_bias")),
}


class SharedMixers:
    """Calls a model's convolutions and scans for sequences that the ranks of a group share out.

    calls  by name of the module: how often alike ones were forward, and backward
    """

    def __init__(self, comm: Comm, models: Iterable[nn.Module], kind: str = HEADS) -> None:
        self._comm, self._kind = comm, kind
        found = {module: name for model in models for name, module in mixers(model).items()}
        self._names = WeakKeyDictionary(found)
        self._name = "-"
        self._hooks = [module.register_forward_pre_hook(self._enter) for module in found]
        self.calls: dict[str, Counter[tuple[Halo | Scanned | States, bool]]] = defaultdict(Counter)

    def of(self, length: int) -> Shared:
        """Return what runs a call for sequences of so many tokens, which recomputed forwards are told again."""
        return partial(self._run, length)

    def close(self) -> None:
        """Leave the modules alone."""
        while self._hooks:
            self._hooks.pop().remove()

    @_disable_dynamo
    def _enter(self, module: nn.Module, _: Any) -> None:
        self._name = self._names[module]

    @_disable_dynamo
    def _run(self, length: int, function: str, call: Call, documents: Documents | None, inside: Inside) -> Any:
        """Run a call, and return this rank's rows of what it makes. Moves what `Halo.sent` or `Scanned.sent` says."""
        rows = even_parts(length, self._comm.size)
        scan = SCANS.get(function)
        first = call.given["hidden_states" if scan is None else ROLES[function].cut[0]]
        here = first.shape[-1 if scan is None else scan.time[ROLES[function].cut[0]]]
        if here != len(rows[self._comm.rank]):
            raise ConfigError(
                f"{self._name} mixes {here:,} tokens, but this rank has {len(rows[self._comm.rank]):,} of a sequence "
                f"of {length:,}: use one length at a time, or type mesh.sp=1."
            )
        if scan is None:
            return self._convolved(rows, call, documents, inside)
        _check_states(self._name, call.given)
        if self._kind == PREFIX and function in STATES:
            made, noted = scan_rows(rows, function, call, documents, inside, self._comm, self._name)
            self.calls[self._name][noted, False] += 1
            self._counted(made[0] if isinstance(made, tuple) else made, noted)
            return made
        return self._scanned(rows, function, call, documents, inside)

    def _convolved(self, rows: Sequence[range], call: Call, documents: Documents | None, inside: Inside) -> Tensor:
        """Convolve this rank's rows behind as many tokens as the convolution reaches back."""
        x, own, noted = call.given["hidden_states"], rows[self._comm.rank], halo_of(call, rows[-1].stop)
        self.calls[self._name][noted, False] += 1
        before = noted.before(rows, self._comm.rank)
        halo = self._halo(x, rows, noted)
        part = None if documents is None else documents.within(range(before.start, own.stop))
        made: Tensor = inside(call.replaced(hidden_states=torch.cat([halo, x], -1)), part)
        return self._counted(made[..., len(before) :], noted)

    def _halo(self, x: Tensor, rows: Sequence[range], noted: Halo) -> Tensor:
        """Return the tokens before this rank's, [B, C, reach] or fewer at the beginning; all ranks take part."""
        rank, own = self._comm.rank, rows[self._comm.rank]
        sends = [_overlap(own, noted.before(rows, other)) for other in range(len(rows))]
        receives = [len(_overlap(part, noted.before(rows, rank))) for part in rows]
        parts = [x[..., part.start - own.start : part.stop - own.start] for part in sends]
        sent = torch.cat([part.permute(2, 0, 1).flatten(1) for part in parts])
        came = passed(sent, [len(part) for part in sends], receives, self._comm, self._name)
        return came.view(-1, *x.shape[:2]).permute(1, 2, 0)

    def _scanned(
        self, rows: Sequence[range], function: str, call: Call, documents: Documents | None, inside: Inside
    ) -> Any:
        """Scan whole sequences with this rank's heads."""
        comm, name, scan = self._comm, self._name, SharedScan(function, call)
        parts = even_parts(scan.heads, comm.size)
        check_heads(name, scan.heads, comm.size, function in STATES)
        came = to_parts(scan.tensors, [needed(parts, t.shape[2]) for t in scan.tensors], rows, comm, name)
        made = inside(scan.of_heads(came, parts[comm.rank]), documents)
        output, *rest = made if isinstance(made, tuple) else (made,)
        noted = scan.note(output, rows[-1].stop)
        self.calls[name][noted, False] += 1
        output = scan.as_made(to_rows(scan.by_heads(output), rows, parts, comm, name))
        output = self._counted(output, noted)
        return (output, *rest) if isinstance(made, tuple) else output

    def _counted(self, made: Tensor, noted: Halo | Scanned | States) -> Tensor:
        """Return it, and note its backward."""
        if made.requires_grad:
            made.register_hook(partial(self._note_backward, self._name, noted))  # type: ignore[no-untyped-call]
        return made

    def _note_backward(self, name: str, noted: Halo | Scanned | States, _: Tensor) -> None:
        self.calls[name][noted, True] += 1


def settled_kind(model: nn.Module, asked: str) -> str:
    """Return how sp divides the recurrences of a model: by heads, too, where it has none whose states could pass."""
    called = (getattr(code_of(type(module).forward), "co_names", ()) for module in mixers(model).values())
    return PREFIX if asked == PREFIX and any(not STATES.keys().isdisjoint(names) for names in called) else HEADS


def check_heads(name: str, heads: int, ranks: int, passes: bool) -> None:
    """Raise ConfigError where a scan has fewer heads than there are ranks. passes: its states could pass instead."""
    if heads < ranks:
        raise ConfigError(
            f"mesh.sp={ranks} shares out the {heads} heads of {name}, and {ranks} is more than {heads}: type "
            f"mesh.sp={heads} or less{', or mesh.sp_mixers=prefix' * passes}."
        )


def _check_states(name: str, given: Mapping[str, Any]) -> None:
    for state in ("initial_state", "initial_states", "output_final_state", "return_final_states", "return_last_state"):
        if given.get(state) is not None and given[state] is not False:
            raise ConfigError(
                f"{name} begins or ends with a state ({state}) of a sequence that goes on, and mesh.sp splits whole "
                "sequences: pass no cache, and use_cache=False."
            )


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


class SharedScan:
    """A call of a scan, whose tensors are seen as [B, T, H, D] at every function.

    tensors  those with a dimension of time, by `names`
    heads    of the scan; channels, where it has none
    """

    def __init__(self, function: str, call: Call) -> None:
        self._roles, self._call = ROLES[function], call
        self._function = function
        self._over_channels = SCANS[function].out == -1
        self.names = [
            name for name in (*self._roles.cut, *self._roles.sent) if isinstance(call.given.get(name), Tensor)
        ]
        self.tensors = [self.by_heads(call.given[name], name) for name in self.names]
        self.heads = self.tensors[0].shape[2]

    def by_heads(self, t: Tensor, name: str = "") -> Tensor:
        """Return [B, T, H, D] of [B, T, H, D] or [B, T, H], of channels [B, C, T], or of their one group [B, N, T]."""
        if not self._over_channels:
            return t if t.dim() == 4 else t[..., None]
        return t.transpose(1, 2)[:, :, None] if name in self._roles.sent else t.transpose(1, 2)[..., None]

    def as_made(self, t: Tensor, dims: int = 4) -> Tensor:
        """Return [B, T, H, D] as the function has it: with so many dimensions, or over channels."""
        if not self._over_channels:
            return t if dims == 4 else t[..., 0]
        return t.flatten(2).transpose(1, 2)

    def of_heads(self, tensors: Sequence[Tensor], own: range) -> Call:
        """Return the call of these heads, whose tensors are given; groups are those that the heads need."""
        given = self._call.given
        values: dict[str, Tensor] = {}
        for name, t, whole in zip(self.names, tensors, self.tensors, strict=True):
            t = _repeated(t, own, self.heads // whole.shape[2]) if name in self._roles.sent else t
            values[name] = self.as_made(t, given[name].dim())
        for name in self._roles.sliced:
            if isinstance(each := given.get(name), Tensor):
                values[name] = each.narrow(0, own.start, len(own))
        return self._call.replaced(**values)

    def note(self, made: Tensor, length: int) -> Scanned:
        """Describe the call, which has made this, of some heads or of all."""
        made = self.by_heads(made)
        out = Cut(self.heads, made.shape[3], made.element_size(), made.requires_grad)
        cuts = (Cut(t.shape[2], t.shape[3], t.element_size(), t.requires_grad) for t in self.tensors)
        return Scanned(len(made), length, self.heads, tuple(cuts), out, *self._costs(made.shape[3]))

    def _costs(self, width: int) -> tuple[int, int, int]:
        """Return what `Scanned` has of a scan's state, whose heads have outputs of this width, and its operations."""
        given, names = self._call.given, STATES.get(self._function)
        if names is None:
            return 0, 0, 0
        chunk = given.get("chunk_size") or CHUNK
        if names.times:
            key = given["query"].shape[-1]
            return key * key, key * width, sum(delta_products(chunk, key, width, given["g"].dim() == 4)) // chunk
        state = given["B"].shape[-1]
        return 1, width * state, sum(mamba2_products(chunk, width, state)) // chunk


def halo_of(call: Call, length: int) -> Halo:
    """Describe a call of a convolution."""
    x, reach = call.given["hidden_states"], call.given["weight"].shape[-1] - 1
    return Halo(len(x), length, x.shape[1], reach, x.element_size(), x.requires_grad)


def _repeated(t: Tensor, heads: range, times: int) -> Tensor:
    """Return groups [B, T, G, D] for heads that use each so many times: as they are, or repeated for each head.

    They stay as they are where all of them are used by as many of these heads.
    """
    first = heads.start // times
    if t.shape[2] == 1 or (heads.start % times == 0 and heads.stop % times == 0):
        return t
    repeated = t[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3)
    return repeated.narrow(2, heads.start - first * times, len(heads))
