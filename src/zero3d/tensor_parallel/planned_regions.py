"""Where activations pass between tp ranks, from a model's plan alone: what is sent, before anything is.

    common  --copy_to-->  [colwise | a rank's own outputs | rowwise]  --reduce_from-->  common

    region                          without sequence parallelism   with it (around a module of such matrices)
    copy_to, first of a module      backward all_reduce            all_gather, backward reduce_scatter
    reduce_from                     all_reduce                     reduce_scatter, backward all_gather
    first block, last block         nothing                        backward all_gather; all_gather
    Mamba2, groups shared by ranks  all_gather, backward reduce_scatter of B, C and their filters; all_reduce, backward
                                    too, of a norm's sums of squares
    embedding, head                 all_reduce; backward all_reduce, and two fp32 numbers per token for the loss
    recomputed module               backward all_gather of its input, where that is kept in parts; with `every` once for
                                    as many modules

Module order is taken for the order of calls, and a name of OUTPUTS for a matrix that takes what its module's others
gave. A recomputed module repeats its forwards, but for the last one when nothing behind it is saved: recomputation
ends where all missing tensors are there.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from torch import nn

from zero3d.activations.segments import Recomputed
from zero3d.distributed.degrees import Degrees
from zero3d.models.quantised import QuantisedLinear
from zero3d.models.quantised_experts import stacks_of
from zero3d.tensor_parallel.plan import Style
from zero3d.tensor_parallel.sequence import cut_blocks
from zero3d.tensor_parallel.traffic import Region, SharedGroups, group_regions, loss_region, tensor_traffic

COLWISE = ("colwise", "packed_colwise", "colwise_gather_output")
ROWWISE = ("rowwise", "packed_rowwise", "rowwise_split_input")
OUTPUTS = ("o_proj", "out_proj", "c_proj")
LAST = ".mamba_decoder."  # in Zamba2's blocks called behind the transformer that is registered after it


@dataclass(frozen=True)
class UncutModel:
    """A model before it is cut, and how it will be.

    head   the name of its head, if its loss takes local logits
    parts  inputs of recomputed modules are kept in parts
    """

    model: nn.Module
    styles: Mapping[str, Style]
    config: Any
    sequence: bool
    head: str | None
    parts: bool


def find_regions(uncut: UncutModel, size: int) -> list[Region]:
    """Return all regions of one micro-batch's forward and backward on one of `size` ranks, in module order."""
    blocks = list(cut_blocks(uncut.model, list(uncut.styles))) if uncut.sequence else []
    regions = [*_of_sequence(blocks, uncut), *_of_styles(uncut, size, blocks)]
    inputs = list(_of_inputs(uncut)) if uncut.parts else []
    has_gradient = _gradients(uncut)
    regions = [
        r if has_gradient(r.name) or _sends_trained(uncut.model, r) else r._replace(backward="") for r in regions
    ]
    again = _recomputed(uncut.model, regions)
    return [*(r._replace(again=r.name in again) for r in regions), *inputs]


def warn_across_hosts(degrees: Degrees, local: int | None, regions: list[Region], width: int) -> None:
    """Warn of what it costs when a tp group lies on several hosts of `local` ranks each (None: unknown)."""
    tp = degrees.tp
    if local is None or local % tp == 0:
        return
    inside = gcd(tp, local)
    nbytes = sum(moved.bytes for moved in tensor_traffic(regions, tp, 1, tp, width).values()) // tp
    warnings.warn(
        f"mesh.tp={tp} on hosts of {local} ranks: a layer's all-reduces, 2 forward and 2 backward, cross hosts, and "
        f"computation waits for each ({nbytes:,} bytes per token from this rank over all its layers). Type "
        f"mesh.tp={inside} mesh.pp={degrees.pp * tp // inside}: a pipeline sends a hidden state once per stage.",
        stacklevel=6,
    )


