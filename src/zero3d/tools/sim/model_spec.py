"""A real model as the planner's data (`ModelSpec`), by running one block of each kind without data.

    parameters   tools/sim/units.py     parts, units, what tp cuts: exact
    a token      tools/sim/figures.py   bytes and operations at tp = 1 and at two larger degrees

What lies on every tp rank and what tp divides are told apart by two degrees: kept(t) = whole + cut / t. The code
paths of tp = 1 are others than those of tp > 1 (its loss, above all), so both have figures of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from zero3d.activations.targets import mixers_in
from zero3d.config import Config, Lora, Model
from zero3d.errors import ConfigError
from zero3d.models.bases import config_number, decoder_of, image_model, sees_images
from zero3d.models.mixing import mixers, mixing_files
from zero3d.models.quantised_folders import stored_format
from zero3d.models.recurrences import own_of_recurrences
from zero3d.models.trained import open_trained
from zero3d.pipeline.balance import BLIND
from zero3d.pipeline.split import active_weights, tower_of
from zero3d.sequence.trial import mixing_layers
from zero3d.shards.cuts import Cut
from zero3d.tensor_parallel.parallelize import read_styles
from zero3d.tensor_parallel.planned_regions import ROWWISE, shared_groups
from zero3d.tensor_parallel.traffic import SharedGroups
from zero3d.tools.plan.search import LONG
from zero3d.tools.plan.spec import (
    AS_KERNELS,
    IN_AUTOCAST,
    IN_TORCH,
    Forward,
    Instant,
    ModelSpec,
    Operations,
    Part,
    Patches,
)
from zero3d.tools.sim.figures import EMBEDDING, HEAD, Curve, Figures, RunAs, kinds_of, measure, reduce_model
from zero3d.tools.sim.images import FAILS, find_images, said_of
from zero3d.tools.sim.mixer_kernels import ALL, runs_fused
from zero3d.tools.sim.tower import measure_tower, operations_of
from zero3d.tools.sim.units import PartNames, config_of, find_cuts, find_part_names, units_by_part
from zero3d.train.setup.losses import tiles_refused

NO_MIXER = (False, None)
DEGREES = (2, 3, 4, 5, 6, 7, 8)
LENGTH, MOST = 2048, 4096


def trace(
    model: nn.Module,
    length: int,
    name: str = "",
    packed: bool | None = False,
    kernels: Collection[str] = (),
    autocast: str | None = None,
    patches: Patches | None = None,
) -> ModelSpec:
    """Make the spec of a model for sequences of `length` tokens; those of a model that takes images have some.

    model    parameters on meta or real ones, frozen ones and adapters as they will be trained; it stays as it is
    packed   sequences are of several documents each (data.packing); None: those of a model that takes no images
    kernels  names by which mixers call a kernel, as on a card (mixer_kernels.py); the others run in torch
    autocast  the kind of device in whose autocast its forward runs; None: in none
    patches  of the images of a sequence; None: of one image
    Where a model does not run with images and without values, text alone is traced.
    Errors: no repeated blocks, a forward that cannot run without data (ConfigError).
    """
    packed = not sees_images(model) if packed is None else packed
    run_as = RunAs(packed, find_images(model, length, packed, patches), kernels=kernels, autocast=autocast)
    if run_as.images is not None:
        with suppress(*FAILS):
            return _traced(model, length, name, run_as)
    return _traced(model, length, name, run_as._replace(images=None))


def _traced(model: nn.Module, length: int, name: str, run_as: RunAs) -> ModelSpec:
    """Make the spec of a model that runs so."""
    packed, images, _, kernels, _, autocast = run_as
    part_names = find_part_names(model)
    seeing, most = ({}, 0.0) if images is None else measure_tower(model, images, autocast)
    if images is not None:
        part_names = part_names.with_tower(model, images.blocks)
    spec = _outline(model, part_names, length, name)
    figures = _figures(model, part_names, length, spec, partial(measure, run_as=run_as))
    sent = partial(measure, run_as=run_as._replace(dispatched=True))
    apart = _figures(model, part_names, length, spec, sent) if spec.stacked else None
    fused = _fused(model, part_names, length, run_as)
    names: list[Any] = [EMBEDDING, *kinds_of(model, part_names), HEAD]
    parts = [replace(p, operations=_operations(k, figures, length)) for k, p in zip(names, of_text(spec), strict=True)]
    eager = getattr(config_of(model), "_attn_implementation", None) == "eager"
    hybrid = bool(mixers(model))
    for i, block in enumerate(part_names.blocks, 1):
        again = 2.0 * sum(map(_in_products, dict(mixers_in(model.get_submodule(block))).values()))
        parts[i] = replace(parts[i], operations=replace(parts[i].operations, eager=eager, again=again))
        found = figures[0][1][names[i]]
        attends = not hybrid or _attends(model.get_submodule(block))
        over = figures[1][1][names[i]] if len(figures) > 1 else found
        parts[i] = replace(parts[i], attends=attends, **_mixed(parts[i], found, over))
        if apart is not None and parts[i].stacked:
            dispatched = replace(_operations(names[i], apart, length), eager=eager, again=again)
            parts[i] = replace(parts[i], dispatched=dispatched)
        if fused:
            in_one = replace(_solved((1, fused[names[i]]), None, length), eager=eager, again=again)
            parts[i] = replace(parts[i], operations=replace(parts[i].operations, fused=in_one))
    mixing = bool(mixing_files(model)) * (AS_KERNELS if kernels else IN_TORCH)
    provenance = ["traced", "packed" * packed, IN_AUTOCAST if autocast else "", mixing, said_of(model, images)]
    tower = [
        replace(part, operations=operations_of(seen, key in part_names.tower, length, _looks_eagerly(model)))
        for (key, seen), part in zip(seeing.items(), (part for part in spec.parts if part.kind == "tower"), strict=True)
    ]
    return replace(
        spec,
        parts=(parts[0], *tower, *parts[1:]),
        provenance=", ".join(filter(None, provenance)),
        patches=0 if images is None else images.patches,
        pixels=0 if images is None else images.nbytes,
        seeing=most / length,
    )


def of_text(spec: ModelSpec) -> list[Part]:
    """Return the parts of a model without those of a vision tower."""
    return [part for part in spec.parts if part.kind != "tower"]


def _looks_eagerly(model: nn.Module) -> bool:
    """Return whether a tower's attention keeps its scores."""
    vision = getattr(image_model(model).config, "vision_config", None)
    return getattr(vision, "_attn_implementation", None) == "eager"


