"""Cut a model over the tp axis: every rank computes with its part of every matrix, and activations are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.models.bases import layer_numbers, model_of
from zero3d.models.packing import inner_model
from zero3d.models.places import HEADS, check_heads, check_rows
from zero3d.models.quantised import PACKED, QuantisedLinear
from zero3d.models.quantised_experts import stacks_of
from zero3d.shards.cuts import Cut
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.heads import check_alibi
from zero3d.tensor_parallel.plan import Style, read_plan
from zero3d.tensor_parallel.planned_regions import UncutModel, find_regions, warn_across_hosts
from zero3d.tensor_parallel.regions import Regions
from zero3d.tensor_parallel.sequence import cut_blocks, install_random, install_sequence
from zero3d.tensor_parallel.shipped import CUTS, cuts_attention
from zero3d.tensor_parallel.styles import StyleContext, apply_style, is_conv
from zero3d.tensor_parallel.traffic import Region
from zero3d.tensor_parallel.vocabulary import Head, has_causal_loss

__all__ = ["Sharded", "parallelize", "read_styles", "warn_across_hosts"]


class Sharded(NamedTuple):
    """What the tp axis did to a model.

    cuts     how parameters are cut, by name
    partial  names of those whose gradients are terms of a sum over tp
    regions  what it sends for each micro-batch, for `traffic.tensor_traffic`
    """

    cuts: Mapping[str, Cut]
    partial: frozenset[str]
    regions: Sequence[Region] = ()


def parallelize(
    model: nn.Module,
    axis: Axis,
    ledger: Ledger,
    plan: Mapping[str, str] | None = None,
    sequence: bool = False,
    local_logits: bool = True,
    parts: bool = False,
) -> Sharded:
    """Cut a model's parameters over the tp axis and make its modules communicate, in place.

    model         real parameters (rank 0's values win, one broadcast each) or meta ones; whole, or a model chunk
    plan          styles by name pattern, over those of the model's own plan (`plan.py`)
    sequence      between cut modules activations are slices of the sequence
    local_logits  a forward that is given labels returns logits [.., V/N]; else logits are always [.., V]
    parts         inputs of recomputed modules are kept in parts: `regions` count how they are gathered
    Gradients of parameters in `partial` must be summed over tp, once per step, by the caller.
    Errors: no plan, a style or name that is not known, sizes that tp does not divide (ConfigError).
    """
    if axis.size == 1:
        return Sharded({}, frozenset())
    inner: Any = inner_model(model_of(model))
    styles = read_styles(model, plan)
    config = inner.config.get_text_config() if hasattr(inner, "config") else None
    check_config(config, styles, axis.size)
    check_vocabulary(model, styles, axis.size)
    check_alibi(model, styles)
    check_sparse(model, styles)
    check_stacked(model)
    blocks = frozenset(cut_blocks(model, list(styles)))
    head_name = _head_name(model, inner) if local_logits and has_causal_loss(inner) else None
    context = StyleContext(model, Regions(Channel(axis, ledger), sequence), blocks, sequence)
    for name, style in styles.items():
        head = Head(context.regions, name)
        if name == head_name:
            head.install_loss(inner)
        apply_style(context, name, style, head)
    cut_per_head(context, styles, config)
    install_random(context, config)
    if sequence:
        install_sequence(context)
    regions = find_regions(UncutModel(model, styles, config, sequence, head_name, parts), axis.size)
    apply_cuts(context)
    model.register_forward_hook(lambda *_: context.regions.forget())
    names = dict(model.named_parameters())
    cuts = {name: context.cuts[p] for name, p in names.items() if p in context.cuts}
    partial = frozenset(name for name, p in names.items() if p in context.partial and name not in cuts)
    return Sharded(cuts, partial, regions)


def check_config(config: Any, styles: Mapping[str, Style], size: int) -> None:
    """Refuse to cut a head in two, which shapes do not tell. Raises ConfigError."""
    attention = cuts_attention({name: style.kind for name, style in styles.items()})
    for key in HEADS if attention else ():
        for heads in layer_numbers(config, key):
            check_heads(key, heads, size)


def cut_per_head(context: StyleContext, styles: Mapping[str, Style], config: Any) -> None:
    """Cut parameters that an attention has for every head and that no style names: of norms, [heads, width].

    Raises ConfigError for what has an entry or a module for every head in another form: ranks have some heads each.
    """
    counts = {heads for key in HEADS for heads in layer_numbers(config, key)}
    around = dict.fromkeys(name.rpartition(".")[0] for name in context.colwise)
    for owner in (name for name in around if "attn" in name or "attention" in name):
        attention = context.model.get_submodule(owner)
        for name, module in attention.named_modules(prefix=owner):
            if any(name == styled or name.startswith(f"{styled}.") for styled in styles):
                continue
            if isinstance(module, nn.ModuleList) and len(module) in counts and any(True for _ in module.parameters()):
                _refuse_per_head(name, f"a module for each of {len(module)} heads", owner)
            for local, p in module.named_parameters(recurse=False):
                full = f"{name}.{local}"
                if full in styles or p in context.cuts or p in context.partial or p.shape[:1].numel() not in counts:
                    continue
                if p.dim() == 1 and module is attention:
                    _refuse_per_head(full, f"an entry for each of {len(p)} heads", owner)
                if p.dim() == 2 and not isinstance(module, nn.Linear | nn.Embedding) and not is_conv(module):
                    context.cut(full, p, 0)
                    context.handled.add(module)


def _refuse_per_head(name: str, what: str, owner: str) -> NoReturn:
    raise ConfigError(
        f"{name} has {what}, {owner} is cut over tp by heads, and no style says which of them a rank has: give the "
        f"matrices of {owner} colwise_gather_output and rowwise_split_input in the tensor-parallel plan, so that "
        f"attention is whole between them, or give {name} a style (colwise cuts entries, replicate keeps all)."
    )


def check_sparse(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Refuse to cut an MLP that takes mean and deviation of all its gates, to keep the largest. Raises ConfigError."""
    for name, style in styles.items():
        around = name.rpartition(".")[0]
        if style.kind in CUTS and getattr(model.get_submodule(around), "activation_sparsity", 0.0) > 0:
            raise ConfigError(
                f"{around} uses the mean and deviation of all its gates (activation_sparsity), but {name} with style "
                f"{style.kind!r} leaves each rank only some: give its matrices colwise_gather_output and "
                "rowwise_split_input, or 'none'."
            )


def check_stacked(model: nn.Module) -> None:
    """Refuse PEFT's adapters of stacked experts: they add to whole matrices, and ranks have parts. ConfigError."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "parameter_name"):
            raise ConfigError(
                f"{name} has LoRA on stacked experts, whose adapters add to the whole of {module.parameter_name}, but "
                "with tp each rank has only a part of it: leave it out of lora.targets (PEFT's target_parameters), "
                "or use mesh.tp=1."
            )


def check_vocabulary(model: nn.Module, styles: Mapping[str, Style], size: int) -> None:
    """Refuse to cut a token embedding whose rows the ranks cannot share evenly. Raises ConfigError."""
    for name, style in styles.items():
        table = model.get_submodule(name) if style.kind == "embedding_rowwise" else None
        rows = table.num_embeddings if isinstance(table, nn.Embedding) else 0
        check_rows(f"{name}'s {rows} tokens", rows, size)


def read_styles(model: nn.Module, plan: Mapping[str, str] | None = None) -> dict[str, Style]:
    """Return styles by name. Token embedding and head are cut unless the plan says otherwise. Raises ConfigError."""
    return read_plan(model, plan, _vocabulary(model, inner_model(model_of(model))))


def _vocabulary(model: nn.Module, inner: Any) -> dict[str, Style]:
    """Return the styles of embedding and head; none where a third module has a parameter of theirs, as in BERT."""
    styles = {}
    names = {module: name for name, module in model.named_modules()}
    for getter, style, kind in (
        ("get_input_embeddings", "embedding_rowwise", nn.Embedding),
        ("get_output_embeddings", "colwise_gather_output", nn.Linear),
    ):
        module = getattr(inner, getter)() if hasattr(inner, getter) else None
        if isinstance(module, kind) and module in names:
            styles[names[module]] = Style(style)
    parameters = {p for name in styles for p in model.get_submodule(name).parameters()}
    rest = (m for name, m in model.named_modules() if name not in styles)
    return {} if any(p in parameters for m in rest for p in m.parameters(recurse=False)) else styles


def _head_name(model: nn.Module, inner: Any) -> str | None:
    module = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    return next((name for name, m in model.named_modules() if m is module), None) if module is not None else None


def apply_cuts(context: StyleContext) -> None:
    """Replace every cut parameter by this rank's part, wherever it is; values are rank 0's.

    Raises ConfigError where a module holds a cut parameter and no style is about that module.
    """
    owners = [(name, m, key, p) for name, m in context.model.named_modules() for key, p in m._parameters.items()]
    for name, module, key, p in owners:
        if p in context.cuts and module not in context.handled:
            raise ConfigError(
                f"{name}.{key} is tied to a parameter that is cut over tp, or its experts have no style: give {name} "
                "a style in the tensor-parallel plan (colwise_gather_output for a head, moe_tp_experts for experts), "
                "or 'replicate' to what it is tied to."
            )
    for t in (*context.model.parameters(), *context.model.buffers()):
        if not t.is_meta:
            context.regions.channel.broadcast(t.data, "initial")
    local = {p: _local(p, cut) for p, cut in context.cuts.items()}
    for _, module, key, p in owners:
        if p in local:
            module._parameters[key] = local[p]
            _resize(module, local[p] if key == "weight" else None)
            _take_part(module, key, context.cuts[p])
    context.cuts = {local[p]: cut for p, cut in context.cuts.items()}


def _take_part(module: nn.Module, key: str, cut: Cut) -> None:
    """Tell a module that decodes a parameter which part of it this rank has."""
    stacks = stacks_of(module)
    if isinstance(module, QuantisedLinear) and key == PACKED:
        module.take_part(cut.dim, cut.size)
    elif key in stacks:
        stacks[key] = stacks[key].part(cut.dim - 1, cut.size)


def _local(p: nn.Parameter, cut: Cut) -> nn.Parameter:
    part = nn.Parameter(cut.extract(p), requires_grad=p.requires_grad)
    part.__dict__.update(p.__dict__)  # transformers marks what it has initialised
    return part


def _resize(module: nn.Module, weight: Tensor | None) -> None:
    """Set a module's numbers of inputs and outputs to those of its weight: Conv1D's forward reads its."""
    if weight is None or weight.dim() != 2:
        return
    sizes = ("nx", "nf") if is_conv(module) else ("out_features", "in_features")
    for attribute, size in zip(sizes, weight.shape, strict=True):
        if hasattr(module, attribute):
            setattr(module, attribute, size)
    if isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]
