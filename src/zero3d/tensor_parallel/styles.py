"""What each style does to a module: which parameters it cuts, and which hooks it gets.

    x --copy_to--> [ colwise ] --a rank's own outputs--> ... --its own inputs--> [ rowwise ] --reduce_from--> + bias

Cuts are collected by parameter, tied ones once; `apply_cuts` (parallelize.py) then replaces them all. Of a LoRA pair
around a colwise matrix A is common and B is cut as the matrix is; around a rowwise one A is cut and B is
common. What is common between two cut things gets partial gradients.

Under sequence parallelism (`sequence.py`) the module around colwise and rowwise matrices takes in the
whole sequence, since attention asks its input for the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from zero3d.errors import ConfigError
from zero3d.models.quantised import QuantisedLinear
from zero3d.models.quantised_experts import stacks_of
from zero3d.nested import map_tensors
from zero3d.shards.cuts import Cut
from zero3d.spec.formats import DoubleFormat, Format
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.heads import slice_heads
from zero3d.tensor_parallel.mixers import take_groups
from zero3d.tensor_parallel.plan import Style
from zero3d.tensor_parallel.regions import Conversion, Regions, convert
from zero3d.tensor_parallel.vocabulary import Head, LocalEmbedding

WHOLE = Style("colwise")  # of one block


@dataclass
class StyleContext:
    """What the styles of one model share, and what they have decided.

    blocks    names of the blocks that hold cut modules
    sequence  whether sequence parallelism is on
    cuts      by parameter
    handled   modules whose forward knows that their parameters are cut
    partial   parameters that all ranks have and whose gradients are terms of a sum over tp
    colwise   names of modules whose outputs are cut, rowwise: whose inputs are
    """

    model: nn.Module
    regions: Regions
    blocks: frozenset[str]
    sequence: bool
    cuts: dict[nn.Parameter, Cut] = field(default_factory=dict)
    handled: set[nn.Module] = field(default_factory=set)
    partial: set[nn.Parameter] = field(default_factory=set)
    colwise: list[str] = field(default_factory=list)
    rowwise: list[str] = field(default_factory=list)

    def cut(self, name: str, p: nn.Parameter, dim: int, style: Style = WHOLE) -> None:
        """Note a cut. Raises ConfigError where two styles disagree or the size does not divide."""
        channel = self.regions.channel
        made = Cut(dim % p.dim(), channel.size, channel.rank, style.blocks, segments=style.sizes)
        if self.cuts.setdefault(p, made) != made:
            raise ConfigError(f"{name}: two tensor-parallel styles cut one tied parameter in two ways.")
        try:
            made.local_shape(tuple(p.shape))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    def parts(self, style: Style) -> int:
        """Return into how many equal parts a style divides what it cuts, all ranks' together."""
        return self.regions.channel.size * Cut(0, 1, 0, style.blocks, segments=style.sizes).even_blocks

    def refuse_sequence(self, name: str, style: Style) -> None:
        """Refuse a style inside blocks under sequence parallelism: a rank has a slice there. Raises ConfigError."""
        if self.sequence and any(name.startswith(block + ".") for block in self.blocks):
            raise ConfigError(
                f"{name}: style {style.kind!r} does not go with sequence_parallel=True inside blocks: leave it out."
            )

    def copies_input(self, name: str) -> bool:
        """Return whether this module copies its input in, not the module around it (which does under sequence)."""
        return not self.sequence or name.rpartition(".")[0] in self.blocks


def apply_style(context: StyleContext, name: str, style: Style, head: Head) -> None:
    """Apply one entry of a plan. `head` gathers the outputs of colwise_gather_output where it is the model's head."""
    if style.kind == "divided":
        _divide(context, name)
    elif style.kind == "replicate":
        return
    elif _is_parameter(context.model, name):
        _parameter(context, name, style)
    else:
        APPLY[style.kind](context, name, context.model.get_submodule(name), style, head)