def _in_products(mixer: nn.Module) -> int:
    """Return how many values of a mixer are in matrices, by which each token is multiplied."""
    rates = own_of_recurrences(mixer)
    return sum(p.numel() for name, p in mixer.named_parameters() if p.dim() == 2 and name not in rates)


def _attends(block: nn.Module) -> bool:
    """Return whether a block of a hybrid has attention."""
    own = mixers(block).values()
    return any("Attention" in type(module).__name__ and module not in own for module in block.modules())


def outline(model: nn.Module, length: int, name: str = "", blocks: str | None = None) -> ModelSpec:
    """Make the spec without running anything: parameters are exact, operations zero. Raises ConfigError.

    blocks   name of the list of blocks, where a model has several
    """
    return _outline(model, find_part_names(model, blocks), length, name)


def _outline(model: nn.Module, part_names: PartNames, length: int, name: str) -> ModelSpec:
    config = config_of(model)
    units = units_by_part(model, part_names, _cuts(model, part_names))
    blocks = [active_weights(model.get_submodule(block), config).active for block in part_names.blocks]
    ends = ["embedding", *["tower"] * part_names.of_tower]
    kinds = [*ends, *("block" for _ in blocks), "head"]
    meetings = [*[NO_MIXER] * len(ends), *_meetings(model, part_names), NO_MIXER]
    parts = tuple(
        Part(kind, part_units, Operations(0.0), active, single=meets[0], groups=meets[1])
        for kind, part_units, active, meets in zip(
            kinds, units, [*[None] * len(ends), *blocks, None], meetings, strict=True
        )
    )
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    table = max(tables, key=lambda m: m.weight.numel(), default=None)
    vocab, hidden = (0, 0) if table is None else (table.num_embeddings, table.embedding_dim)
    heads = _setting(config, "num_attention_heads")
    return ModelSpec(
        name or type(model).__name__,
        parts,
        length,
        hidden,
        vocab,
        heads,
        kv_heads=_setting(config, "num_key_value_heads") or heads,
        experts=max((w.shape[0] for unit in sum(units, ()) for w in unit.weights if w.stacked), default=0),
        chosen=_setting(config, "num_experts_per_tok"),
        latent=_setting(config, "moe_latent_size"),
        routers=_setting(config, "output_router_logits") * sum(part.stacked > 0 for part in parts),
        provenance="outline",
        chain=part_names.chain,
        mixing=None if (decoder := decoder_of(model)) is None else mixing_layers(decoder),
        tiles=tiles_refused(model) is None,
        tower=tower_of(model, _modules(model, part_names.before)) if part_names.chain else BLIND,
    )


