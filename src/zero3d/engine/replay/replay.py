"""Replay: one micro-batch of every K-th step computed twice, and the culprit where a gradient differs."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.activations.compilation import is_compiled
from zero3d.distributed.agreement import agree, exchange_texts
from zero3d.distributed.degrees import Place
from zero3d.engine.foundation import Foundation
from zero3d.engine.replay.hashes import GradientHashes, Parameter, digest
from zero3d.engine.replay.inputs import Inputs, Surroundings
from zero3d.engine.replay.verdict import Reason, Verdict, judge, partner_of, third_of
from zero3d.engine.runtime import Runtime
from zero3d.errors import CorruptionError
from zero3d.zero.gathers import STEP

NEVER = 1 << 62  # the place of no gradient
Compute = Callable[[Any], None]  # forward and backward of a micro-batch, scaled as in a step


class Round(NamedTuple):
    """One micro-batch of a step, computed here and by its owner.

    partner  the dp rank whose micro-batch was computed here: this one where it is alone
    own, given      this rank's micro-batch, and the one that was computed here
    again, in_step  the gradients of `given`, and those of `own` in the step
    """

    partner: int
    own: Inputs
    given: Inputs
    again: GradientHashes
    in_step: GradientHashes


class Finding(NamedTuple):
    """The first gradient of all ranks that differs: on the rank that computed a micro-batch again, of its owner."""

    place: int
    finder: int
    owner: int


class Replay:
    """Owns the comparison of gradients in every K-th step of `train_batch`.

    clean   applied steps before the last comparison in which nothing differed; None before the first one
    count   comparisons so far
    compute, in `around` and `compare`: runs a micro-batch
    """

    def __init__(self, every: int, base: Foundation, runtime: Runtime, applied: Callable[[], int]) -> None:
        self._every, self._applied = every, applied
        self._axes, self._mesh, self._module = base.axes, base.resolved.mesh, base.division.module
        self._device, self._draw = base.axes.arena.device, base.order.draw
        self._gathers, self._reductions, (self._hooks,) = runtime.gathers, runtime.reductions, runtime.hooks
        trainable = [unit for unit in runtime.units if unit.grads is not None]
        self._parameters: list[Parameter] = [(u, i) for u in trainable for i in range(len(u.weights.params))]
        self._with_partner = self._all_alike()
        self._round: Round | None = None
        self.clean: int | None = None
        self.count = 0

    def _all_alike(self) -> bool:
        """Return whether ranks give the same bits: machines are alike, and no kernel was chosen by its time on one."""
        module, device, world = self._module, self._device, self._axes.world
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        kind = f"{device.type} {name} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
        compiled = device.type != "cpu" and any(is_compiled(inner) for inner in module.modules())
        kinds = world.exchange(torch.tensor([zlib.crc32(f"{kind} {torch.__version__}".encode()), compiled]))
        return bool((kinds == kinds[0]).all()) and not compiled

    # --- in a step ----------------------------------------------------------------------------------

    @contextmanager
    def around(self, k: int, micro_batches: Sequence[Any], compute: Compute) -> Iterator[None]:
        """Run this rank's k-th micro-batch of a step inside; before the chosen one a partner's is computed."""
        if k == 0:
            self._round = None
        turn, left = divmod(self._applied() + 1, self._every)
        if left or k != turn // 2 % len(micro_batches):
            yield
            return
        if self._draw is not None:
            self._draw(k)
        dp = self._axes.dp
        own = Inputs.now(micro_batches[k], self._module, self._device)
        partner = partner_of(dp.rank, dp.size, turn) if self._with_partner else dp.rank
        given = None
        if partner != dp.rank:
            with self._axes.ledger.apart():
                given = own.trade(dp, partner)
        again = self._compute(given or own, compute, first=k == 0)
        in_step = GradientHashes()
        with self._watching(in_step):
            yield
        self._round = Round(dp.rank if given is None else partner, own, given or own, again, in_step)

    def compare(self, compute: Compute) -> None:
        """Compare the step's gradients with those computed again. Raises CorruptionError on all ranks.

        2 numbers for each parameter to the partner, and 2 of every rank to all. Reads the device once.
        """
        found, self._round = self._round, None
        if found is None:
            return
        with self._axes.ledger.apart():
            dp, world = self._axes.dp, self._axes.world
            again, theirs = (hashes.table(self._parameters, self._device) for hashes in (found.again, found.in_step))
            if found.partner != dp.rank:
                theirs = dp.trade(theirs, found.partner, "-")
            places = self._places(found.again).where((again != theirs).any(1), NEVER)
            owner = torch.full_like(places[:1], found.partner)
            rows = world.exchange(torch.cat([places.amin().view(1), owner])).flatten()
            read = world.read(rows, [NEVER, dp.rank] * world.size)
            findings = [Finding(int(read[2 * i]), i, int(read[2 * i + 1])) for i in range(world.size)]
            if min(findings).place < NEVER:
                self._accuse(found, findings, places, compute)
        self.clean = self._applied()
        self.count += 1

    def _places(self, hashes: GradientHashes) -> Tensor:
        """Return of every parameter when its gradient came; behind all others where none did."""
        came = {parameter: place for place, parameter in enumerate(hashes.came)}
        places = [came.get(parameter, len(came)) for parameter in self._parameters]
        return torch.tensor(places, dtype=torch.int64, device=self._device)

    def _compute(self, given: Inputs, compute: Compute, first: bool) -> GradientHashes:
        """Compute a micro-batch of which nothing stays but its hashes. first: no unit is held for the step yet."""
        hashes, gathers = GradientHashes(), self._gathers
        before, events = Surroundings.of(self._module, self._device), gathers.events
        gathers.events, self._hooks.aside = None, hashes.take
        try:
            with self._axes.ledger.apart():
                before.become(given)
                compute(given.batch)
                if first:
                    gathers.drop(lambda token: token == STEP)
        finally:
            gathers.events, self._hooks.aside = events, None
            before.restore()
        return hashes

    @contextmanager
    def _watching(self, hashes: GradientHashes) -> Iterator[None]:
        """Look at the gradients of a step inside, beside whoever looks at them."""
        other = self._reductions.watch

        def watch(*came: Any) -> None:
            hashes.take(*came)
            if other is not None:
                other(*came)

        self._reductions.watch = watch
        try:
            yield
        finally:
            self._reductions.watch = other

    # --- where something differs ----------------------------------------------------------------------

    def _accuse(self, found: Round, findings: Sequence[Finding], places: Tensor, compute: Compute) -> None:
        """Raise CorruptionError on all ranks, told by the one that found it."""
        world, finding = self._axes.world, min(findings)
        partner = self._mesh.degrees.place(finding.finder).dp
        verdict = self._judge(found, finding.owner, partner, compute)
        # The tp ranks on whose gradients it showed first: from there it spread to the others.
        columns = [each.finder for each in findings if each.place == finding.place and
                   self._mesh.degrees.place(each.finder).dp == partner]  # fmt: skip
        hosts = exchange_texts(world, f"{platform.node()}, {self._device}")
        degrees = self._mesh.degrees
        ranks = [degrees.rank(degrees.place(column)._replace(dp=dp)) for dp in verdict.ranks for column in columns]
        accused = [f"rank {rank} ({hosts[rank]})" for rank in ranks]
        index = int(world.read(places.argmin().view(1), [0])[0])
        unit, slot = self._parameters[index]
        where = f"unit {unit.name!r}, parameter {unit.layout.slots[slot].name}"
        error = CorruptionError(
            f"health.replay: in step {self._applied() + 1} {_told(accused, verdict.reason)} First in {where}. The step "
            "is not applied."
        )
        agree(world, partial(_raise, error) if world.rank == finding.finder else lambda: None)

    def _judge(self, found: Round, owner: int, partner: int, compute: Compute) -> Verdict:
        """Have the micro-batch of a dp rank computed by all who have a say, and say who is wrong."""
        dp, parameters, device = self._axes.dp, self._parameters, self._device
        third = third_of(owner, partner, dp.size)
        here = found.in_step if dp.rank == owner else found.again
        again = found.again
        if owner != partner:  # else both results are there, and are this rank's own
            given = found.own
            if dp.rank == partner:
                given = found.given
            elif third is not None and dp.rank in (owner, third):
                traded = found.own.trade(dp, third if dp.rank == owner else owner)
                given = traded or found.own if dp.rank == third else found.own
            again = self._compute(given, compute, first=False)
        row = torch.cat([digest(hashes.table(parameters, device)) for hashes in (here, again)])
        rows = self._axes.world.exchange(row)
        read = self._axes.world.read(rows.flatten(), [0] * rows.numel())
        results = [tuple(read[4 * rank : 4 * rank + 4]) for rank in range(len(rows))]
        groups = {rank: [results[each] for each in self._group(rank)] for rank in range(dp.size)}
        first = {rank: tuple(result[:2] for result in groups[rank]) for rank in (owner, partner)}
        voters = {owner, partner, *([] if third is None or owner == partner else [third])}
        return judge(first, {rank: tuple(result[2:] for result in groups[rank]) for rank in sorted(voters)})

    def _group(self, dp: int) -> list[int]:
        """Return the ranks of the model-parallel group that is a dp rank."""
        return self._mesh.degrees.model_parallel(self._mesh.degrees.rank(Place(0, dp, 0)))


def _told(accused: Sequence[str], reason: Reason) -> str:
    """Say who is wrong, and by what one knows that."""
    if reason is Reason.CHANGED:
        return f"{' and '.join(accused)} computed two different gradients of one micro-batch from the same values."
    if reason is Reason.OUTVOTED:
        return f"{' and '.join(accused)} computed another gradient of one micro-batch than two other ranks, each time."
    return (
        f"{' and '.join(accused)} computed different gradients of one micro-batch, each the same every time: one of "
        "them is wrong, and a third dp rank would say which."
    )


def _raise(error: CorruptionError) -> None:
    raise error
