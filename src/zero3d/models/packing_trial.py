"""A trial of packing: whether a model keeps the documents of a row apart, told by running a copy of it on the CPU.

    alone     two documents of random tokens, 11 and 7, each in a row of its own    what is wanted
    packed    both in one row, where positions start again, as a run packs them     must be equal to it
    changed   packed, with another token in the first                               must leave the second as it was
    backward  of random sums over a document, by what comes out of embeddings       as alone, and none in the others

Equality decides. That a change does not reach the second document is not enough: a mask that is made for the wrong
document passes it. And the change must move its own document, or the trial says nothing.

Positions are tried as rows [B, L]. M-RoPE models (Qwen2.5-VL, GLM-4V) make three rows of these, for time, height and
width, and make no mask from them; they tell documents apart by a fourth row, in front, which is that of the text. What
keeps documents apart is what training gives the model (packing.py: `position_rows`).

The copy has one block of each kind, and the model's own sizes. Its weights are random and take no memory: each is a
view of few numbers. Products with a large one take its first columns alone, each for a segment of what is multiplied,
so that the trial of a model of any size takes some tens of milliseconds. Nothing here is communicated, and all ranks
find the same.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zero3d.models.blocks import find_blocks
from zero3d.models.copies import copy_with
from zero3d.models.placeholders import PassedBlock
from zero3d.nested import tensors_in

Document = dict[str, Tensor]
Give = Callable[[Document], dict[str, Any]]

LENGTHS = (11, 7)  # of documents that are unlike each other
FIRST_ID, IDS = 3, 50  # of tokens: small ones, since special tokens of images are the last of a vocabulary
TOKEN, CHANGED = "token", 4  # what is changed in the first document, and which
COUNTED, WHICH = {2: "two", 3: "three"}, ("first", "second", "third")  # documents of a row, in words
NEAR = 2e-4  # of the largest number that was wanted: rounding is 1e-5 of it at most, the smallest leak found 6e-3
EXACT = 1e-12  # of what a token changes in its own document, in fp64
NAME, PLAIN = "packing_trial", ("eager", "sdpa")  # of attention functions
LARGE, SEGMENTS = 2**14, 16  # numbers of a matrix whose products are narrowed, and columns that are left of it
WIDEST, LOGITS = 2**16, 2**10  # outputs of a layer, more than which are those of a vocabulary, and what is made of them
PRODUCTS = (torch.bmm, torch.matmul, Tensor.bmm, Tensor.matmul, Tensor.__matmul__)


class Untried(Exception):
    """Says why a trial tells nothing."""


class Leak(NamedTuple):
    """Says what a trial has found wrong: in words, and whether tokens of a row by itself see later ones."""

    words: str
    sees_later: bool


# --- documents, alone and in one row; those with images are in packing_images.py ---------------------------------


class Documents(NamedTuple):
    """Lists documents of a trial that are unlike each other.

    each       what a forward takes of a document in a row of its own: by token [1, L], and by image
    changes    the first document with something changed, by what that is
    positions  makes those of a document in a row of several: [L], or [4, L] of M-RoPE models
    """

    each: Sequence[Document]
    changes: Mapping[str, Document]
    positions: Callable[[Document], Tensor]


def documents(model: nn.Module) -> Documents:
    """Return two documents of text for a model."""
    generator = torch.Generator().manual_seed(0)
    each = [{"input_ids": random_ids(model, 1, length, generator)} for length in LENGTHS]
    return Documents(each, {TOKEN: changed(each[0])}, lambda document: torch.arange(document["input_ids"].shape[1]))


def random_ids(model: nn.Module, sequences: int, length: int, generator: torch.Generator) -> Tensor:
    """Return tokens of text [sequences, length] that a model has in its vocabulary."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    end = min(IDS, getattr(text, "vocab_size", IDS))
    return torch.randint(FIRST_ID, end, (sequences, length), generator=generator)


def packed(these: Documents, each: Sequence[Document]) -> Document:
    """Return one row of documents, as training has it: positions start again in each, images are in their order."""
    row: Document = {}
    for name in dict.fromkeys(name for document in each for name in document):
        having = [document for document in each if name in document]
        by_token = all(document[name].shape == document["input_ids"].shape for document in having)
        row[name] = torch.cat([document[name] for document in having], -1 if by_token else 0)
    positions = torch.cat([these.positions(document) for document in each], -1)
    return row | {"position_ids": positions.unsqueeze(-2)}


