"""Keeps packed documents apart where convolutions and recurrences mix tokens.

transformers' mixers call five functions of their modeling files, by the name of the file's global. Each is replaced
there by one that looks up what the forward under way was told (packed_documents.py), and else calls the original:

    causal_conv1d_fn                  taps that reach before a document count as zero
    torch_chunk_gated_delta_rule      called for documents, those with as many chunks at once; a kernel is told
    chunk_kimi_delta_attention        where documents end, by its own names
    mamba2_chunk_scan
    mamba_selective_scan

Two more fuse all of a mixer, mamba2_split_conv1d_scan_combined and mamba_inner_fn. Where they return None, it goes on
in pieces. They do so for packed rows, which they could not keep apart; and for all rows where an adapter, a format in
few bits or a cut over tp sits in a module whose weight they take past it.

Mixers of their own (`BY_MODULE`) are called for documents as modules. Masks that a model makes without positions get
them. A file's globals are all models' of the process, so nothing is put back; a model that is told nothing has its own
bits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from zero3d.errors import ConfigError
from zero3d.models.convolution import causal_convolution
from zero3d.models.mask_code import MASKS, code_of, masks_by_position
from zero3d.models.packed_documents import Documents, Part, Told, carried, during, told

DOCUMENTS = "documents"  # entry of a batch that says where they are, beside or in the place of position_ids
ROWS = ("input_ids", "inputs_embeds", "entering")  # what a forward is given row by row; the last of a pipeline's chunk
CONVOLUTION = "causal_conv1d_fn"
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
BY_MODULE = (
    "Inkling2DynamicShortConvolution",
    "MiniMaxLightningAttention",
    "RecurrentGemmaRecurrentBlock",
    "ZayaCCAProjection",
    "RwkvSelfAttention",
    "RwkvFeedForward",
    "xLSTMBlock",
)
# Modules past which fused kernels take weights; Mamba 1's x_proj and dt_proj, too.
PAST = {"out_proj": (nn.Linear,), "x_proj": (nn.Linear,), "dt_proj": (nn.Linear,), "conv1d": (nn.Conv1d,), "norm": ()}


class Scan(NamedTuple):
    """Describes a function that scans over time.

    time    dimension of time, of the tensors that have one
    out     that of what it returns
    ends    keyword by which its kernel is told where documents end, and what of `Documents` that is; None: it cannot be
    rows    whether the kernel wants all documents in one row then
    """

    time: Mapping[str, int]
    out: int
    ends: tuple[str, ...] = ()
    rows: bool = False


DELTA = Scan(dict.fromkeys(("query", "key", "value", "g", "beta"), 1), 1, ("cu_seqlens", "cu_seqlens_cpu"), rows=True)
SCANS = {
    "torch_chunk_gated_delta_rule": DELTA,
    "chunk_kimi_delta_attention": DELTA,
    "mamba2_chunk_scan": Scan(dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 1), 1, ("seq_idx",)),
    "mamba_selective_scan": Scan(dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), -1), -1),
}
FUNCTIONS = (CONVOLUTION, *SCANS, *FUSED)
TOLD_AS = {"cu_seqlens": "ends", "cu_seqlens_cpu": "ends_on_host", "seq_idx": "numbers"}  # names of kernels, and ours
OF_OTHERS = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Call:
    """A call of a function under its own parameters' names, however they were passed.

    Where documents end is left out: attention was told of it in other names and forms than kernels of mixers take.
    """

    def __init__(self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._names, self._args = names, args
        self._kwargs = {name: value for name, value in kwargs.items() if name not in OF_OTHERS}
        self.given = dict(zip(names, args, strict=False)) | self._kwargs

    def replaced(self, **values: Any) -> Call:
        """Return a call that is the same but for these values."""
        return Call(self._names, (), self.given | values)

    def __call__(self, function: Callable[..., Any], **replaced: Any) -> Any:
        """Call a function in the same way, with other values of some parameters."""
        positional = [replaced.pop(name, value) for name, value in zip(self._names, self._args, strict=False)]
        return function(*positional, **self._kwargs | replaced)


# --- what stands for the functions -------------------------------------------------------------------------------


def _inside(name: str, function: Callable[..., Any], call: Call, documents: Documents | Part | None) -> Any:
    """Call a function of that name, inside of documents where there are several in a row."""
    if documents is None:
        return call(function)
    if name == CONVOLUTION:
        return _convolved(function, call, documents)
    assert isinstance(documents, Documents), "a scan has all tokens"
    return _scanned(name, function, call, documents)


def _convolved(function: Callable[..., Any], call: Call, documents: Documents | Part) -> Any:
    """Convolve inside of documents. Kernels are told of them where channels lie side by side alone."""
    x, weight, bias = call.given["hidden_states"], call.given["weight"], call.given.get("bias")
    if is_kernel(function):
        return call(function, hidden_states=x.mT.contiguous().mT, **_ends(CONVOLUTION, function, documents))
    made = causal_convolution(x.to(weight.dtype), weight, documents.places)
    if bias is not None:
        made = made + bias[:, None]
    if (activation := call.given.get("activation")) is not None:
        made = _activation(activation)(made)
    return made.to(x.dtype)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    found: Callable[[Tensor], Tensor] = ACT2FN[name]
    return found


def _ends(name: str, function: Callable[..., Any], documents: Documents | Part) -> dict[str, Tensor]:
    return {each: getattr(documents, what) for each, what in _ends_of(name, function).items()}


@_disable_dynamo
def _scanned(name: str, function: Callable[..., Any], call: Call, documents: Documents) -> Any:
    """Scan each document by itself. Compiled blocks call it between two graphs: lengths differ from step to step."""
    scan = SCANS[name]
    if not is_kernel(function) or not scan.ends:
        return _by_length(scan, function, call, documents)
    ends = _ends(name, function, documents)
    if not scan.rows:
        return call(function, **ends)
    rows = documents.shape[0]
    flat = {name: t.flatten(0, 1)[None] for name, t in _timed(scan, call)}
    made, *rest = call(function, **flat, **ends)
    return made[0].unflatten(0, (rows, -1)), *rest


def _timed(scan: Scan, call: Call) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that have a dimension of time, by name."""
    for name in scan.time:
        if isinstance(value := call.given.get(name), Tensor):
            yield name, value


