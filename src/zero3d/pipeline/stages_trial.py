"""A trial of pipeline stages: whether, one after another in one process, they give what the whole model gives.

    whole      a copy with random weights, of images' features and of text alone
    first run  its stages, which are given all that the decoder of the first one is given     what has a gradient there?
    last run   its stages as they will be, without what nothing reads                         must be equal to the whole

Equal means, in fp64 and to rounding: the loss, what every block and every other module with parameters returns, and the
gradients of that, of embeddings and of images' features. Gradients of parameters follow from these.

The copy is packing_trial.py's: of each stage one block of each kind, with the model's own sizes. Weights are views
of few numbers, so that the size of a model hardly matters. Its towers are not run: features are random.
Nothing here is communicated, and all ranks find the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.bases import base_of, decoder_of
from zero3d.models.chain import Chain, refusal
from zero3d.models.document_masks import TOLD_APART
from zero3d.models.image_trial import SEQUENCES, TEXT, TrialImages
from zero3d.models.packing import forward_options
from zero3d.models.packing_trial import FIRST_ID, copied, random_ids
from zero3d.nested import map_tensors, tensors_in
from zero3d.pipeline.entry import BATCH, EMBEDDINGS, GIVEN, LENGTH, MADE, ROWS, TOKENS, Entry, Leaf

NEAR = 1e-8  # of the largest number that was wanted
FEW = 5  # tokens of an image
EVERYWHERE = 2**31  # in the place of a last block: all stages read it

NOTHING = Entry(())

Cut = Callable[[nn.Module, Chain, Entry, int], Any]  # (whole, chain, entry, number of a chunk) -> the chunk


class Differs(Exception):
    """Says what stages do not give as the whole model does."""


class Batch(NamedTuple):
    """A micro-batch of a trial.

    ids       [SEQUENCES, L]
    inputs    what the model's forward takes beside them
    features  what `get_image_features` returns, or None
    """

    ids: Tensor
    inputs: dict[str, Any]
    features: Any = None


def find_entry(model: nn.Module, chain: Chain, counts: Sequence[int], cut: Cut) -> tuple[Chain, Entry]:
    """Return what later stages must be given beside the hidden state, and the chain with the form of its blocks.

    Raises ConfigError where the stages do not give what the whole does, or cannot be tried.
    """
    try:
        return _tried(model, chain, counts, cut)
    except ConfigError:
        raise
    except Differs as error:
        why = f"{chain.doubt}, and " if chain.doubt else ""
        raise ConfigError(
            f"{refusal(model)}: {why}run one after another, its stages do not give what the whole model gives "
            f"({error}). Pass pp=1."
        ) from error
    except Exception as error:  # any error of its own, quoted
        line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        why = chain.doubt or f"its stages cannot be tried ({type(error).__name__}: {line})"
        raise ConfigError(f"{refusal(model)}: {why}. Pass pp=1.") from error


def _tried(model: nn.Module, chain: Chain, counts: Sequence[int], cut: Cut) -> tuple[Chain, Entry]:
    ends = list(accumulate(counts))

    def part_of(block: str) -> int:
        return bisect_right(ends, int(block.rpartition(".")[2])) if block.startswith(f"{chain.blocks}.") else 0

    with copied(model, False, True, 1, torch.float64, part_of) as trial, torch.enable_grad():
        batches = _batches(trial.eval(), chain.images)  # whose blocks are not recomputed then
        watch = Watch(trial, chain)
        runs = [_whole(trial, batch, watch) for batch in batches]
        outputs = runs[0][0]
        chain = replace(chain, tuples=watch.tuples, images=None)  # what is returned keeps no tensors of the trial
        given = runs[0][1]
        hidden = torch.zeros(*batches[0].ids.shape, chain.width)
        every = _candidates(given, _own(trial, chain, counts, cut, batches[0], hidden), batches[0])
        if not any(leaf.name == EMBEDDINGS for leaf in every):
            every.append(Leaf((GIVEN, EMBEDDINGS), 0, (BATCH, LENGTH, chain.width), None, EVERYWHERE))
        every += _made(trial, chain, outputs, batches[0])
        lists = frozenset(name for name, value in given.items() if isinstance(value, (list, tuple)))
        read: dict[int, int] = {}
        for batch in batches:
            for number, block in _chained(
                trial, chain, counts, cut, Entry(tuple(every), lists), batch, watch
            ).read.items():
                read[number] = max(block, read.get(number, 0))
        together = {
            leaf.name: max([read.get(n, 0) for n, other in enumerate(every) if other.name == leaf.name])
            for leaf in every
            if leaf.dtype is None
        }
        entry = Entry(
            tuple(
                leaf._replace(until=together.get(leaf.name, EVERYWHERE))
                for leaf in every
                if leaf.dtype is not None or together[leaf.name]
            ),
            lists,
        )
        for batch, (wanted, _) in zip(batches, runs, strict=True):
            _compare(wanted, _chained(trial, chain, counts, cut, entry, batch, watch).seen)
        return chain, entry


def _batches(trial: nn.Module, images: TrialImages | None) -> list[Batch]:
    """Return micro-batches of images, each at another place of its sequence, and of text alone."""
    generator = torch.Generator().manual_seed(2)
    numbers = set(_numbers(trial))
    features, tokens = (None, 0) if images is None else _features(images, generator)
    numbers |= {size for t in tensors_in(features) for size in t.shape[:-1]}  # rows of images are no sequence's
    length = next(n for n in range(tokens + TEXT, 10**6) if not {n, SEQUENCES * n} & numbers)
    ids = random_ids(trial, SEQUENCES, length, generator)
    text = Batch(ids, {"labels": ids})
    if images is None:
        return [text]
    image, with_images = base_of(trial).config.image_token_id, ids.clone()
    for row, sequence in enumerate(with_images):
        sequence[sequence == image] = FIRST_ID
        sequence[1 + row : 1 + row + tokens] = image
    kinds = {name: (with_images == image).long() for name in images.inputs if name in TOLD_APART}
    inputs = {name: t for name, t in images.inputs.items() if name not in kinds}
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    alone = {name: torch.zeros_like(ids) for name in kinds}
    return [
        Batch(with_images, {"labels": with_images, **inputs, **kinds}, features),
        text._replace(inputs={**text.inputs, **alone}),
    ]


def _features(images: TrialImages, generator: torch.Generator) -> tuple[Any, int]:
    """Return random features of images, and how many tokens each has: few, where nothing else tells how many."""
    many = images.ids.shape[1] - TEXT
    few = many if "image_grid_thw" in images.inputs else min(many, FEW)
    sizes = {many: few, SEQUENCES * many: SEQUENCES * few}

    def drawn(t: Tensor) -> Tensor:
        shape = [*(sizes.get(size, size) for size in t.shape[:-1]), *t.shape[-1:]]
        return torch.randn(shape, generator=generator) if t.is_floating_point() else t

    return map_tensors(images.features, drawn), few


def _numbers(trial: Any) -> Iterator[int]:
    """Yield the numbers of a configuration, which sizes must not be mistaken for."""
    waiting: list[Any] = [trial.config.to_dict()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, int):
            yield value


# --- what is compared ------------------------------------------------------------------------------------------------

Seen = dict[str, list[Tensor]]


class Watch:
    """Looks on a copy and on the chunks made of it: at what blocks and other modules return.

    outputs  by name of a module, of the runs since `begin`
    tuples   how long a tuple its blocks return; 0 where they return none
    """

    def __init__(self, trial: nn.Module, chain: Chain) -> None:
        self.outputs: Seen = {}
        self.tuples = 0
        self._watching = True
        blocks = {f"{chain.blocks}.{name}": m for name, m in trial.get_submodule(chain.blocks).named_children()}
        before = {name: trial.get_submodule(name) for name in (*chain.before, *chain.after)}
        for name, module in {**blocks, **before}.items():
            if next(module.parameters(), None) is not None or any(p is not None for p in module._parameters.values()):
                module.register_forward_hook(self._hook(name, name in blocks))

    def _hook(self, name: str, is_block: bool) -> Callable[[nn.Module, Any, Any], Any]:
        def look(module: nn.Module, args: Any, output: Any) -> Any:
            if is_block:
                self.tuples = len(output) if isinstance(output, tuple) else 0
            if isinstance(output, Tensor) and not output.requires_grad and output.is_floating_point():
                output = output.detach().requires_grad_()  # what embeddings return is where gradients end
            for tensor in tensors_in(output):
                if tensor.is_floating_point() and tensor.requires_grad:
                    tensor.retain_grad()
                    self.outputs.setdefault(name, []).append(tensor)
            return output

        return look

    def begin(self) -> None:
        """Forget the run before."""
        self.outputs = {}

    def seen(self, loss: Tensor, features: Sequence[Tensor]) -> Seen:
        """Return values and gradients of the run, behind its backward."""
        found = {"the loss": [loss.detach()]}
        for name, tensors in (*self.outputs.items(), ("images' features", features)):
            found[name] = [t.detach() for t in tensors]
            found[f"the gradient at {name}"] = [
                torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in tensors
            ]
        return found


def _compare(wanted: Seen, made: Seen) -> None:
    """Raise Differs for the first thing that is other than it was wanted."""
    for name, tensors in wanted.items():
        others = made.get(name, [])
        if len(others) != len(tensors):
            raise Differs(f"{name} is there {len(others)} times, not {len(tensors)}")
        for one, other in zip(tensors, others, strict=True):
            off = float((one - other).abs().max() / one.abs().max().clamp_min(1e-30)) if one.numel() else 0.0
            if not off <= NEAR:
                raise Differs(f"{name} is off by {off:.1g}")


# --- running -----------------------------------------------------------------------------------------------------


def _heard(module: nn.Module, run: Callable[[], Any]) -> dict[str, list[Tensor]]:
    """Return the tensors that a module is given by keyword when something runs."""
    heard: dict[str, list[Tensor]] = {}

    def hear(_: nn.Module, __: Any, kwargs: Mapping[str, Any]) -> None:
        heard.update((name, list(tensors_in(value))) for name, value in kwargs.items())

    hook = module.register_forward_pre_hook(hear, with_kwargs=True)
    try:
        run()
    finally:
        hook.remove()
    return heard


def _candidates(given: Mapping[str, Any], own: Mapping[str, Sequence[Tensor]], batch: Batch) -> list[Leaf]:
    """Return all that later stages might be given, but for masks and what they make themselves.

    given  what the decoder of the whole model is given; own: that of a later stage
    """
    leaves = []
    known = list(tensors_in([batch.ids, batch.inputs]))
    for name, value in given.items():
        tensors, others = list(tensors_in(value)), own.get(name, ())
        made = len(others) == len(tensors) and all(map(_same, tensors, others))
        if made or isinstance(value, Mapping) or any(t is other for t in tensors for other in known):
            continue
        for part, tensor in enumerate(tensors):
            sizes = _sizes(tensor, batch.ids.shape)
            if sizes[-2:] != (LENGTH, LENGTH):
                dtype = None if tensor.is_floating_point() else tensor.dtype
                leaves.append(Leaf((GIVEN, name), part, sizes, dtype, EVERYWHERE))
    return leaves


def _made(trial: nn.Module, chain: Chain, outputs: Seen, batch: Batch) -> list[Leaf]:
    """Return what modules of a decoder make before its blocks, but for its embedding, which blocks may read again."""
    decoder, embedding = decoder_of(trial), base_of(trial).get_input_embeddings()
    inside = set(decoder.modules()) - {embedding}
    names = [name for name in chain.before if trial.get_submodule(name) in inside and len(outputs.get(name, ())) == 1]
    return [Leaf((MADE, name), 0, _sizes(outputs[name][0], batch.ids.shape), None, EVERYWHERE) for name in names]


def _same(tensor: Tensor, other: Tensor) -> bool:
    return not tensor.requires_grad and tensor.shape == other.shape and bool((tensor == other).all())


def _sizes(tensor: Tensor, ids_shape: Sequence[int]) -> tuple[int | str, ...]:
    """Return the sizes of a tensor by what they follow from."""
    batch, length = ids_shape
    sizes: list[int | str] = [
        LENGTH if size == length else TOKENS if size == batch * length else size for size in tensor.shape
    ]
    for place, size in enumerate(sizes[:-1]):
        if size == batch and sizes[place + 1] == LENGTH:
            sizes[place] = BATCH
    if tensor.is_floating_point() and not {LENGTH, TOKENS} & set(sizes) and tensor.shape[0] <= batch * length:
        sizes[0] = ROWS
    return tuple(sizes)


@contextmanager
def _with_features(trial: nn.Module, batch: Batch) -> Iterator[list[Tensor]]:
    """Have the copy and what is copied of it inside return a micro-batch's features for its images; yield these."""
    leaves: list[Tensor] = []

    def leaf(t: Tensor) -> Tensor:
        leaves.append(t.detach().requires_grad_(t.is_floating_point()))
        return leaves[-1]

    base = base_of(trial)
    if batch.features is None:
        yield leaves
        return
    features = map_tensors(batch.features, leaf)
    base.get_image_features = lambda *_, **__: features
    try:
        yield [t for t in leaves if t.requires_grad]
    finally:
        del base.get_image_features


