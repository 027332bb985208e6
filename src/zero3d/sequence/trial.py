"""A trial of a decoder's rows, without communication: whether what mixes the tokens of a sequence is what sp can cut.

    whole    33 random hidden states through two blocks of each kind; what attention is given and gives is noted
    parts    the first and the last rows of them, each by itself; attention gives the rows that were noted

So do the functions of convolutions and recurrences that sp knows (mixers.py). What a module computes of a part must be
the rows of what it computed of the whole. Any other convolution over time, a recurrence or a mean over tokens differs
behind the cut, whatever it is called. Then the same of a backward: it begins
with random gradients of what the decoder returns and of what attention is given, ends at what attention gives, and the
gradient of what a module is given (dX) of a part must be the rows of that of the whole. Weights are random and take no
memory: each is one column, expanded. What an embedding looks up is made of the index, and differs along the row.

Then which positions it takes where it is given none (`positions.py`): sequences with padding on the left, and with the
padding token amid others, go through it without positions, and with those of each rule.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks
from zero3d.models.mixing import BY_MODULE, CONVOLUTION, SCANS, Call, mixers, replace_functions
from zero3d.models.packed_documents import Inside, Told, during
from zero3d.models.packing import ATTENTION
from zero3d.models.placeholders import PassedBlock, Placeholder
from zero3d.sequence.mixers import SharedScan
from zero3d.sequence.positions import RULES, Positions
from zero3d.sequence.shares import POINTWISE, Scanned
from zero3d.spec.mesh import PREFIX

_Call = tuple[str, int]
PRODUCTS = (torch.bmm, torch.matmul, Tensor.bmm, Tensor.matmul, Tensor.__matmul__)
LENGTH, CUT = 33, 18  # no part is as long as widths are
SHORT, PADDED = 9, 3  # of sequences from which positions are told
WAVE = 0.37
NAME = "sequence_trial"
BIAS = "position_bias"  # option of attention functions: a number for each query and key
_ONE_TRIAL = Lock()  # has that name: ranks may be threads of one process
OF_A_KIND = 2
PAIRS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")  # functions that also return a state
NEAR = 1e-3  # of the largest number: rounding depends on how many rows a product has, mixing moves all of it
ALIKE = 1e-5  # of the largest number: the same positions give the same numbers
LEAST = 1e-2  # of the largest gradient of all: those in front of a norm of queries are nothing but rounding


def mixing_layers(decoder: nn.Module) -> str | None:
    """Return what layers mix tokens, by what they are, in a way that sp does not know, and the name of the first one.

    None where none is told.
    """
    text = decoder.config.get_text_config()  # type: ignore[union-attr, operator]
    known = [name for name, module in mixers(decoder).items() if type(module).__name__ not in BY_MODULE]
    types = getattr(text, "layer_types", None) or ()
    odd = sorted(set(types) - set(ATTENTION) - (set(POINTWISE) if known else set()))
    convolutions = (name for name, module in decoder.named_modules() if isinstance(module, nn.Conv1d))
    inside = tuple(f"{each}." for each in known)
    if (convolution := next((name for name in convolutions if not name.startswith(inside)), None)) is not None:
        return f"{', '.join(odd) or 'convolutions'} ({convolution.rpartition('.')[0] or convolution})"
    for name, kind in zip(find_blocks(decoder), types, strict=False):
        if kind in odd and not any(each.startswith(f"{name}.") for each in known):
            return f"{', '.join(odd)} ({name})"
    if odd and not known:
        return f"{', '.join(odd)} (no block)"
    own = next((name for name, module in decoder.named_modules() if _attends_by_itself(type(module))), None)
    return None if own is None else f"attention of its own, which transformers does not register ({own})"


def _attends_by_itself(kind: type) -> bool:
    """Return whether an attention of transformers is computed by its own code and not by `ALL_ATTENTION_FUNCTIONS`."""
    files = [each.__module__ for each in kind.__mro__ if each.__module__.startswith("transformers.models.")]
    registered = any("ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[file]) for file in files)
    return "Attention" in kind.__name__ and bool(files) and not registered


def mixing_module(decoder: Any) -> str | None:
    """Return the name of a module that mixes tokens in a way that sp does not know; None if none does."""
    return try_rows(decoder).mixing


class Tried(NamedTuple):
    """Says what a trial of a decoder has found.

    mixing  the name of a module that mixes tokens in a way that sp does not know, or whose backward does
    scans   that it calls
    """

    mixing: str | None
    scans: tuple[Scanned, ...] = ()

    def heads(self, mixers: str = "") -> int | None:
        """Return the least heads of a scan, of those that are shared out by heads; None if there are none."""
        return min((scan.heads for scan in self.scans if mixers != PREFIX or not scan.passes), default=None)


def try_rows(decoder: Any) -> Tried:
    """Try which modules of a decoder mix tokens in a way that sp does not know.

    Inside a dry run, whose tensors have no values to compare, none is found: try the decoder before. Raises
    ConfigError where the decoder cannot be tried.
    """
    if isinstance(torch.empty(0), FakeTensor):
        return Tried(None)
    config, generator = decoder.config, torch.Generator().manual_seed(0)
    kind, width = type(decoder).__name__, getattr(config.get_text_config(), "hidden_size", None)
    if width is None:
        raise ConfigError(
            "mesh.sp tests whether attention alone mixes the tokens of a sequence and needs the width of hidden "
            f"states for that: {type(config).__name__} has no hidden_size. Type mesh.sp=1."
        )
    device = _device_of(decoder)
    hidden, seen = torch.randn(1, LENGTH, width, generator=generator).to(device), _Seen()
    replace_functions(decoder)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        state = stack.enter_context(_prepared(decoder, seen.attend, generator))
        stack.enter_context(_watched(decoder, seen))
        stack.enter_context(during(Told(shared=seen.mix)))
        try:
            for rows in (range(LENGTH), range(CUT), range(CUT, LENGTH)):
                given = seen.begin(rows, kind, hidden)
                positions = torch.arange(rows.start, rows.stop, device=device)[None]
                part = {"inputs_embeds": given, "use_cache": False, "position_ids": positions}
                seen.end(functional_call(decoder, state, (), part)[0])
            if seen.mixing is None:
                seen.compare_backwards(generator)
        except ConfigError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"mesh.sp tests whether attention alone mixes the tokens of a sequence, but {kind} fails on {LENGTH} "
                f"random hidden states: {type(error).__name__}: {error}. Type mesh.sp=1."
            ) from error
    return Tried(seen.mixing, tuple(seen.scans))


def find_positions(decoder: Any) -> Positions | None:
    """Return how a decoder makes the positions of a sequence where it is given none; None if by no rule that is known.

    Inside a dry run, whose tensors have no values to compare, they count rows: try the decoder before.
    """
    if isinstance(torch.empty(0), FakeTensor):
        return Positions()
    text, device = decoder.config.get_text_config(), _device_of(decoder)
    padding = getattr(text, "pad_token_id", None)
    padding = padding if isinstance(padding, int) and padding >= 0 else 0
    generator = torch.Generator().manual_seed(0)
    modes = {module: module.training for module in decoder.modules()}
    with torch.no_grad(), _prepared(decoder, _attend, generator, of_a_kind=1) as state:
        decoder.eval()
        try:
            given = list(_sequences(text, padding, generator, device))
            wanted = [_output(decoder, state, batch) for batch in given]
            for rule in RULES:
                positions = Positions(rule, padding)
                if all(
                    made is None or _is_near(_output(decoder, state, batch, positions), made)
                    for batch, made in zip(given, wanted, strict=True)
                ):
                    return positions
        finally:
            for module, mode in modes.items():
                module.training = mode
    return None


def _sequences(
    text: Any, padding: int, generator: torch.Generator, device: torch.device
) -> Iterator[dict[str, Tensor | None]]:
    """Yield what a decoder may be given: a row with the padding token amid others, one that is padded on the left."""
    ids = torch.randint(0, min(text.vocab_size, 1000), (2, SHORT), generator=generator)
    ids = ids.where(ids != padding, (padding + 1) % text.vocab_size)
    mask = torch.ones_like(ids)
    ids[0, PADDED], ids[1, :PADDED], mask[1, :PADDED] = padding, padding, 0
    hidden = torch.randn(2, SHORT, text.hidden_size, generator=generator)
    for shown in (mask.to(device), None):
        yield {"input_ids": ids.to(device), "attention_mask": shown}
        yield {"inputs_embeds": hidden.to(device), "attention_mask": shown}


def _output(
    decoder: Any, state: Mapping[str, Tensor], batch: Mapping[str, Tensor | None], positions: Positions | None = None
) -> Tensor | None:
    """Return what a decoder makes of a batch, without positions or with some; None where it fails."""
    given: dict[str, Any] = {name: t.clone() for name, t in batch.items() if t is not None}  # CTRL writes into it
    if positions is not None:
        whole = next(iter(given.values()))
        made = positions.of(given.get("input_ids"), given.get("attention_mask"), whole.shape[1], whole.device)
        given["position_ids"] = made
    try:
        output: Tensor = functional_call(decoder, dict(state), (), {**given, "use_cache": False})[0]
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError):
        return None  # such as a decoder that takes no token ids
    return output


def _is_near(made: Tensor | None, wanted: Tensor) -> bool:
    return made is not None and bool((made - wanted).abs().max() <= ALIKE * wanted.abs().max())


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """Attend to all that is before, padding too: positions are what is asked for."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    made = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return made.transpose(1, 2).contiguous(), None