def _of_styles(uncut: UncutModel, size: int, blocks: list[str]) -> Iterator[Region]:
    """Yield the regions of all styles, with the collectives they do if their inputs have gradients."""
    copied: set[tuple[str, int]] = set()  # modules whose matrices' input, of this width, is copied in already
    for name, style in uncut.styles.items():
        kind, parent = style.kind, name.rpartition(".")[0]
        module = _get(uncut.model, name)
        if not _is_called(uncut, name):
            continue
        sliced = uncut.sequence and any(name.startswith(block + ".") for block in blocks)
        if kind in COLWISE and isinstance(module, nn.Module):
            inputs, outputs = _shape(module)
            last = kind == "colwise_gather_output" and name.rpartition(".")[2] in OUTPUTS
            outer = parent.rpartition(".")[0]  # a mixer gives its input to modules of its own
            if not copied & {(parent, inputs), (outer, inputs)} or last:
                around = name if not sliced or parent in blocks else parent
                yield Region(around, *(("all_gather", "reduce_scatter") if sliced else ("", "all_reduce")), inputs)
                copied |= set() if last else {(parent, inputs)}
            if name == uncut.head:
                yield loss_region(name, size)
            elif kind == "colwise_gather_output":
                yield Region(name, "all_gather", "", outputs)
        elif kind == "mla_kv_a_proj":
            copied.clear()  # the latent is another matrix's input
            if rotary := _get(uncut.model, parent).qk_rope_head_dim:
                yield Region(name, "", "all_reduce", rotary)
        elif kind == "own_groups":
            yield from group_regions(name, shared_groups(module, style.blocks), size)
        elif isinstance(module, nn.Module) and (
            kind in ROWWISE or kind in ("embedding_rowwise", "all_reduce", "moe_tp_experts")
        ):
            copied.clear()
            yield from _reduced(uncut, name, kind, module, sliced)


def _is_called(uncut: UncutModel, name: str) -> bool:
    """Return whether a layer calls a module: of the adapters in a block that layers share (Zamba2), its own alone."""
    owner, found, inside = name.partition("_adapter_list.")
    layers = list(getattr(uncut.config, "hybrid_layer_ids", ()) or ())
    layer = int(owner.partition("layers.")[2].partition(".")[0]) if found and layers else -1
    return layer not in layers or layers.index(layer) == int(inside.partition(".")[0])


def shared_groups(mixer: Any, total: int) -> SharedGroups:
    """Return what ranks may share of a Mamba2 mixer of so many groups, as it is before it is cut."""
    filters = sum(p[0].numel() for p in mixer.conv1d.parameters())
    return SharedGroups(total, mixer.ssm_state_size, filters, not isinstance(mixer.norm, nn.Identity))


def _reduced(uncut: UncutModel, name: str, kind: str, module: nn.Module, sliced: bool) -> Iterator[Region]:
    """Yield the regions of a module whose output is reduced, and of its inputs where it copies or scatters these."""
    if isinstance(module, nn.Embedding):
        yield Region(name, "all_reduce", "", module.embedding_dim)
        return
    if kind in ROWWISE:
        inputs, width = _shape(module)
        if kind == "rowwise_split_input":
            yield Region(name, "", "all_gather", inputs)
    else:
        width = (_of_experts(uncut, name, module) if kind == "moe_tp_experts" else 0) or _hidden(uncut)
    if kind == "moe_tp_experts" and len(inspect.signature(module.forward).parameters) == 1:
        width *= next((len(p) for p in module.parameters()), 1)  # hidden states weighed before, for every expert
        yield Region(name, "", "all_reduce", width)
    elif kind == "moe_tp_experts":  # hidden states, and each token's weights of its experts
        yield Region(name, "", "all_reduce", width)
        yield Region(name, "", "all_reduce", getattr(uncut.config, "num_experts_per_tok", 0))
    yield Region(name, *(("reduce_scatter", "all_gather") if sliced else ("all_reduce", "")), width)


def _of_experts(uncut: UncutModel, name: str, module: nn.Module) -> int:
    """Return how wide what experts take and give is, 0 where no stack says so: its dimension that tp leaves whole.

    Of experts in a latent space (Nemotron-H) it is not the hidden size.
    """
    for key, p in module.named_parameters(recurse=False):
        stack, style = stacks_of(module).get(key), uncut.styles.get(f"{name}.{key}")
        matrix = tuple(p.shape[1:]) if stack is None else stack.full.shape
        if len(matrix) == 2 and style is not None and style.kind in (*COLWISE, *ROWWISE):
            return matrix[0 if style.kind in ROWWISE else 1]
    return 0


def _of_sequence(blocks: list[str], uncut: UncutModel) -> Iterator[Region]:
    """Yield the regions of sequence parallelism: scattered at the first block, gathered at the last."""
    if blocks:
        yield Region(blocks[0], "", "all_gather", _hidden(uncut))
        yield Region(blocks[-1], "all_gather", "", _hidden(uncut))