def _whole(trial: nn.Module, batch: Batch, watch: Watch) -> tuple[Seen, dict[str, Any]]:
    """Return what the whole model makes, and what its decoder is given."""
    given: dict[str, Any] = {}
    hook = decoder_of(trial).register_forward_pre_hook(lambda _, __, kwargs: given.update(kwargs), with_kwargs=True)
    watch.begin()
    with _with_features(trial, batch) as features:
        output = trial(input_ids=batch.ids, **batch.inputs, **forward_options(trial))
    hook.remove()
    loss = _loss(output)
    torch.autograd.backward(loss)
    return watch.seen(loss, features), given


def _own(
    trial: nn.Module, chain: Chain, counts: Sequence[int], cut: Cut, batch: Batch, hidden: Tensor
) -> dict[str, list[Tensor]]:
    """Return what the decoder of a later stage is given where the stage is sent the hidden state alone."""
    chunk = cut(trial, chain, NOTHING, len(counts) - 1)
    with suppress(Exception), torch.no_grad():  # where it does not run so, it makes nothing itself
        return _heard(decoder_of(chunk.whole), lambda: chunk(hidden, **batch.inputs))
    return {}


class Chained(NamedTuple):
    """What stages in a row have made: values and gradients; by number of a leaf the last first block that reads it."""

    seen: Seen
    read: dict[int, int]