def _device_of(decoder: nn.Module) -> torch.device:
    return next((buffer.device for buffer in decoder.buffers() if not buffer.is_meta), torch.device("cpu"))


@contextmanager
def _prepared(
    decoder: Any, attend: Callable[..., Any], generator: torch.Generator, of_a_kind: int = OF_A_KIND
) -> Iterator[dict[str, Tensor]]:
    """Have a decoder of few blocks use an attention, inside; give random values of its parameters."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config, functions, device = decoder.config, ALL_ATTENTION_FUNCTIONS._global_mapping, _device_of(decoder)
    with ExitStack() as stack:
        stack.enter_context(_ONE_TRIAL)
        stack.enter_context(_few_blocks(decoder, of_a_kind))
        state = {name: _random(p, generator, device) for name, p in decoder.named_parameters()}
        functions[NAME] = attend
        stack.callback(functions.pop, NAME)
        stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        config._attn_implementation = NAME
        if (experts := getattr(config, "_experts_implementation", None)) is not None:
            config._experts_implementation = "eager"  # the usual one takes no expanded weights
            stack.callback(setattr, config, "_experts_implementation", experts)
        for option in [name for name, value in vars(config).items() if name.startswith("output_") and value is True]:
            # transformers hooks modules at the first output asked for, for good: not while blocks are left out
            stack.callback(setattr, config, option, getattr(config, option))
            setattr(config, option, False)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # of blocks that are compiled
        stack.enter_context(_ByColumns())
        yield state


class _ByColumns(TorchFunctionMode):
    """Multiplies by weights that are expanded columns without making the matrices: of large ones that takes long.

    Rows of an expanded table would be constant, which a norm takes away: what is looked up is a wave of the index.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) > 1 and args[1].dim() == 2 and args[1].stride(1) == 0:
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            made = args[0].sum(-1, keepdim=True) * args[1][:, 0]
            return made if bias is None else made + bias
        if func is F.embedding and args[1].dim() == 2 and args[1].stride(1) == 0:
            waves = torch.arange(1, args[1].shape[1] + 1, device=args[0].device) * WAVE
            return torch.sin((args[0][..., None] + 1) * waves).to(args[1].dtype)
        if func in PRODUCTS and isinstance(args[1], Tensor) and args[1].dim() in (2, 3) and args[1].stride(-2) == 0:
            return args[0].sum(-1, keepdim=True) * args[1][..., :1, :]  # of an expert, or of all, stacked
        return func(*args, **(kwargs or {}))