def changed(document: Document) -> Document:
    """Return a document with another token."""
    ids = document["input_ids"].clone()
    ids[:, CHANGED] = torch.where(ids[:, CHANGED] == FIRST_ID, FIRST_ID + 1, FIRST_ID)
    return document | {"input_ids": ids}


# --- the trial ---------------------------------------------------------------------------------------------------


def judge(model: nn.Module, give: Give, these: Documents, exact: bool = False) -> Leak | None:
    """Return what is wrong with packed documents in a copy of a model; None for nothing. Raises Untried.

    give   makes of a row what the forward is called with
    exact  arithmetic is in fp64, and differences are beside what a token changes in its own document
    """
    embedded = _Embedded(model)

    def run(row: Document) -> Tensor:
        return _rows_of(model(**give(row)), row["input_ids"].shape[1])

    def run_packed(each: Sequence[Document]) -> tuple[Tensor, ...]:
        return torch.split(run(packed(these, each)), _lengths(each), 1)

    with embedded.leaves() as of_alone:
        wanted = [run(each) for each in these.each]
    if not all(bool(each.isfinite().all()) for each in wanted):
        raise Untried("what it makes of random weights is not finite")
    with embedded.leaves() as of_packed:
        made = run_packed(these.each)
    moved = {what: run_packed([other, *these.each[1:]]) for what, other in these.changes.items()}
    near = NEAR
    for what, values in moved.items():
        if (own := _off(values[0], made[0])) <= NEAR:
            raise Untried(f"another {what} changes nothing in its own document")
        near = min(near, EXACT * own) if exact else near
    of = f"of {COUNTED[len(made)]}"
    for which, value, alone in zip(WHICH, made, wanted, strict=False):
        if (off := _off(value, alone)) > near:
            sees_later = _off(run(these.changes[TOKEN])[:, :CHANGED], wanted[0][:, :CHANGED]) > NEAR
            return Leak(f"{of}, the {which} is off by {off:.1g} of what it is in a row of its own", sees_later)
    for what, values in moved.items():
        for which, value, before in zip(WHICH[1:], values[1:], made[1:], strict=False):
            if (off := _off(value, before)) > near:
                return Leak(f"{of}, another {what} in the first moves the {which} by {off:.1g}", False)
    if len(of_alone) == len(made) and len(of_packed) == 1:
        return _judge_gradients(made, wanted, of_packed[0], of_alone, EXACT if exact else NEAR)
    return None


def _lengths(each: Sequence[Document]) -> list[int]:
    return [document["input_ids"].shape[1] for document in each]


def _judge_gradients(
    made: Sequence[Tensor], wanted: Sequence[Tensor], row: Tensor, leaves: Sequence[Tensor], near: float
) -> Leak | None:
    """Return what is wrong with gradients of what came out of embeddings, of documents in one `row` and alone."""
    of, lengths = f"of {COUNTED[len(made)]}", [leaf.shape[1] for leaf in leaves]
    for index, (value, alone, leaf) in enumerate(zip(made, wanted, leaves, strict=True)):
        weights = torch.randn(alone.shape, dtype=alone.dtype, generator=torch.Generator().manual_seed(index))
        with torch.enable_grad():
            of_row, by_itself = (value * weights).sum(), (alone * weights).sum()
        grads = torch.autograd.grad(of_row, row, retain_graph=index + 1 < len(made))[0]
        right = torch.autograd.grad(by_itself, leaf)[0]
        for other, grad in enumerate(torch.split(grads, lengths, 1)):
            if other != index and grad.any():
                return Leak(f"{of}, the backward of the {WHICH[index]} reaches the {WHICH[other]}", False)
            if other == index and (off := _off(grad, right)) > near:
                words = f"{of}, gradients of the {WHICH[index]} are off by {off:.1g} of those in a row of its own"
                return Leak(words, False)
    return None


class _Embedded:
    """Keeps what comes out of a model's embeddings of tokens, as leaves to which gradients go.

    Of a model that does not say which module these are, it is the first that is an embedding.
    """

    def __init__(self, model: nn.Module) -> None:
        found: Any = getattr(model, "get_input_embeddings", lambda: None)()
        first = (module for module in model.modules() if isinstance(module, nn.Embedding))
        self._module: nn.Module | None = found if isinstance(found, nn.Module) else next(first, None)

    @contextmanager
    def leaves(self) -> Iterator[list[Tensor]]:
        """Run a forward whose backward goes to leaves, inside; there is one for each call of the embeddings."""
        kept: list[Tensor] = []
        if self._module is None:
            yield kept
            return

        def keep(_: nn.Module, __: Any, made: Tensor) -> Tensor:
            kept.append(made.detach().requires_grad_())
            return kept[-1].clone()  # code of models may write to it

        hook = self._module.register_forward_hook(keep)
        try:
            with torch.enable_grad():
                yield kept
        finally:
            hook.remove()