def _chained(
    trial: nn.Module, chain: Chain, counts: Sequence[int], cut: Cut, entry: Entry, batch: Batch, watch: Watch
) -> Chained:
    watch.begin()
    with _with_features(trial, batch) as features:
        chunks = [cut(trial, chain, entry, number) for number in range(len(counts))]
    inputs = batch.inputs
    passed: tuple[Tensor, ...] = (batch.ids,)
    between: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    output: Any = None
    for chunk in chunks:
        output = chunk(*passed, **inputs)
        if not chunk.is_last:
            outputs = output if isinstance(output, tuple) else (output,)
            passed = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in outputs)
            between.append((outputs, passed))
    loss = _loss(output)
    torch.autograd.backward(loss)
    for outputs, received in reversed(between):
        pairs = [(sent, came.grad) for sent, came in zip(outputs, received, strict=True) if came.grad is not None]
        pairs = [(sent, grad) for sent, grad in pairs if sent.requires_grad]
        torch.autograd.backward([sent for sent, _ in pairs], [grad for _, grad in pairs])
    return Chained(watch.seen(loss, features), _read(entry, counts, between))


def _read(entry: Entry, counts: Sequence[int], between: Sequence[tuple[Any, tuple[Tensor, ...]]]) -> dict[int, int]:
    """Return by number of a leaf the first block of the last stage that has a gradient for it."""
    found: dict[int, int] = {}
    for chunk, (_, received) in enumerate(between, 1):
        block = sum(counts[:chunk])
        floats = entry.floats(block)
        came = received[len(received) - 1 - len(floats) : -1] if floats else ()
        for leaf, tensor in zip(floats, came, strict=True):
            if tensor.grad is not None and bool(tensor.grad.any()):
                found[entry.leaves.index(leaf)] = block
    return found


def _loss(output: Any) -> Tensor:
    """Return the loss in what a forward returns, or the sum of squares of its first tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    return next(t for t in tensors_in(output) if t.is_floating_point()).square().sum()
