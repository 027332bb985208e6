"""Where an engine keeps the inputs of recomputed blocks: as its options say, in parts over tp and on the host."""

from __future__ import annotations

from zero3d.activations.host_slots import HostSlots
from zero3d.activations.kept_inputs import KeptInputs, Partition, inputs_per_pass
from zero3d.engine.foundation import Foundation, host_share
from zero3d.engine.options import parts_activations
from zero3d.tensor_parallel.channel import Channel


def keep_inputs(base: Foundation) -> KeptInputs | None:
    """Have the recomputed blocks of an engine's model keep their inputs elsewhere, if its options say so."""
    options, mesh, chunks = base.options, base.resolved.mesh, base.division.chunks
    offload, partition, slots = options.offload, None, None
    if parts_activations(options.mesh):
        channel = Channel(mesh.axis("tp"), base.axes.ledger)
        partition = Partition(channel.rank, channel.size, lambda part, name: channel.all_gather(part, 0, name))
    if offload.activations == "host":
        slots = HostSlots(base.axes.arena, max(1, inputs_per_pass(chunks)), host_share(base))
    if partition is None and slots is None:
        return None
    kept = KeptInputs(partition, slots)
    kept.install(chunks.values())
    return kept
