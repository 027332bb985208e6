"""A trial of a decoder's rows: whether attention alone mixes the tokens of a sequence, told without communication.

    whole    33 random hidden states through two blocks of each kind; what attention is given and gives is noted
    parts    the first and the last rows of them, each by itself; attention gives the rows that were noted

What a module computes of a part must be the rows of what it computed of the whole. A convolution over time, a
recurrence or a mean over tokens differs behind the cut, whatever it is called. Weights are random and take no memory:
each is one column, expanded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks
from zero3d.models.packing import ATTENTION
from zero3d.models.placeholders import Placeholder, first_argument

PRODUCTS = (torch.bmm, torch.matmul, Tensor.bmm, Tensor.matmul, Tensor.__matmul__)
LENGTH, CUT = 33, 18  # no part is as long as widths are
NAME = "sequence_trial"
OF_A_KIND = 2
NEAR = 1e-3  # of the largest number: rounding depends on how many rows a product has, mixing moves all of it


def mixing_layers(decoder: nn.Module) -> str | None:
    """Return the kinds of layers that mix tokens outside of attention by what they are; None where none is told."""
    text = decoder.config.get_text_config()  # type: ignore[union-attr, operator]
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - set(ATTENTION))
    convolves = any(isinstance(module, nn.Conv1d) for module in decoder.modules())
    return ", ".join(odd) or ("convolutions" if convolves else None)


def mixing_module(decoder: Any) -> str | None:
    """Return the name of the first module that mixes tokens outside of attention; None where none does.

    Inside a dry run, whose tensors have no values to compare, it is None of any: try the decoder before. Raises
    ConfigError where the decoder cannot be tried.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if isinstance(torch.empty(0), FakeTensor):
        return None
    config, seen = decoder.config, _Seen()
    own, functions = config._attn_implementation, ALL_ATTENTION_FUNCTIONS._global_mapping
    generator = torch.Generator().manual_seed(0)
    width = getattr(config.get_text_config(), "hidden_size", None)
    if width is None:
        raise ConfigError(
            "mesh.sp tries whether attention alone mixes the tokens of a sequence, and needs a width for that: "
            f"{type(config).__name__} has no hidden_size. Type mesh.sp=1."
        )
    device = next((buffer.device for buffer in decoder.buffers() if not buffer.is_meta), torch.device("cpu"))
    hidden = torch.randn(1, LENGTH, width, generator=generator).to(device)
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(_few_blocks(decoder))
        state = {name: _random(p, generator, device) for name, p in decoder.named_parameters()}
        stack.enter_context(_watched(decoder, seen))
        functions[NAME] = seen.attend
        stack.callback(functions.pop, NAME)
        config._attn_implementation = NAME
        stack.callback(setattr, config, "_attn_implementation", own)
        if (experts := getattr(config, "_experts_implementation", None)) is not None:
            config._experts_implementation = "eager"  # the usual one takes no expanded weights
            stack.callback(setattr, config, "_experts_implementation", experts)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # of blocks that are compiled
        stack.enter_context(_ByColumns())
        try:
            for rows in (range(LENGTH), range(CUT), range(CUT, LENGTH)):
                seen.begin(rows)
                part = {"inputs_embeds": hidden[:, rows.start : rows.stop], "use_cache": False}
                positions = torch.arange(rows.start, rows.stop, device=device)[None]
                functional_call(decoder, state, (), part | {"position_ids": positions})
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"mesh.sp tries whether attention alone mixes the tokens of a sequence, and {type(decoder).__name__} "
                f"cannot be tried on {LENGTH} random hidden states: {type(error).__name__}: {error}. Type mesh.sp=1."
            ) from error
    return seen.mixing