def _of_inputs(uncut: UncutModel) -> Iterator[Region]:
    """Yield the gathers of inputs that recomputed modules keep in parts: of a segment its first module's.

    An input has a gradient, and is kept, if something before it is trained: also a norm beside attention, whatever the
    order of their names.
    """
    model, recomputed = uncut.model, _recomputed_modules(uncut.model)
    trained = [name for name, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    first = min((order[name] for name in trained), default=len(order))
    for i, (name, forward) in enumerate(recomputed.items()):
        around = name.rpartition(".")[0]
        listed = isinstance(model.get_submodule(around), nn.ModuleList)
        beside = not listed and any(n.startswith(around + ".") and not n.startswith(name) for n in trained)
        if i % forward.every == 0 and (not getattr(model, "is_first", True) or first < order[name] or beside):
            copies = getattr(uncut.config, "altup_num_inputs", 1) if listed else 1  # Gemma 3n's hidden states
            yield Region(name, "", "all_gather", copies * _hidden(uncut))


def _hidden(uncut: UncutModel) -> int:
    """Return the width of the common activations: that of a rowwise matrix's output."""
    rowwise = (_get(uncut.model, name) for name, style in uncut.styles.items() if style.kind in ROWWISE)
    matrices = (m for m in rowwise if isinstance(m, nn.Module))
    width = next((_shape(m)[1] for m in matrices), 0)
    return width or getattr(uncut.config, "hidden_size", 0)


def _shape(module: nn.Module) -> tuple[int, int]:
    """Return inputs and outputs of a Linear or Conv1D, inside PEFT's wrapper or not."""
    base: Any = getattr(module, "base_layer", module)
    a, b = base.shape if isinstance(base, QuantisedLinear) else base.weight.shape  # whose weight would be decoded
    return (a, b) if hasattr(base, "nf") else (b, a)


def _get(model: nn.Module, name: str) -> Any:
    owner, _, local = name.rpartition(".")
    return getattr(model.get_submodule(owner), local)


def _gradients(uncut: UncutModel) -> Callable[[str], bool]:
    """Return a function: whether the input of the region of this name has a gradient.

    It has, if something before it is trained, or a norm beside it in its block.
    """
    model = uncut.model
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    trained = {name: any(p.requires_grad for p in m.parameters(recurse=False)) for name, m in model.named_modules()}
    first = min((i for name, i in order.items() if trained[name]), default=len(order))
    received = not getattr(model, "is_first", True)  # a later model chunk
    in_cut = tuple(f"{name}." for name in uncut.styles) + tuple(uncut.styles)

    def has_gradient(name: str) -> bool:
        if received or first < order[name]:
            return True
        block = ".".join(name.split(".")[:-2])
        beside = (n for n in trained if block and n.startswith(block + ".") and not n.startswith(in_cut))
        return any(trained[n] for n in beside)

    return has_gradient


def _sends_trained(model: nn.Module, region: Region) -> bool:
    """Return whether B and C that ranks gather come from something trained: a matrix's adapter, or the filters."""
    if not region.fixed:
        return False
    mixer: Any = model.get_submodule(region.name.rpartition(".")[0])
    return any(p.requires_grad for module in (mixer.in_proj, mixer.conv1d) for p in module.parameters())


def _recomputed_modules(model: nn.Module) -> dict[str, Recomputed]:
    """Return the calls of recomputed modules by name."""
    return {name: m.forward for name, m in model.named_modules() if isinstance(m.forward, Recomputed)}


def _recomputed(model: nn.Module, regions: list[Region]) -> set[str]:
    """Return the names of the regions whose forward runs again."""
    modules = _recomputed_modules(model)
    again = set()
    for i, (name, forward) in enumerate(modules.items()):
        inside = [r.name for r in regions if r.forward and r.name.startswith(name + ".")]
        inside.sort(key=lambda inner: LAST in inner)
        ends = (i + 1) % forward.every == 0 or i == len(modules) - 1
        if inside and ends and not _kept_behind(model.get_submodule(name), inside[-1].removeprefix(name + ".")):
            inside.pop()
        again.update(inside)
    return again


def _kept_behind(module: nn.Module, name: str) -> bool:
    """Return whether something behind a module's `name` saves its input for the backward: dropout, or an output norm.

    Norms come in no order, but models that have one behind their MLP call it post_feedforward or post_mlp.
    """
    order = [inner for inner, _ in module.named_modules()]
    drops = [inner for inner, m in module.named_modules() if m.training and isinstance(m, nn.Dropout) and m.p > 0]
    normed = any(child.startswith(("post_feedforward", "post_mlp")) for child, _ in module.named_children())
    return normed or any(order.index(inner) > order.index(name) for inner in drops)
