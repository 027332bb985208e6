"""Replay: one micro-batch of every K-th step computed twice, and the culprit where a gradient differs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from zero3d.activations.compilation import is_compiled
from zero3d.distributed.agreement import agree, exchange_texts
from zero3d.distributed.degrees import Place
from zero3d.distributed.kernels import capability, products
from zero3d.engine.checks import check_replay
from zero3d.engine.feature import Feature
from zero3d.engine.replay.hashes import Boundary, GradientHashes, Hashed, Parameter, digest
from zero3d.engine.replay.inputs import Surroundings
from zero3d.engine.replay.recordings import Again, Given, InStep
from zero3d.engine.replay.verdict import Reason, Verdict, judge, partner_of, third_of
from zero3d.engine.runtime import Runtime
from zero3d.errors import CorruptionError
from zero3d.zero.gathers import STEP, Order
from zero3d.zero.unit import units_of

if TYPE_CHECKING:
    from zero3d.distributed.mesh import Mesh
    from zero3d.engine.feature import Compute
    from zero3d.engine.options import Options

NEVER = 1 << 62  # the place of no gradient
PLACES = 1 << 32  # of a model chunk: more than it has gradients
COMPILED = ", compiled"


class Round(NamedTuple):
    """One micro-batch of a step, computed here and by its owner.

    partner         the number of the rank on dp whose micro-batch was computed here: this one's where it is alone
    own, given      this rank's micro-batch in the step, and the one that was computed here
    again           the gradients of `given`
    """

    partner: int
    own: InStep
    given: Given
    again: GradientHashes


class Finding(NamedTuple):
    """The first value of all ranks that differs: on the rank that computed a micro-batch again, of its owner."""

    place: int
    finder: int
    owner: int


def machine_of(device: torch.device) -> str:
    """Return what the bits of a product depend on here, on one line: devices of one text check each other."""
    if device.type == "cpu":
        return f"{capability()} {products()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    name = torch.get_device_module(device).get_device_name(device)
    return f"{name}, {capability()}, torch {torch.__version__}"


class Replay(Feature):
    """Owns the comparison of gradients in every K-th step of `train_batch`.

    unlike     why ranks cannot check each other, or None
    clean      applied steps before the last comparison in which nothing differed; None before the first one
    count      comparisons so far
    recording  looks at the micro-batch of this step that is computed twice, on its way through the model
    compute, in methods: runs a micro-batch
    """

    name = "replay"
    trains_unfrozen = False

    def __init__(self, every: int, parts: Runtime) -> None:
        axes, chunks = parts.axes, parts.partition.chunks
        self._every, self._step = every, 0
        self._parts, self._chunks = parts, chunks
        self._device = axes.arena.device
        self._rows = axes.complements["rows"]  # which have micro-batches of their own: dp itself without sp
        self._last = parts.schedule.chunks_per_rank * axes.pp.size - 1 if axes.pp.size > 1 else 0
        trainable = [unit for unit in parts.units if unit.grads is not None]
        self._units = {number: units_of(chunk, trainable) for number, chunk in chunks.items()}
        self._parameters: list[Parameter] = [(u, i) for u in trainable for i in range(len(u.weights.params))]
        self._hashed: list[Hashed] = [*self._parameters]
        if self._last:
            self._hashed += [Boundary(chunk, way) for chunk in chunks for way in (False, True)]
        self.unlike = self._unlike()
        self._round: Round | None = None
        self.clean: int | None = None
        self.count = 0

    @classmethod
    def check(cls, model: nn.Module, mesh: Mesh, options: Options) -> None:
        check_replay(options.replay, mesh)

    @classmethod
    def opened(cls, parts: Runtime) -> Self | None:
        every = parts.options.replay
        return cls(every, parts) if every else None

    def _unlike(self) -> str | None:
        """Return why ranks need not give the same bits, so that none may check another one; None where they do.

        Machines must be alike, and no kernel chosen by its time on one.
        """
        device = self._device
        modules = (inner for chunk in self._chunks.values() for inner in chunk.modules())
        compiled = device.type != "cpu" and any(map(is_compiled, modules))
        kinds = exchange_texts(self._parts.axes.world, f"{machine_of(device)}{COMPILED * compiled}")
        if other := next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), 0):
            return f"rank 0 computes on {kinds[0]}, rank {other} on {kinds[other]}"
        return "compiled kernels are chosen by their time on each machine" if COMPILED in kinds[0] else None

    @property
    def note(self) -> str | None:
        """Return a line about checks that replays cannot make on these ranks; None where they make all of them."""
        if self.unlike is None:
            return None
        return (
            f"health.replay: {self.unlike}: the same values may have other bits there without a fault, so each rank "
            "computes its own micro-batch twice; a fault that a rank repeats each time is not seen."
        )

    # --- in a step ----------------------------------------------------------------------------------

    def begin(self, step: int, micro_batches: int) -> None:
        """Choose the micro-batch of a step that is computed twice, if one of this step is."""
        self._round, self.recording = None, None
        self._step = step
        turn, left = divmod(step, self._every)
        if not left:
            number, reductions = turn // 2 % micro_batches, self._parts.reductions
            self.recording = InStep(number, self._chunks, self._device, reductions)

    @contextmanager
    def around(self, k: int, batch: Any, compute: Compute) -> Iterator[None]:
        """Run a step's k-th micro-batch inside, without a pipeline; before the one watched a partner's is computed."""
        watched = self.recording
        if watched is None or k != watched.micro_batch:
            yield
            return
        if self._parts.order.draw is not None:
            self._parts.order.draw(k)
        watched.enters(0, batch, ())
        self._repeat(watched, compute, first=k == 0)
        with watched.backward(0):
            yield

    def _repeat(self, watched: InStep, compute: Compute, first: bool = False) -> None:
        """Compute a partner's micro-batch, which computes this rank's. first: no unit is held for the step yet."""
        rows, given = self._rows, None
        turn = self._step // self._every
        partner = partner_of(rows.rank, rows.size, turn) if self.unlike is None else rows.rank
        if partner != rows.rank:
            with self._parts.axes.ledger.apart():
                given = self._trade(watched.began, partner)
        again = self._compute(given or watched.began, compute, first)
        self._round = Round(rows.rank if given is None else partner, watched, given or watched.began, again)

    def abandoned(self) -> None:
        self._round, self.recording = None, None

    def _trade(self, own: Given, peer: int) -> Given | None:
        """Send a micro-batch to another row, and return its own; None on both where they are not alike."""
        traded = {chunk: inputs.trade(self._rows, peer) for chunk, inputs in own.items()}
        given = {chunk: inputs for chunk, inputs in traded.items() if inputs is not None}
        return given if len(given) == len(own) else None

    def before_update(self, compute: Compute) -> None:
        """Compare the step's gradients with those computed again. Raises CorruptionError on all ranks.

        2 numbers for each parameter to the partner, and 2 of every rank to all. Reads the device once.
        """
        if self._last and self.recording is not None:  # in a pipeline the partner's comes behind the schedule
            self._repeat(self.recording, compute)
        self.recording = None
        found, self._round = self._round, None
        if found is None:
            return
        with self._parts.axes.ledger.apart():
            rows, world = self._rows, self._parts.axes.world
            again, theirs = (each.table(self._hashed, self._device) for each in (found.again, found.own.hashes))
            if found.partner != rows.rank:
                theirs = rows.trade(theirs, found.partner, "-")
            places = self._places(found.again).where((again != theirs).any(1), NEVER)
            owner = torch.full_like(places[:1], found.partner)
            of_ranks = world.exchange(torch.cat([places.amin().view(1), owner])).flatten()
            read = world.read(of_ranks, [NEVER, rows.rank] * world.size)
            findings = [Finding(int(read[2 * i]), i, int(read[2 * i + 1])) for i in range(world.size)]
            if min(findings).place < NEVER:
                self._accuse(found, findings, places, compute)
        self.clean = self._step - 1
        self.count += 1

    def _places(self, hashes: GradientHashes) -> Tensor:
        """Return of all that is hashed when it came; of a gradient that did not, behind the others of its chunk."""
        came = {each: place for place, each in enumerate(hashes.came)}
        places = [self._place(each, came.get(each, len(came))) for each in self._hashed]
        return torch.tensor(places, dtype=torch.int64, device=self._device)

    def _place(self, hashed: Hashed, came: int) -> int:
        """Return when something came in the whole pipeline: forwards through chunks, then backwards."""
        if isinstance(hashed, Boundary):
            if not hashed.backwards:
                return hashed.chunk
            return self._backward_of(hashed.chunk) + PLACES - 1
        unit, _ = hashed
        return self._backward_of(next(chunk for chunk, units in self._units.items() if unit in units)) + came

    def _backward_of(self, chunk: int) -> int:
        return (1 + self._last - chunk) * PLACES

    def _compute(self, given: Given, compute: Compute, first: bool) -> GradientHashes:
        """Compute a micro-batch of which nothing stays but its hashes. first: no unit is held for the step yet."""
        chunks, shared = self._chunks, self._parts.sequence
        surroundings = {number: Surroundings.of(chunk, self._device) for number, chunk in chunks.items()}
        again, gathers = Again(given, surroundings, self._parameters), self._parts.gathers
        events, gathers.events = gathers.events, None
        for hooks in self._parts.hooks:
            hooks.aside = again.hashes.add
        try:
            with self._parts.axes.ledger.apart(), nullcontext() if shared is None else shared.apart():
                if self._last:  # the next step gathers ahead what this one has used
                    gathers.begin_forward(Order())
                compute(again)
                if first:
                    gathers.drop(lambda token: token == STEP)
        finally:
            gathers.events = events
            if self._last:
                gathers.end_forward()
            for hooks in self._parts.hooks:
                hooks.aside = None
            again.restore()
        return again.hashes

    # --- where something differs ----------------------------------------------------------------------

    def _accuse(self, found: Round, findings: Sequence[Finding], places: Tensor, compute: Compute) -> None:
        """Raise CorruptionError on all ranks, told by the one that found it."""
        world, finding = self._parts.axes.world, min(findings)
        degrees = self._parts.mesh.degrees
        partner = degrees.place(finding.finder).dp // degrees.sp
        verdict = self._judge(found, finding.owner, partner, compute)
        # The tp and sp ranks on whose gradients it showed first: from there it spread to the others.
        columns = [
            degrees.place(each.finder)
            for each in findings
            if each.place == finding.place and degrees.place(each.finder).dp // degrees.sp == partner
        ]
        hosts = exchange_texts(world, f"{platform.node()}, {self._device}")
        ranks = [
            degrees.rank(column._replace(dp=row * degrees.sp + column.dp % degrees.sp))
            for row in verdict.ranks
            for column in columns
        ]
        accused = [f"rank {rank} ({hosts[rank]})" for rank in ranks]
        index = int(world.read(places.argmin().view(1), [0])[0])
        error = CorruptionError(
            f"health.replay: in step {self._step} {_told(accused, verdict.reason)} First in "
            f"{self._named(self._hashed[index])}. The step is not applied."
        )
        agree(world, partial(_raise, error) if world.rank == finding.finder else lambda: None)

    def _named(self, hashed: Hashed) -> str:
        if not isinstance(hashed, Boundary):
            unit, slot = hashed
            return f"unit {unit.name!r}, parameter {unit.layout.slots[slot].name}"
        chunk, units = hashed.chunk, self._units[hashed.chunk]
        output = "the loss behind" if chunk == self._last else "the output of"
        what = f"the gradient that leaves model chunk {chunk}" if hashed.backwards else f"{output} model chunk {chunk}"
        names = f"units {units[0].name!r} to {units[-1].name!r}" if units else "without trained units"
        return f"{what} of {self._last + 1} ({names})"

    def _judge(self, found: Round, owner: int, partner: int, compute: Compute) -> Verdict:
        """Have the micro-batch of a row computed by all who have a say, and say who is wrong."""
        rows, hashed, device = self._rows, self._hashed, self._device
        third = third_of(owner, partner, rows.size)
        here = found.own.hashes if rows.rank == owner else found.again
        again = found.again
        if owner != partner:  # else both results are there, and are this rank's own
            given: Given = found.own.began
            if rows.rank == partner:
                given = found.given
            elif third is not None and rows.rank in (owner, third):
                traded = self._trade(found.own.began, third if rows.rank == owner else owner)
                given = traded or given if rows.rank == third else given
            again = self._compute(given, compute, first=False)
        digests = self._parts.axes.world.exchange(
            torch.cat([digest(each.table(hashed, device)) for each in (here, again)])
        )
        read = self._parts.axes.world.read(digests.flatten(), [0] * digests.numel())
        results = [tuple(read[4 * rank : 4 * rank + 4]) for rank in range(len(digests))]
        groups = {row: [results[each] for each in self._group(row)] for row in range(rows.size)}
        first = {rank: tuple(result[:2] for result in groups[rank]) for rank in (owner, partner)}
        voters = {owner, partner, *([] if third is None or owner == partner else [third])}
        return judge(first, {rank: tuple(result[2:] for result in groups[rank]) for rank in sorted(voters)})

    def _group(self, row: int) -> list[int]:
        """Return the ranks that compute a micro-batch together."""
        degrees = self._parts.mesh.degrees
        alike = range(row * degrees.sp, (row + 1) * degrees.sp)
        return [rank for dp in alike for rank in degrees.model_parallel(degrees.rank(Place(0, dp, 0)))]


def _told(accused: Sequence[str], reason: Reason) -> str:
    """Return the text that names the ranks at fault, and the evidence."""
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