def _colwise(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    base, adapters = _matrix(name, module)
    _cut_matrix(context, name, base, 0, style)
    if base.bias is not None:
        context.cut(f"{name}.bias", base.bias, 0, style)
    for a, b in adapters:
        context.partial.update(a.parameters())
        for local, p in b.named_parameters():
            context.cut(f"{name}.{local}", p, 0, style)
        context.handled.add(b)
    context.handled.add(base)
    whole = style.kind == "colwise_gather_output"
    if whole:
        context.refuse_sequence(name, style)
        module.register_forward_hook(head.finish)
    else:
        context.colwise.append(name)
    if whole or context.copies_input(name):
        copy = Converted(context.regions.copy_to, name, whole)
        module.register_forward_pre_hook(partial(_convert_first, copy), with_kwargs=True)


def _cut_matrix(context: StyleContext, name: str, base: Any, dim: int, style: Style) -> None:
    """Cut the outputs (0) or the inputs (1) of a matrix."""
    if isinstance(base, QuantisedLinear):
        _check_groups(name, base.codec.format, base.full, dim, context.parts(style))
        context.cut(f"{name}.packed", base.packed, dim, style)
    else:
        context.cut(f"{name}.weight", base.weight, 1 - dim if is_conv(base) else dim, style)


def _depthwise(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    plain = isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels
    if not isinstance(module, nn.Conv1d) or not plain:
        raise ConfigError(
            f"{name}: style {style.kind!r} is for an nn.Conv1d with as many groups as channels, and this is "
            f"{_kind(module)}."
        )
    for local, p in module.named_parameters():
        context.cut(f"{name}.{local}", p, 0, style)
    context.handled.add(module)
    channels = module.groups // context.regions.channel.size
    module.in_channels = module.out_channels = module.groups = channels


def _check_groups(name: str, form: Format | DoubleFormat, shape: tuple[int, int], dim: int, parts: int) -> None:
    """Refuse to cut rows (0) or columns (1) of a matrix into parts that would go through groups. Raises ConfigError."""
    what, unit = ("rows", "columns")[dim], form.cut_unit(shape, dim)
    if unit is None:
        raise ConfigError(
            f"{name}: tp cannot cut the {what} of a matrix {shape} in {form.name}, whose scales are of "
            f"{form.scales_of}: type mesh.tp=1, another model.quantize, or 'none' for it in the tensor-parallel plan."
        )
    if shape[dim] % (unit * parts):
        raise ConfigError(
            f"{name}: tp cannot cut {shape[dim]} {what} of a matrix in {form.name} into {parts} parts at borders of "
            f"its groups of {unit}: {shape[dim]} / {parts} must be a multiple of {unit}. Type a smaller mesh.tp, or "
            "'none' for it in the tensor-parallel plan."
        )


def _rowwise(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    base, adapters = _matrix(name, module)
    _cut_matrix(context, name, base, 1, style)
    for a, b in adapters:
        for local, p in a.named_parameters():
            context.cut(f"{name}.{local}", p, 1, style)
        if any(p.dim() == 1 for p in b.parameters()):
            raise ConfigError(f"{name}: a LoRA bias would be added once per tp rank: pass lora_bias=False.")
        context.partial.update(b.parameters())
        context.handled.add(a)
    context.handled.add(base)
    if style.kind == "rowwise_split_input":
        context.refuse_sequence(name, style)
        scatter = Converted(_slice_of_last, context.regions.channel, name)
        module.register_forward_pre_hook(partial(_convert_first, scatter), with_kwargs=True)
    else:
        context.rowwise.append(name)
    if base.bias is not None:
        base.forward = Unbiased(base)
    module.register_forward_hook(partial(_reduce_output, Converted(context.regions.reduce_from, name), base))


def _embedding(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    table: Any = module
    if any(isinstance(m, nn.Embedding) for m in module.modules() if m is not module):
        raise ConfigError(
            f"{name}: an embedding with LoRA (target_modules) or a copy of it (modules_to_save) is not cut over tp: "
            f"leave {name.rpartition('.')[2]} out of these, or keep it whole with {name!r}: 'replicate' in the "
            "tensor-parallel plan, and a head that is tied to it, too."
        )
    if not isinstance(module, nn.Embedding):
        raise ConfigError(f"{name}: style {style.kind!r} is for an nn.Embedding, and this is {_kind(module)}.")
    context.cut(f"{name}.weight", table.weight, 0)
    context.handled.add(module)
    table.forward = LocalEmbedding(module, context.regions, name)


def _partial(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    context.partial.update(module.parameters())


def _experts(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    copy = Converted(context.regions.copy_to, name, True)

    def copy_in(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def copied(t: Tensor) -> Tensor:
            return copy(t) if t.is_floating_point() else t

        return map_tensors(args, copied), map_tensors(kwargs, copied)

    module.register_forward_pre_hook(copy_in, with_kwargs=True)
    _all_reduce(context, name, module, style, head)
    context.handled.add(module)


def _latent(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    """Copy in the rotary part of keys, which goes to every rank's own heads, behind a whole first projection.

    Its other output, the latent, goes into a colwise matrix, which copies it in itself.
    """
    context.refuse_sequence(name, style)
    rotary = context.model.get_submodule(name.rpartition(".")[0]).qk_rope_head_dim
    assert isinstance(rotary, int), "of the attention around it"
    if not rotary:  # GLM-5.3 tells positions by recurrences alone
        return
    copy = Converted(context.regions.copy_to, name, True)

    def copy_in(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        latent, keys = output[..., :-rotary], output[..., -rotary:]
        return torch.cat([latent, copy(keys)], -1)

    module.register_forward_hook(copy_in)


def _heads(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    module.register_forward_pre_hook(partial(slice_heads, context.regions.channel, style.blocks), with_kwargs=True)


def _groups(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    take_groups(context.regions, name, module, style.blocks)


def _all_reduce(context: StyleContext, name: str, module: nn.Module, style: Style, head: Head) -> None:
    module.register_forward_hook(partial(_reduce_output, Converted(context.regions.reduce_from, name), None))


APPLY: Mapping[str, Callable[[StyleContext, str, nn.Module, Style, Head], None]] = {
    "colwise": _colwise,
    "packed_colwise": _colwise,
    "depthwise": _depthwise,
    "colwise_gather_output": _colwise,
    "rowwise": _rowwise,
    "packed_rowwise": _rowwise,
    "rowwise_split_input": _rowwise,
    "embedding_rowwise": _embedding,
    "replicated_with_grad_allreduce": _partial,
    "moe_tp_experts": _experts,
    "all_reduce": _all_reduce,
    "mla_kv_a_proj": _latent,
    "own_heads": _heads,
    "own_groups": _groups,
}


def _parameter(context: StyleContext, name: str, style: Style) -> None:
    """Cut a parameter: of [experts, ., .] colwise cuts dim -2 and rowwise dim -1, of [experts, .] and [heads] the last.

    Which of an expert's dims are inputs and which outputs is the plan's business.
    """
    owner, _, local = name.rpartition(".")
    module = context.model.get_submodule(owner)
    p = module._parameters[local]
    assert p is not None
    if style.kind == "added_once":
        context.partial.add(p)
        module.forward = AddedOnce(module, local, context.regions.channel.rank)
        return
    dims = {"colwise": 0, "packed_colwise": 0, "rowwise": 1, "packed_rowwise": 1}  # of each matrix
    stack = stacks_of(module).get(local)
    vector = p.dim() == 1 or (stack is None and p.dim() > 3 and p.numel() == max(p.shape))  # [H] or [1, 1, H, 1]
    if style.kind not in dims or (stack is None and p.dim() > 3 and not vector):
        raise ConfigError(
            f"{name}: style {style.kind!r} on a parameter of shape {tuple(p.shape)}. A parameter is cut, colwise or "
            "rowwise, where it is experts' fused matrices [experts, ., .], their biases [experts, .] or a number for "
            "every head; else give its module the style."
        )
    if stack is not None:
        _check_groups(name, stack.codec.format, stack.full.shape, dims[style.kind], context.parts(style))
    inner = 1 + dims[style.kind] if stack is not None or p.dim() == 3 else -1
    context.cut(name, p, p.shape.index(max(p.shape)) if vector else inner, style)
    if vector:
        context.handled.add(module)


def _divide(context: StyleContext, name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    module, size = context.model.get_submodule(owner), context.regions.channel.size
    value = getattr(module, attribute, None)
    if not isinstance(value, int) or value % size:
        raise ConfigError(f"{name}: 'divided' is for whole numbers that tp {size} divides, and this is {value!r}.")
    setattr(module, attribute, value // size)


def _matrix(name: str, module: nn.Module) -> tuple[Any, list[tuple[nn.Module, nn.Module]]]:
    """Return the Linear or Conv1D that is cut, and PEFT's LoRA pairs (A, B) around it. Raises ConfigError."""
    base: Any = getattr(module, "base_layer", module)
    a, b = getattr(module, "lora_A", {}), getattr(module, "lora_B", {})
    plain = (isinstance(base, nn.Linear) or is_conv(base)) and base.weight.is_floating_point()
    if not plain and not isinstance(base, QuantisedLinear):
        raise ConfigError(
            f"{name} should be cut over tp and is {_kind(base)}: nn.Linear, transformers' Conv1D and PEFT's LoRA of "
            f"these can be. Take it out of the plan with {name!r}: 'none'."
        )
    if len(getattr(module, "lora_variant", {}) or {}) > 0 or (base is not module and not a):
        raise ConfigError(
            f"{name}: of PEFT's methods plain LoRA can be cut over tp, not {_kind(module)} with variants."
        )
    return base, [(a[key], b[key]) for key in a]


def is_conv(module: nn.Module) -> bool:
    """Return whether this is transformers' Conv1D: a linear layer with its weight transposed, [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_parameter(model: nn.Module, name: str) -> bool:
    owner, _, local = name.rpartition(".")
    return local in model.get_submodule(owner)._parameters


def _kind(module: nn.Module) -> str:
    return f"a {type(module).__name__}"


class Unbiased:
    """The forward of a matrix without its bias, which must be added once, to the sum over ranks."""

    def __init__(self, module: Any) -> None:
        self._module, self._conv = module, is_conv(module)

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self._module, QuantisedLinear):
            return self._module.product(x, None)
        weight: Tensor = self._module.weight
        return x @ weight if self._conv else F.linear(x, weight)


class AddedOnce:
    """The forward of a module one of whose parameters is added to outputs that will be summed: rank 0 adds it."""

    def __init__(self, module: nn.Module, name: str, rank: int) -> None:
        self._forward = module.forward
        self._module = module
        self._name = name
        self._factor = float(rank == 0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters: Any = self._module._parameters
        whole = parameters[self._name]
        parameters[self._name] = whole * self._factor
        try:
            return self._forward(*args, **kwargs)
        finally:
            parameters[self._name] = whole


# --- hooks ------------------------------------------------------------------------------------------


class Converted:
    """Converts tensors for a module, whose name it hands on.

    torch.compile guards no more of it than its type. A name it would guard by value: one graph for each block.
    """

    def __init__(self, convert: Callable[..., Tensor], *given: Any) -> None:
        self._convert, self._given = convert, given

    @_disable_dynamo
    def __call__(self, t: Tensor) -> Tensor:
        return self._convert(t, *self._given)


def _slice_of_last(t: Tensor, channel: Channel, name: str) -> Tensor:
    return convert(t, Conversion("scatter_to", -1, name, channel))


def _convert_first(converted: Converted, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return change_first(args, kwargs, converted)


def _reduce_output(converted: Converted, base: Any, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    out = converted(output)
    return out if base is None or base.bias is None else out + base.bias


def change_first(args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """Return a module's arguments with its hidden state changed: that of this name, else the first."""
    if "hidden_states" in kwargs or not args:
        key = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, key: change(kwargs[key])}
    return (change(args[0]), *args[1:]), kwargs