class _Forward(NamedTuple):
    """A forward of some rows: where its backward begins and along which dimension rows are, and what modules took."""

    rows: range
    ends: dict[_Call, tuple[Tensor, int]]
    taken: dict[_Call, Tensor]

    def gradients(self, first: Mapping[_Call, Tensor]) -> dict[_Call, Tensor]:
        """Return the gradient of what each module took, of the rows of `first`, which are of the whole's ends."""
        ends = {call: t for call, (t, _) in self.ends.items() if t.requires_grad}
        begin = [first[call].narrow(self.ends[call][1], self.rows.start, len(self.rows)) for call in ends]
        found = torch.autograd.grad(list(ends.values()), list(self.taken.values()), begin, allow_unused=True)
        return {
            call: torch.zeros_like(t) if grad is None else grad
            for (call, t), grad in zip(self.taken.items(), found, strict=True)
        }


class _Seen:
    """Compares what modules make of parts with the rows of what they made of the whole, in the order of their calls."""

    def __init__(self) -> None:
        self.mixing: str | None = None
        self.scans: list[Scanned] = []
        self._rows = range(0)
        self._whole: dict[_Call, Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._forwards: list[_Forward] = []

    def begin(self, rows: range, decoder: str, hidden: Tensor) -> Tensor:
        """Begin a forward of these rows, and return their hidden states for it; the first is of all."""
        self._rows = rows
        self._calls.clear()
        self._forwards.append(_Forward(rows, {}, {}))
        given: Tensor = self._isolate(decoder, hidden[:, rows.start : rows.stop].clone().requires_grad_())
        return given

    def end(self, made: Tensor) -> None:
        """End a forward, whose decoder returned this first."""
        self._forwards[-1].ends[self._call("the output")] = made, 1

    def compare_backwards(self, generator: torch.Generator) -> None:
        """Compare gradients of parts with the rows of those of the whole, the last module's first."""
        whole, *parts = self._forwards
        first = {call: torch.randn(t.shape, generator=generator).to(t) for call, (t, _) in whole.ends.items()}
        wanted = whole.gradients(first)
        least = LEAST * max(float(grad.abs().max()) for grad in wanted.values())
        for part in parts:
            for call, grad in reversed(part.gradients(first).items()):
                rows = wanted[call].narrow(1, part.rows.start, len(part.rows))
                if self.mixing is None and not _near(grad, rows, least):
                    self.mixing = f"the backward of {call[0]}"

    def isolate(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Return what a module is given, with tensors [1, rows, ..] whose gradients are of this module alone."""
        return tuple(self._isolate(name, t) for t in args), {key: self._isolate(name, t) for key, t in kwargs.items()}

    def _isolate(self, name: str, given: Any) -> Any:
        if not isinstance(given, Tensor) or not given.requires_grad:
            return given
        if given.dim() < 3 or len(given) != 1 or given.shape[1] != len(self._rows):
            return given
        alias = self._forwards[-1].taken[self._call(name, " takes")] = given * 1
        return alias

    def note(self, name: str, made: Any, dim: int = 1, ends: bool = False) -> None:
        """Note or compare a tensor [1, ..] whose dimension `dim` are rows; leave any other.

        ends  a backward begins with it
        """
        rows = self._rows
        if isinstance(made, tuple):
            made = made[0] if made else None
        if not isinstance(made, Tensor) or made.dim() < 3 or len(made) != 1 or made.shape[dim] != len(rows):
            return  # such as tokens by expert
        call = self._call(name)
        if ends:
            self._forwards[-1].ends[call] = made, dim
        made = made.detach()
        if len(rows) == LENGTH:
            self._whole[call] = made
        elif self.mixing is None and (
            call not in self._whole or not _near(made, self._of_rows(self._whole[call], dim), 1e-6)
        ):
            self.mixing = name

    def _call(self, name: str, what: str = "") -> _Call:
        """Return what a call is known by: a name, and how many of that there were before."""
        self._calls[name + what] += 1
        return name, self._calls[name + what]

    def _of_rows(self, whole: Tensor, dim: int) -> Tensor:
        return whole.narrow(dim, self._rows.start, len(self._rows))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Attend over the whole, causally; of a part return the rows of that. No gradient passes.

        Raises ConfigError where attention is given a bias of pairs of rows, and not of all keys, or a mask with a
        gradient, which is made of its rows.
        """
        name = f"the attention of {type(module).__name__}"
        if isinstance(attention_mask, Tensor) and attention_mask.requires_grad:
            raise ConfigError(
                f"mesh.sp gives {name} rows of keys and values, of which it makes the mask for whole sequences itself: "
                "type mesh.sp=1."
            )
        if (bias := options.get(BIAS)) is not None and bias.shape[-1] != LENGTH:
            raise ConfigError(
                f"mesh.sp gives {name} rows of queries and whole sequences of keys, but its {BIAS} has "
                "those rows for both: type mesh.sp=1."
            )
        for what, given in (("queries", query), ("keys", key), ("values", value)):
            self.note(f"what makes {what} for {name}", given, 2, ends=True)
        call = self._call("attended")
        if len(self._rows) == LENGTH:
            groups = query.shape[1] // key.shape[1]
            key, value = (t.detach().repeat_interleave(groups, 1) for t in (key, value))
            made = F.scaled_dot_product_attention(query.detach(), key, value, is_causal=True)
            self._whole[call] = made.transpose(1, 2).contiguous()
        return self._of_rows(self._whole[call], 1).clone().requires_grad_() * 1, None

    def mix(self, function: str, given: Call, _: Any, inside: Inside) -> Any:
        """Convolve or scan the whole; of a part return the rows of that. No gradient passes."""
        times: Mapping[str, int] = {"hidden_states": -1} if function == CONVOLUTION else SCANS[function].time
        dim = -1 if function == CONVOLUTION else SCANS[function].out
        for name, time in times.items():
            t = given.given.get(name)
            self.note(f"what makes {name} for {function}", t, 2 if time == -1 else 1, ends=True)
        call = self._call(function)
        if len(self._rows) == LENGTH:
            with torch.no_grad():
                made = inside(given, None)
            self._whole[call] = output = made[0] if isinstance(made, tuple) else made
            if function != CONVOLUTION:
                self.scans.append(SharedScan(function, given).note(output, LENGTH))
        whole = self._whole[call]
        part = self._of_rows(whole, dim % whole.dim()).clone().requires_grad_() * 1
        return (part, None) if function in PAIRS else part


def _near(made: Tensor, wanted: Tensor, least: float) -> bool:
    """Return whether all of it is near, by the largest number that was wanted, or `least` where that is larger."""
    return bool((made - wanted).abs().max() <= NEAR * max(float(wanted.abs().max()), least))


def _random(p: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return random values in the place of a parameter: its first dimension's, expanded over the others."""
    first = torch.randn(p.shape[:1] + (1,) * (p.dim() - 1), generator=generator).to(device)
    return (first / max(1, p[:1].numel()) ** 0.5).expand(p.shape) if p.dim() > 1 else first


@contextmanager
def _watched(decoder: nn.Module, seen: _Seen) -> Iterator[None]:
    """Have the modules of the decoder note what they make inside, in evaluation mode."""
    modes = {module: module.training for module in decoder.modules()}
    decoder.eval()
    hooks: list[Any] = []
    for name, module in decoder.named_modules():
        if name and not isinstance(module, Placeholder):
            hooks.append(module.register_forward_pre_hook(partial(_take, seen, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(_note, seen, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode


def _take(seen: _Seen, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return seen.isolate(name, args, kwargs)


def _note(seen: _Seen, name: str, _: nn.Module, __: Any, made: Any) -> None:
    seen.note(name, made)


@contextmanager
def _few_blocks(decoder: nn.Module, of_a_kind: int) -> Iterator[None]:
    """Leave so many blocks of each kind in the decoder, inside; others hand their hidden state on."""
    form, kinds = {"tuples": 0}, Counter[str]()
    config: Any = decoder.config
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    left: list[tuple[nn.Module, str, nn.Module]] = []

    def learn(block: nn.Module, args: Any, made: Any) -> None:
        form["tuples"] = len(made) if isinstance(made, tuple) else 0

    hook: Any = None
    for index, (name, block) in enumerate(find_blocks(decoder).items()):
        kind = f"{types[index] if index < len(types) else ''} {block!r}"
        kinds[kind] += 1
        hook = hook or block.register_forward_hook(learn)
        if kinds[kind] > of_a_kind:
            parent, _, key = name.rpartition(".")
            holder = decoder.get_submodule(parent)
            left.append((holder, key, block))
            holder._modules[key] = PassedBlock(block, form)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for holder, key, block in left:
            holder._modules[key] = block