def _modules(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of these names that are modules'; a parameter may be before the blocks, too (image_newline)."""
    return [name for name in names if name in dict(model.named_modules())]


def _setting(config: Any, name: str) -> int:
    """Return a number of a configuration, 0 where there is none."""
    return int(getattr(config, name, None) or 0)


def open_spec(
    path: str,
    length: int | None = LENGTH,
    chosen: Model | None = None,
    lora: Lora | None = None,
    packed: bool | None = False,
    freeze: tuple[str, ...] | None = None,
    beyond: bool = False,
    forward: Forward = Forward(),  # noqa: B008 (a tuple)
) -> ModelSpec:
    """Make the spec of a preset, a config.json, a folder with one, or module:function.

    length None: the model's positions, at most MOST
    chosen attention, part and format of frozen layers, as a configuration has them; without a format that of
           a folder which has one
    lora   adapters, everything else frozen but what it names
    freeze names or patterns of what is not trained
    packed sequences are of several documents each, as data.packing makes them; None: where the model takes no images
    forward how it runs
    beyond long sequences may have more tokens than the model has positions, where it computes these
    Errors: nothing of this name, a model that cannot be built or run, names that fit nothing, more tokens than
    positions (ConfigError).
    """
    quantize = None if chosen is None else chosen.quantize
    if quantize is None and (freeze or (lora is not None and lora.rank is not None)):
        quantize = stored_format(Path(path))
    settings = Config(
        model=replace(chosen or Model(), path=path, init="random", linear=None, quantize=quantize),
        lora=lora or Lora(),
        freeze=freeze,
    )
    model = open_trained(settings).module
    positions = config_number(model, "max_position_embeddings")
    length = min(MOST, positions or MOST) if length is None else length
    more = positions is not None and length > positions
    if more and not (beyond and length >= LONG and _computes_positions(model)):
        raise ConfigError(
            f"{path}: sequences of {length:,} tokens are more than the model's {positions:,} positions: pass --seq "
            f"{positions} or less (data.length in a file)."
        )
    kernels, device = (ALL, "cuda") if forward.on_card else ((), "cpu")
    spec = trace(model, length, path, packed, kernels, device if forward.autocast else None, forward.patches)
    return replace(spec, provenance=f"{spec.provenance}, beyond its {positions:,} positions") if more else spec


def _computes_positions(model: nn.Module) -> bool:
    """Return whether a model turns queries and keys by their positions, and has no table of them."""
    return any(name.rpartition(".")[2].startswith("rotary") for name, _ in model.named_modules())


# --- tensor parallelism -------------------------------------------------------------------------


def _meetings(model: nn.Module, part_names: PartNames) -> list[tuple[bool, SharedGroups | None]]:
    """Return, for every block, whether tp ranks meet once in it, and what they may share of a Mamba2 mixer.

    Known of models with mixers alone: blocks of others have attention and an MLP.
    """
    if not mixing_files(model):
        return [NO_MIXER] * len(part_names.blocks)
    try:
        styles = read_styles(model)
    except ConfigError:
        return [NO_MIXER] * len(part_names.blocks)
    meetings = []
    for block in part_names.blocks:
        inside = {name: style for name, style in styles.items() if name.startswith(block + ".")}
        leaves = {name.rpartition(".")[0] for name, style in inside.items() if style.kind in ROWWISE}
        grouped = [
            shared_groups(model.get_submodule(name), style.blocks)
            for name, style in inside.items()
            if style.kind == "own_groups"
        ]
        meetings.append((len(leaves) == 1, grouped[0] if grouped else None))
    return meetings


def _mixed(part: Part, found: Figures, over: Figures) -> dict[str, Any]:
    """Return a block's convolutions and scans, and whether tp divides them. over: its figures at a degree of tp."""
    groups = 0 if part.groups is None else part.groups.total
    grouped = 0 if part.groups is None else 2 * part.groups.total * part.groups.states
    convolutions = (
        replace(each, divided=there.channels < each.channels, groups=groups, grouped=grouped)
        for each, there in zip(found.convolutions, over.convolutions, strict=True)
    )
    scans = (
        replace(each, divided=there.heads < each.heads) for each, there in zip(found.scans, over.scans, strict=True)
    )
    return {"convolutions": tuple(convolutions), "scans": tuple(scans)}


def _cuts(model: nn.Module, part_names: PartNames) -> dict[str, Cut]:
    """Return how tp would cut each parameter, by name: read off one block of each kind."""
    reduced = reduce_model(model, part_names)
    by_parameter = find_cuts(reduced.module)
    named = model.named_parameters(remove_duplicate=False)
    cuts = {name: by_parameter[p] for name, p in named if p in by_parameter}
    for block, kind in zip(part_names.blocks, kinds_of(model, part_names), strict=True):
        alike = reduced.ran[kind]
        for name, _ in model.get_submodule(block).named_parameters():
            if f"{alike}.{name}" in cuts:
                cuts[f"{block}.{name}"] = cuts[f"{alike}.{name}"]
    return cuts


def _figures(
    model: nn.Module, part_names: PartNames, length: int, spec: ModelSpec, measured: Callable[..., dict[Any, Figures]]
) -> list[tuple[int, dict[Any, Figures]]]:
    """Return (tp, figures by part) of tp = 1 and of the two smallest degrees that divide the model, if any do."""
    try:
        by_degree = [(1, measured(model, part_names, length, 1))]
    except Exception as error:  # any error of the model's own, told with its text
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"{spec.name} cannot run without data: {type(error).__name__}: {first_line}") from error
    weights = [weight for part in spec.parts for unit in part.units for weight in unit.weights]
    sizes = {weight.shape[weight.cut] // weight.blocks for weight in weights if weight.cut is not None}
    for tp in DEGREES if sizes else ():
        if len(by_degree) < 3 and not any(size % tp for size in (*sizes, spec.heads, spec.kv_heads)):
            with suppress(RuntimeError):  # kernels refuse slices that are too thin
                by_degree.append((tp, measured(model, part_names, length, tp)))
    return by_degree


def _fused(model: nn.Module, part_names: PartNames, length: int, run_as: RunAs) -> dict[Any, Figures]:
    """Return figures of tp = 1 with kernels that do all of a mixer, by part; none where a run would have none of them.

    Packed rows do without, and so do experts that tokens are sent to: those figures are of mixers in pieces.
    """
    if run_as.packed or not runs_fused(model, run_as.kernels):
        return {}
    return measure(model, part_names, length, 1, run_as=run_as._replace(fused=True))


def _operations(part: Any, figures: list[tuple[int, dict[Any, Figures]]], length: int) -> Operations:
    """Return a part's operations and bytes per token, with figures of their own for tp > 1."""
    by_degree = [(tp, by_part[part]) for tp, by_part in figures]
    alone = _solved(by_degree[0], None, length)
    if len(by_degree) == 1:
        return alone
    over = _solved(by_degree[1], by_degree[-1] if len(by_degree) == 3 else by_degree[0], length)
    return replace(alone, kept_cut=over.kept_cut, kept_whole=_sum(alone) - over.kept_cut, over_tp=over)


def _sum(operations: Operations) -> float:
    return operations.kept_cut + operations.kept_whole


def _solved(a: tuple[int, Figures], b: tuple[int, Figures] | None, length: int) -> Operations:
    """Solve whole + cut / t for the figures of two degrees; without a second one all is whole."""
    tp, one = a
    scale = 1.0 if b is None else 1 / tp - 1 / b[0]

    def solve(x: float, y: float | None) -> tuple[float, float]:
        """Return (cut, whole) per token of bytes at the one degree and at the other."""
        cut = 0.0 if y is None else (x - y) / scale / length
        return cut, x / length - cut / tp

    other = None if b is None else b[1]
    instants, rerun = (
        _instants(tp, getattr(one, name), None if other is None else getattr(other, name), solve)
        for name in ("curve", "rerun")
    )
    most = max(instants, key=lambda at: at.cut + at.whole, default=Instant(0.0, 0.0))
    return Operations(
        tp * one.matrices / length,
        tp * one.scores / length,
        *solve(one.kept, None if other is None else other.kept),
        attention=tp * one.attention / length,
        moved=tp * one.moved / length,
        launches=one.launches,
        passed=(one.passed[0] / length, one.passed[1] / length),
        input=one.entering / length,
        transient=most.cut + most.whole,
        instants=tuple(instants),
        rerun=tuple(rerun),
    )


def _instants(
    tp: int, one: Curve, other: Curve | None, solve: Callable[[float, float | None], tuple[float, float]]
) -> list[Instant]:
    """Return the instants of a curve that may be the fullest, at any degree of tp and for few or many tokens.

    An instant that the other degree's curve does not have counts as if tp divided it.
    """
    twins = {} if other is None or tp == 1 else _twins(one, other)
    curve = []
    for i, (x, grads) in enumerate(one):
        twin = twins.get(i)
        cut, whole = (tp * solve(x, None)[1], 0.0) if twin is None else solve(x, twin)
        curve.append(Instant(cut, whole, tp * grads))
    fullest = dict.fromkeys(
        max(curve, key=lambda at: (at.cut / t + at.whole) * tokens + at.gradients / t)
        for t in ((tp, 4 * tp, 16 * tp) if twins else (tp,))
        for tokens in (1, 1024, 4096, 65536)
        if curve
    )
    return list(fullest)


def _twins(one: Curve, other: Curve) -> dict[int, float]:
    """Return, by instant of one curve, the bytes at the same one of the other: both run the same operators.

    What they let go of at once or one after the other may differ.
    """
    births, others = ([b[0] > a[0] for a, b in pairwise(((0.0, 0.0), *curve))] for curve in (one, other))
    matches = SequenceMatcher(None, births, others, autojunk=False).get_matching_blocks()
    return {match.a + i: other[match.b + i][0] for match in matches for i in range(match.size)}