def _by_length(scan: Scan, function: Callable[..., Any], call: Call, documents: Documents) -> Any:
    """Call a function for documents, those that it makes as many chunks of at once.

    Behind the end of a document it fills its last chunk with zeros: so can we, and documents of other lengths have the
    same shape then.
    """
    chunk = _chunk(function, call)
    alike: dict[int, list[int]] = {}
    for number, (_, start, stop) in enumerate(documents.spans):
        alike.setdefault(-(-(stop - start) // chunk) * chunk, []).append(number)
    made: dict[int, Tensor] = {}
    rest: tuple[Any, ...] | None = None
    for length, numbers in alike.items():
        spans = [documents.spans[number] for number in numbers]
        some = {name: _pieces(t, spans, scan.time[name], length) for name, t in _timed(scan, call)}
        output = call(function, **some)
        if isinstance(output, tuple):
            output, *others = output
            rest = tuple(None for _ in others)  # states at the end of one row, of which there is none
        for place, (number, (_, start, stop)) in enumerate(zip(numbers, spans, strict=True)):
            made[number] = output[place : place + 1].narrow(scan.out, 0, stop - start)
    joined = _rows([made[number] for number in range(len(made))], documents, scan.out)
    return joined if rest is None else (joined, *rest)


def _chunk(function: Callable[..., Any], call: Call) -> int:
    """Return how many tokens a function takes at once: its own default, where it is not told."""
    default = inspect.signature(inspect.unwrap(function)).parameters.get("chunk_size")
    chunk = call.given.get("chunk_size", 1 if default is None else default.default)
    return chunk if isinstance(chunk, int) else 1


def _pieces(t: Tensor, spans: Sequence[tuple[int, int, int]], dim: int, length: int) -> Tensor:
    """Return parts of rows as a batch, with zeros behind them up to a length."""
    dim %= t.dim()
    parts = [t[row : row + 1].narrow(dim, start, stop - start) for row, start, stop in spans]
    behind = [0, 0] * (t.dim() - 1 - dim)
    return torch.cat([F.pad(part, (*behind, 0, length - part.shape[dim])) for part in parts])


def _rows(made: Sequence[Tensor], documents: Documents, dim: int) -> Tensor:
    """Return documents [1, .., length, ..] one after another, in their rows."""
    by_row: dict[int, list[Tensor]] = {}
    for (row, _, _), part in zip(documents.spans, made, strict=True):
        by_row.setdefault(row, []).append(part)
    return torch.cat([torch.cat(parts, dim) for parts in by_row.values()])


def told_first(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands in a file's globals for a function of that name: it looks up what it was told."""
    names = parameters_of(function)

    @wraps(function)
    def apart(*args: Any, **kwargs: Any) -> Any:
        now = told()
        if now is None:
            return function(*args, **kwargs)
        concerned = now.concerns(name in MASKS, name in FUSED)
        if concerned and name in FUSED:
            return None
        if not concerned:
            return function(*args, **{key: value for key, value in kwargs.items() if key not in OF_OTHERS})
        return _apart(name, function, Call(names, args, kwargs))

    made: Any = apart
    made.original = function
    made.__code__ = made.__code__.replace(co_name=name)  # torch.compile keeps few graphs of one code
    return apart


@_disable_dynamo
def _apart(name: str, function: Callable[..., Any], call: Call) -> Any:
    """Call a function for a packed micro-batch, or where ranks share sequences."""
    now = told()
    if now is None or not now.concerns(name in MASKS, fuses=False):
        return call(function)
    if name in MASKS:
        assert now.documents is not None
        return _mask(function, call, now.documents)
    if now.shared is None:
        return _inside(name, function, call, now.documents)
    return now.shared(name, call, now.documents, partial(_inside, name, function))


def _mask(function: Callable[..., Any], call: Call, documents: Documents) -> Any:
    """Make a mask by where documents are, where it is made by nothing else.

    A model that was given no mask may have made one itself, of ones, which would have transformers look for none.
    """
    mask = call.given.get("attention_mask")
    if call.given.get("position_ids") is not None or (isinstance(mask, Tensor) and mask.dim() != 2):
        return call(function)
    return call(function, position_ids=documents.positions, attention_mask=None)


# --- kernels ------------------------------------------------------------------------------------------------------


def kernel_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what transformers calls by this name: a package's kernel where there is one, else its own code."""
    function = getattr(function, "original", function)
    code = getattr(function, "__code__", None)
    closed = dict(zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=True)) if code else {}
    cell: Any = closed.get("implementation")
    return function if cell is None else cell.cell_contents


def is_kernel(function: Callable[..., Any]) -> bool:
    """Return whether transformers calls a package's kernel by this name."""
    return kernel_of(function) not in (getattr(function, "original", function), inspect.unwrap(function))


def check_kernels(model: nn.Module) -> None:
    """Raise ConfigError for a kernel of a model's mixers that cannot be told where documents end."""
    for file in mixing_files(model):
        for name in (CONVOLUTION, *SCANS):
            function = vars(sys.modules[file]).get(name)
            if function is not None and is_kernel(function):
                _ends_of(name, function)


def _ends_of(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """Return a kernel's names for where documents end, with that of `Documents`. Raises ConfigError where it has none.

    None are those of a kernel that has no such argument in any version, and is called for documents.
    """
    wanted = {CONVOLUTION: ("seq_idx",)}.get(name) or SCANS[name].ends
    kernel = kernel_of(function)
    takes = inspect.signature(kernel).parameters
    if wanted and wanted[0] not in takes:
        raise ConfigError(
            f"documents cannot be packed: {kernel.__module__}.{kernel.__qualname__} takes no {wanted[0]}, to be told "
            f"where they end; its parameters are {', '.join(takes)}. Install a version that has it, or give each "
            "document a row (data.packing=false in a run's file)."
        )
    return {each: TOLD_AS[each] for each in wanted if each in takes}


def installed(mixer: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield the functions of mixing that a module calls: their names, their files, and what stands there for them."""
    names = getattr(code_of(type(mixer).forward), "co_names", ())
    for name in FUNCTIONS:
        file = next((each for each in _files(type(mixer)) if name in vars(sys.modules[each])), None)
        if name in names and file is not None:
            _replace(file, (name,))
            yield name, file, vars(sys.modules[file])[name]


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the parameters of transformers' own function of that name."""
    return list(inspect.signature(inspect.unwrap(function)).parameters)


# --- models -------------------------------------------------------------------------------------------------------


def mixing_files(model: nn.Module) -> set[str]:
    """Return the modeling files of transformers whose functions mix tokens of this model."""
    return {file for module in model.modules() if _mixes(module) for file in _files(type(module))}


def mixers(model: nn.Module) -> dict[str, Any]:
    """Return the modules of a model that call those functions, and those that are called for documents, by name."""
    found = ((name, module) for name, module in model.named_modules())
    return {name: module for name, module in found if is_mixer_class(type(module))}


def is_mixer_class(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class mix tokens by those functions, or are called for documents."""
    return kind.__name__ in BY_MODULE or _calls(kind)


def _mixes(module: nn.Module) -> bool:
    return _calls(type(module))


def _calls(kind: type[nn.Module]) -> bool:
    """Return whether a class of transformers' uses one of those names in its forward."""
    names = getattr(code_of(kind.forward), "co_names", ())
    return not set(names).isdisjoint(FUNCTIONS) and bool(list(_files(kind)))


def _files(kind: type) -> Iterator[str]:
    return (each.__module__ for each in kind.__mro__ if each.__module__.startswith("transformers.models."))


def is_told(model: nn.Module) -> bool:
    """Return whether a model is one whose documents only we can keep apart."""
    return bool(mixers(model)) or bool(_unplaced_masks(model))


def _unplaced_masks(model: nn.Module) -> set[str]:
    """Return files of modules that make masks without positions."""
    kinds = {type(module) for module in model.modules()}
    return {file for kind in kinds if masks_by_position(kind) is False for file in _files(kind)}


def replace_functions(model: nn.Module) -> None:
    """Have the functions that mix tokens of this model look up what they are told, for good."""
    for file in mixing_files(model):
        _replace(file, FUNCTIONS)


class Mixing:
    """Tells functions that mix tokens about the documents of each forward of a model.

    roots      modules whose forwards are the model's: itself, or the chunks of a pipeline
    positions  the model takes position_ids; from any other they are kept
    refused    why packed rows are refused; None: they are not
    """

    def __init__(self, roots: Iterable[nn.Module], positions: bool, refused: str | None = None) -> None:
        self._undo: list[Callable[[], None]] = []
        for root in roots:
            self._install(root, positions, refused)

    def _install(self, root: nn.Module, positions: bool, refused: str | None) -> None:
        found: dict[str, Any] = mixers(root)
        replace_functions(root)
        for file in mixing_files(root) | _unplaced_masks(root):
            _replace(file, MASKS)
        for module in found.values():
            if type(module).__name__ in BY_MODULE:
                own = module.forward
                is_of_class = "forward" not in vars(module)
                self._undo.append(
                    partial(delattr, module, "forward") if is_of_class else partial(setattr, module, "forward", own)
                )
                module.forward = _per_document(own)
        in_pieces = any(is_taken_apart(module) for module in found.values())
        entry = _Entry(tuple(inspect.signature(root.forward).parameters), positions, in_pieces, refused)
        hooks = (
            root.register_forward_pre_hook(entry.enter, with_kwargs=True, prepend=True),
            root.register_forward_hook(entry.leave, always_call=True),
        )
        self._undo += [hook.remove for hook in hooks]

    def close(self) -> None:
        """Leave the model as it was."""
        while self._undo:
            self._undo.pop()()


class _Entry:
    """Tells what a forward was given, from its beginning to its end.

    names    of the forward's parameters, for what is passed by position
    refused  why packed rows are refused
    """

    def __init__(self, names: Sequence[str], positions: bool, in_pieces: bool, refused: str | None) -> None:
        self._names, self._refused = names, refused
        self._positions, self._in_pieces = positions, in_pieces
        self._open: list[Any] = []

    def enter(self, root: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        documents, positions = given.get(DOCUMENTS), given.get("position_ids")
        caches = given.get("past_key_values", given.get("cache_params")) is not None
        if caches or isinstance(given.get("attention_mask"), Tensor):
            documents = None
        elif documents is None:
            documents = _found(given, positions)
        elif documents is not None and isinstance(positions, Tensor):
            documents = documents.to(positions)
        if documents is not None and self._refused is not None:
            raise ConfigError(self._refused)
        around = during(Told(documents, self._in_pieces))
        around.__enter__()
        self._open.append(around)
        _carry(root)
        left_out = {DOCUMENTS} if self._positions else {DOCUMENTS, "position_ids"}
        passed = {name: value for name, value in kwargs.items() if name not in left_out}
        if documents is not None and positions is None and self._positions:
            passed["position_ids"] = documents.positions  # for masks, which know no other names
        return args, passed

    def leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


def _found(given: Mapping[str, Any], positions: Any) -> Documents | None:
    """Return the documents that a forward is told of: by positions, else by the names that kernels have for them."""
    if isinstance(positions, Tensor):
        return Documents.of(_of_every_row(positions, given))
    numbers, ends = given.get("seq_idx"), given.get("cu_seq_lens_q")
    if isinstance(numbers, Tensor):
        return Documents.of_numbers(_of_every_row(numbers, given))
    shape = next((t.shape[:2] for name in ROWS if isinstance(t := given.get(name), Tensor)), None)
    return Documents.of_ends(ends, (shape[0], shape[1])) if isinstance(ends, Tensor) and shape is not None else None


def _of_every_row(positions: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Return positions [.., 1, T] that a forward is given for all of its rows as [.., B, T]."""
    if positions.dim() < 2 or positions.shape[-2] != 1:
        return positions
    rows = next((len(t) for name in ROWS if isinstance(t := given.get(name), Tensor)), 1)
    return positions.expand(*positions.shape[:-2], rows, -1)


def _carry(root: nn.Module) -> None:
    """Have what transformers recomputes be told the same again."""
    modules: Iterable[Any] = root.modules()
    for module in modules:
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None and not hasattr(checkpoint, "carries"):
            module._gradient_checkpointing_func = _carrying(checkpoint)


def _carrying(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(carried(function), *args, **kwargs)

    call.carries = True  # type: ignore[attr-defined]
    return call


def is_taken_apart(mixer: nn.Module) -> bool:
    """Return whether a fused kernel would take a weight past a module that does more than to multiply by it."""
    for name, kinds in PAST.items():
        if not isinstance(module := getattr(mixer, name, None), nn.Module):
            continue
        more = (
            module._modules,
            module._forward_hooks,
            module._forward_pre_hooks,
            getattr(module, "parametrizations", ()),
        )
        if any(map(len, more)) or (kinds and type(module) not in kinds):
            return True
    return False


def _replace(file: str, names: Sequence[str]) -> None:
    held = vars(sys.modules[file])
    for name in names:
        if name in held and not hasattr(held[name], "original"):
            held[name] = told_first(name, held[name])


def _per_document(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward that is called for documents of a packed row, those of one length at once."""

    @wraps(forward)
    def apart(*args: Any, **kwargs: Any) -> Any:
        now = told()
        if now is None or now.documents is None:
            return forward(*args, **kwargs)
        return by_document(args, kwargs, now.documents)

    @_disable_dynamo
    def by_document(args: Any, kwargs: Any, documents: Documents) -> Any:
        alike: dict[int, list[int]] = {}
        for number, (_, start, stop) in enumerate(documents.spans):
            alike.setdefault(stop - start, []).append(number)
        made: dict[int, Any] = {}
        for length, numbers in alike.items():
            spans = [documents.spans[number] for number in numbers]
            cut = _cut((args, kwargs), documents, spans, length)
            output = forward(*cut[0], **cut[1])
            for place, number in enumerate(numbers):
                made[number] = _one(output, place, (len(numbers), length))
        return _joined([made[number] for number in range(len(made))], documents)

    return apart


def _cut(value: Any, documents: Documents, spans: Sequence[tuple[int, int, int]], length: int) -> Any:
    """Return what is given of some documents: of tensors [B, T, ..] and [1, T, ..] their parts, else all of it."""
    rows, tokens = documents.shape
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == tokens and value.shape[0] in (1, rows):
        return _pieces(value.expand(rows, *value.shape[1:]), spans, 1, length)
    if isinstance(value, dict):
        return {name: _cut(each, documents, spans, length) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cut(each, documents, spans, length) for each in value)
    return value


def _one(made: Any, place: int, shape: tuple[int, int]) -> Any:
    """Return what was made of one document; None for states, which go on nowhere."""
    if isinstance(made, Tensor):
        return made[place : place + 1] if made.dim() > 2 and made.shape[:2] == shape else None
    if type(made) in (tuple, list):
        return type(made)(_one(each, place, shape) for each in made)
    return None


def _joined(parts: Sequence[Any], documents: Documents) -> Any:
    """Return what was made of all documents; None of states, one of which may have a document's shape by chance."""
    first = parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        return _rows(parts, documents, 1)
    if type(first) in (tuple, list):
        return type(first)(_joined([part[index] for part in parts], documents) for index in range(len(first)))
    return None
