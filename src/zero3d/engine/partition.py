"""This rank's share of a model: its pipeline stage's chunks, and the slices of these over the tp axis.

model --pp--> chunks --tp--> slices of parameters --dp--> shards of units (assembly.py)
                     --ep--> some of the experts  --edp-> shards of their units
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from zero3d.blueprint.policy import Policy
from zero3d.checkpoint.state import FullModel
from zero3d.distributed.axis import Axis
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.engine.options import Options, Resolved, parts_activations
from zero3d.engine.tiling import Budget, install_tiled_loss, tile_layers
from zero3d.expert_parallel.plan import ExpertLayer, find_experts, refuse_none, whole_over_tp
from zero3d.expert_parallel.share import Shared, share_out
from zero3d.pipeline.split import take_chunks
from zero3d.pipeline.ties import names_of_copies
from zero3d.rng import share_torch_rng
from zero3d.shards.cuts import Cut
from zero3d.tensor_parallel.parallelize import Sharded, parallelize
from zero3d.tensor_parallel.planned_regions import warn_across_hosts
from zero3d.tensor_parallel.traffic import Region


@dataclass(frozen=True)
class ModelPartition:
    """Describes this rank's share of a model, by names of the full model's parameters.

    module      what `engine.module` is: the model itself, or the list of this rank's chunks of it
    chunks      model chunk number -> module; without a pipeline the model is number 0
    full_model  the parameters before the model was divided
    places      of parameters in `model.parameters()`; a tied parameter's copy has its owner's
    cuts        how the tp and ep axes cut parameters
    partial     names of whole ones whose gradients are parts of a sum over tp
    regions     where activations pass between tp ranks
    expert_layers  this rank's, wherever their experts are
    experts     layers of this rank whose experts are dispatched to, and the parameters of these
    """

    module: nn.Module
    chunks: Mapping[int, nn.Module]
    full_model: FullModel
    places: dict[str, int]
    cuts: Mapping[str, Cut]
    partial: frozenset[str]
    regions: Sequence[Region]
    experts: Shared
    expert_layers: Sequence[ExpertLayer]


def partition_model(
    model: nn.Module, resolved: Resolved, policy: Policy, tp: Comm, ep: Comm, ledger: Ledger
) -> ModelPartition:
    """Take this rank's chunks of the model and cut their parameters over tp and ep, in place. Raises ConfigError."""
    mesh, options = resolved.mesh, resolved.options
    parallel = options.mesh
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    dispatches = ep.size > 1 or policy.exact  # in exact mode, too, whose bits are the same at any ep
    has_experts = dispatches and bool(find_experts(model, parallel.ep_plan))
    if ep.size > 1 and not has_experts:
        refuse_none(ep.size, model)
    chunks = take_chunks(model, mesh.axis("pp"), resolved.schedule, parallel.blocks)
    copies = names_of_copies(chunks)
    full_model = FullModel.of(model, copies)
    places |= {name: places[owner] for name, owner in copies.items()}
    found = [each for chunk in chunks.values() for each in find_experts(chunk, parallel.ep_plan)]
    layers = found if has_experts else []
    sharded = _cut_over_tp(chunks, mesh.axis("tp"), ledger, options, layers)
    experts = share_out(chunks.values(), layers, ep, options.mesh.experts, has_experts)
    cuts = {name: cut for one in sharded for name, cut in one.cuts.items()} | dict(experts.cuts)
    partial = frozenset(name for one in sharded for name in one.partial)
    if options.gather_budget is not None:
        budget = Budget(options.gather_budget, resolved.precision.dtype)
        warns = mesh.rank == 0 and policy.row.shards_parameters
        tiles = tile_layers(chunks, budget, _tied(chunks), warns)
        full_model = full_model._replace(tiles=tiles)
        places |= {name: places[tile.owner] for name, tile in tiles.items()}
        cuts |= {name: cuts[tile.owner] for name, tile in tiles.items() if tile.owner in cuts}
        partial |= {name for name, tile in tiles.items() if tile.owner in partial}
    if options.tiled_loss:
        install_tiled_loss(chunks, mesh.axis("tp"), ledger, cuts)
    share_random_state(tp)
    regions = [region for one in sharded for region in one.regions]
    if mesh.rank == 0:
        warn_across_hosts(mesh.degrees, mesh.local_world, regions, resolved.precision.dtype.itemsize)
    return ModelPartition(
        module=model if mesh.pp == 1 else nn.ModuleList(chunks.values()),
        chunks=chunks,
        full_model=full_model,
        places=places,
        cuts=cuts,
        partial=partial,
        regions=regions,
        experts=experts,
        expert_layers=found,
    )


def _cut_over_tp(
    chunks: Mapping[int, nn.Module], axis: Axis, ledger: Ledger, options: Options, whole: Sequence[ExpertLayer]
) -> list[Sharded]:
    """Replace parameters by this tp rank's slices of them; experts that ep shares out stay whole."""
    plan, sequence = dict(options.mesh.tp_plan or {}) | whole_over_tp(whole), options.mesh.sequence_parallel
    local_logits, parts = options.loss is None, parts_activations(options.mesh)
    return [
        parallelize(chunk, axis, ledger, plan, sequence=sequence, local_logits=local_logits, parts=parts)
        for chunk in (chunks.values() if axis.size > 1 else ())
    ]


def _tied(chunks: Mapping[int, nn.Module]) -> set[str]:
    """Return the names of parameters that two model chunks hold."""
    return {name for owners in names_of_copies(chunks).items() for name in owners}


def share_random_state(tp: Comm) -> None:
    """Go on from tp rank 0's random state: what tp ranks hold alike must be dropped out and sampled alike."""
    if tp.size > 1:
        share_torch_rng(tp.device, lambda state: tp.broadcast(state, "-"))