def _rows_of(output: Any, length: int) -> Tensor:
    """Return the first tensor [1, L, ..] of what a forward returns. Raises Untried."""
    for made in tensors_in(output if isinstance(output, (tuple, list, Mapping, Tensor)) else vars(output)):
        if made.shape[:2] == (1, length):
            return made[..., :LOGITS].double()
    raise Untried("what its forward returns has no row for each token")


def _off(made: Tensor, wanted: Tensor) -> float:
    """Return how far off values are, in parts of the largest that was wanted; infinity where some are not finite."""
    off = float((made - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    return off if math.isfinite(off) else math.inf


# --- the copy ----------------------------------------------------------------------------------------------------


@contextmanager
def copied(
    model: nn.Module,
    varlen: bool,
    few: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
    part_of: Callable[[str], int] = lambda _: 0,
) -> Iterator[nn.Module]:
    """Copy a model with random weights, on the CPU, and attention that needs no accelerator.

    varlen  its attention makes no mask, and is told where documents end
    few     one block of each kind; others hand their hidden state on
    dtype   of weights and of what has fractions
    part_of of a block's name: of each part of the model one block of each kind is left
    Inside, a forward drops nothing out; afterwards random states, modes and defaults are as they were before.
    """
    with _alone(dtype):
        yield from _copied(model, varlen, part_of if few else None, torch.Generator().manual_seed(seed))


def _copied(
    model: nn.Module, varlen: bool, part_of: Callable[[str], int] | None, generator: torch.Generator
) -> Iterator[nn.Module]:
    form = {"tuples": 0}
    replaced, kept = ({}, []) if part_of is None else _passed(model, form, part_of)
    left_out = {module for block in replaced for module in block.modules()}
    present = [module for module in model.modules() if module not in left_out]
    quantised: dict[nn.Module | Tensor, object] = {m: _Linear(m, generator) for m in present if _is_quantised(m)}
    parameters = dict.fromkeys(p for m in present for p in m.parameters(recurse=False))
    weights: dict[nn.Module | Tensor, object] = {p: _random(p, generator) for p in parameters}
    buffers: dict[nn.Module | Tensor, object] = {b: _on_cpu(b) for m in present for b in m.buffers(recurse=False)}
    trial: nn.Module = copy_with(model, replaced | quantised | weights | buffers).train()
    for name in kept:
        trial.get_submodule(name).register_forward_hook(
            lambda _, __, made: form.update(tuples=len(made) if isinstance(made, tuple) else 0)
        )
    config: Any = getattr(trial, "config", None)
    if not hasattr(config, "_attn_implementation"):
        yield trial
        return
    for each in [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]:
        if getattr(each, "_experts_implementation", None) is not None:
            each._experts_implementation = "eager"  # the usual one does not loop over experts
    if varlen:
        with _registered():
            config._attn_implementation = NAME
            yield trial
        return
    if config.get_text_config()._attn_implementation not in PLAIN:
        config._attn_implementation = "sdpa" if getattr(trial, "_supports_sdpa", False) else "eager"
    yield trial


@contextmanager
def _registered() -> Iterator[None]:
    """Have transformers know the attention of a trial, inside."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions = ALL_ATTENTION_FUNCTIONS._global_mapping
    functions[NAME] = _attend
    try:
        yield
    finally:
        functions.pop(NAME)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as kernels without masks do: in documents that `cu_seq_lens_q` tells of, or else in the whole row."""
    ends = options.get("cu_seq_lens_q")
    place = torch.arange(query.shape[2])
    document = place * 0 if ends is None else torch.bucketize(place, ends.long(), right=True)
    sees = (document[:, None] == document) & (place[:, None] >= place)
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    made = F.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=options.get("scaling"))
    return made.transpose(1, 2).contiguous(), None


def _passed(
    model: nn.Module, form: Mapping[str, int], part_of: Callable[[str], int]
) -> tuple[dict[nn.Module, PassedBlock], list[str]]:
    """Return what stands for blocks of which there is one of the kind before, and names of the others."""
    kinds: set[str] = set()
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else None
    lists = [v for v in vars(text).values() if isinstance(v, (list, tuple))] if text is not None else []
    lists = [v for v in lists if len(v) <= 2 or list(v) != [*range(len(v))]]  # Llama 4 numbers its layers of experts
    replaced: dict[nn.Module, PassedBlock] = {}
    blocks = find_blocks(model)
    many = Counter(name.rpartition(".")[0] for name in blocks)
    before: Counter[str] = Counter()
    kept: list[str] = []
    for name, block in blocks.items():
        holder = name.rpartition(".")[0]
        of_config = [str(each[before[holder]]) for each in lists if len(each) == many[holder]]
        before[holder] += 1
        kind = "\n".join([holder, str(part_of(name)), repr(block), *of_config, *_flags(block)])
        if kind in kinds:
            replaced[block] = PassedBlock(block, form)
        else:
            kept.append(name)
        kinds.add(kind)
    return replaced, kept


def _flags(block: nn.Module) -> Iterator[str]:
    """Return what modules of a block are told beside their sizes, such as a window, but for the place of the block."""
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, (str, bool, int, float, type(None))) and not key.endswith(("idx", "index", "_id")):
                yield f"{name}.{key}={value}"