class _ByColumns(TorchFunctionMode):
    """Multiplies by weights that are expanded columns without making the matrices: of large ones that takes long."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) > 1 and args[1].dim() == 2 and args[1].stride(1) == 0:
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            made = args[0].sum(-1, keepdim=True) * args[1][:, 0]
            return made if bias is None else made + bias
        if func in PRODUCTS and isinstance(args[1], Tensor) and args[1].dim() == 3 and args[1].stride(1) == 0:
            return args[0].sum(-1, keepdim=True) * args[1][:, :1]  # of experts, stacked
        return func(*args, **(kwargs or {}))


class _Seen:
    """Compares what modules make of parts with the rows of what they made of the whole, in the order of their calls."""

    def __init__(self) -> None:
        self.mixing: str | None = None
        self._rows = range(0)
        self._whole: dict[tuple[str, int], Tensor] = {}
        self._calls: Counter[str] = Counter()

    def begin(self, rows: range) -> None:
        """Begin a forward of these rows; the first is of all."""
        self._rows = rows
        self._calls.clear()

    def note(self, name: str, made: Any, dim: int = 1) -> None:
        """Note or compare a tensor [1, ..] whose dimension `dim` are rows; leave any other."""
        rows = self._rows
        if isinstance(made, tuple):
            made = made[0] if made else None
        if not isinstance(made, Tensor) or made.dim() < 3 or len(made) != 1 or made.shape[dim] != len(rows):
            return  # such as tokens by expert
        key = name, self._calls[name]
        self._calls[name] += 1
        if len(rows) == LENGTH:
            self._whole[key] = made
        elif self.mixing is None and (key not in self._whole or not _near(made, self._of_rows(key, dim))):
            self.mixing = name

    def _of_rows(self, key: tuple[str, int], dim: int) -> Tensor:
        return self._whole[key].narrow(dim, self._rows.start, len(self._rows))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Attend over the whole, causally; of a part return the rows of that."""
        name = f"the attention of {type(module).__name__}"
        for what, given in (("queries", query), ("keys", key), ("values", value)):
            self.note(f"what makes {what} for {name}", given, 2)
        call = "attended", self._calls["attended"]
        self._calls["attended"] += 1
        if len(self._rows) < LENGTH:
            return self._of_rows(call, 1), None
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        made = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous()
        self._whole[call] = made
        return made, None


def _near(made: Tensor, wanted: Tensor) -> bool:
    most = float(wanted.abs().max())
    return bool((made - wanted).abs().max() <= NEAR * max(most, 1e-6))


def _random(p: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return random values in the place of a parameter: its first dimension's, expanded over the others."""
    first = torch.randn(p.shape[:1] + (1,) * (p.dim() - 1), generator=generator).to(device)
    return (first / max(1, p[:1].numel()) ** 0.5).expand(p.shape) if p.dim() > 1 else first


@contextmanager
def _watched(decoder: nn.Module, seen: _Seen) -> Iterator[None]:
    """Have the modules of the decoder note what they make inside, in evaluation mode."""
    modes = {module: module.training for module in decoder.modules()}
    decoder.eval()
    hooks = [
        module.register_forward_hook(partial(_note, seen, name))
        for name, module in decoder.named_modules()
        if name and not isinstance(module, Placeholder)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode


def _note(seen: _Seen, name: str, _: nn.Module, __: Any, made: Any) -> None:
    seen.note(name, made)


class _Passed(Placeholder):
    """Stands for a block that is like others: returns its hidden state in their form."""

    def __init__(self, block: nn.Module, form: Mapping[str, bool]) -> None:
        super().__init__(block)
        self._form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = first_argument(args, kwargs)
        return (hidden,) if self._form["tuple"] else hidden


@contextmanager
def _few_blocks(decoder: nn.Module) -> Iterator[None]:
    """Leave two blocks of each kind in the decoder, inside; others hand their hidden state on."""
    form, kinds = {"tuple": False}, Counter[str]()
    config: Any = decoder.config
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    left: list[tuple[nn.Module, str, nn.Module]] = []

    def learn(block: nn.Module, args: Any, made: Any) -> None:
        form["tuple"] = isinstance(made, tuple)

    hook: Any = None
    for index, (name, block) in enumerate(find_blocks(decoder).items()):
        kind = f"{types[index] if index < len(types) else ''} {block!r}"
        kinds[kind] += 1
        hook = hook or block.register_forward_hook(learn)
        if kinds[kind] > OF_A_KIND:
            parent, _, key = name.rpartition(".")
            holder = decoder.get_submodule(parent)
            left.append((holder, key, block))
            holder._modules[key] = _Passed(block, form)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for holder, key, block in left:
            holder._modules[key] = block