def _random(p: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers in the place of a parameter: a view of as many as the sum of its dimensions."""
    if not p.is_floating_point():
        return torch.zeros((), dtype=p.dtype).expand(p.shape)
    numbers = torch.randn(sum(p.shape) + 1, generator=generator, dtype=torch.get_default_dtype())
    if p.dim() > 1:
        numbers = numbers / math.sqrt(max(1, p[:1].numel()))
    return numbers.as_strided(p.shape, (1,) * p.dim())


def _on_cpu(buffer: Tensor) -> Tensor:
    """Return a buffer with memory of its own, on the CPU: ones where it has no values."""
    wanted = torch.get_default_dtype() if buffer.is_floating_point() else buffer.dtype
    if buffer.is_meta:
        return torch.full(buffer.shape, float(buffer.is_floating_point()), dtype=wanted)
    return buffer.detach().to("cpu", wanted, copy=True)


def _is_quantised(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose matrix is in groups of bits."""
    packed = [p for p in module.parameters(recurse=False) if not p.is_floating_point()]
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
    return bool(packed) and next(module.children(), None) is None and all(isinstance(size, int) for size in sizes)


class _Linear(nn.Module):
    """Multiplies by random numbers in the place of a linear layer whose matrix is in groups of bits."""

    def __init__(self, layer: Any, generator: torch.Generator) -> None:
        super().__init__()
        shape = torch.empty(layer.out_features, layer.in_features, device="meta")
        self.matrix = [_random(shape, generator)]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix[0])


@contextmanager
def _alone(dtype: torch.dtype) -> Iterator[None]:
    """Leave nothing behind of what runs inside, where numbers with fractions are of this dtype."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if "torch._dynamo" in sys.modules:  # blocks may be compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_Plain())
        yield


class _Plain(TorchFunctionMode):
    """Drops nothing out, and multiplies by large matrices without making them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = tuple(map(_apart, args))
            kwargs = {name: _apart(value) for name, value in kwargs.items()} | {"dropout_p": 0.0}
        if func is F.linear and len(args) > 1 and _is_large(args[1]):
            outputs = args[1].shape[0]
            some = LOGITS if outputs > WIDEST else outputs
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            made = func(_in_segments(args[0]), args[1][:some, :SEGMENTS], None if bias is None else bias[:some])
            return F.pad(made, (0, outputs - some)) if some < outputs else made
        elif func in PRODUCTS and _is_large(args[1]):
            args = (_in_segments(args[0]), args[1][..., :SEGMENTS, :])
        return func(*args, **kwargs)


def _apart(value: Any) -> Any:
    """Return a tensor whose rows have memory of their own: a kernel that multiplies by rows wants no others.

    Queries may be a parameter (Inkling 2), which is a view of few numbers here.
    """
    overlaps = isinstance(value, Tensor) and value.dim() > 1 and 0 < value.stride(-2) < value.shape[-1]
    return value.contiguous() if overlaps and value.stride(-1) == 1 else value


def _is_large(matrix: Any) -> bool:
    """Return whether a factor is a large weight of a trial, whose numbers lie on each other."""
    if not isinstance(matrix, Tensor) or matrix.dim() not in (2, 3):
        return False
    rows, columns = matrix.shape[-2:]
    return min(rows, columns) > SEGMENTS and rows * columns > LARGE and matrix.stride()[-2:] == (1, 1)


def _in_segments(values: Tensor) -> Tensor:
    """Return sums of 64 segments of the last dimension, of equal length; what is left over is left out."""
    each = values.shape[-1] // SEGMENTS
    return values[..., : each * SEGMENTS].reshape(*values.shape[:-1], SEGMENTS, each).sum(-1)
