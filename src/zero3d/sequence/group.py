"""Puts the sequence axis into a model, and takes it out again: for generation, and when an engine is closed."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn

from zero3d.account.traffic import Moved, Sent
from zero3d.distributed.collectives import Comm
from zero3d.errors import ConfigError
from zero3d.models.bases import decoder_of, image_model, layer_numbers, model_of, sees_images
from zero3d.models.packing import inner_model
from zero3d.models.placeholders import LENGTH
from zero3d.sequence.attention import SharedAttention
from zero3d.sequence.blocks import Fallback
from zero3d.sequence.entry import Entry, Within
from zero3d.sequence.loss import LOSSES, SHIFTED, GroupLoss, GroupRouting, GroupScores, gives_scores
from zero3d.sequence.mixers import SharedMixers, check_heads
from zero3d.sequence.positions import Positions
from zero3d.sequence.shares import Attended, Halo, MaskTooLarge, Scanned, Sharing, States, even_parts, loss_values
from zero3d.sequence.trial import find_positions, mixing_layers, try_rows
from zero3d.spec.mesh import HEADS, PREFIX
from zero3d.tensor_parallel.vocabulary import calls_loss, shifted

IMPLEMENTATIONS = ("sdpa", "eager")
_numbers = count()  # of groups in this process: each registers its attention under a name of its own


class Calls(NamedTuple):
    """Counts calls that are alike: of what mixes tokens by module and direction, of the loss and what it gathers."""

    mixing: Counter[tuple[str, Attended | Halo | Scanned | States, bool]]
    loss: Counter[tuple[int, int, int]]

    def less(self, before: Calls) -> Calls:
        """Return the calls since then."""
        return Calls(self.mixing - before.mixing, self.loss - before.loss)

    def plus(self, more: Calls) -> Calls:
        """Return the sum."""
        return Calls(self.mixing + more.mixing, self.loss + more.loss)

    def traffic(self, rank: int, ranks: int) -> Iterator[Sent]:
        """Yield what a rank has sent in them, by formula."""
        for (name, call, backward), times in self.mixing.items():
            yield Sent("sp", "pass_rows", name, call.sent(rank, ranks, backward).times(times))
        for (batch, length, itemsize), times in self.loss.items():
            values = loss_values(batch, length, ranks)
            yield Sent("sp", "exchange", "-", Moved(1, values, values * itemsize).times(times))


class SequenceGroup:
    """The sp group of an engine, whose model is given whole micro-batches and computes this rank's rows of them."""

    def __init__(
        self, chunks: Iterable[nn.Module], comm: Comm, sharing: Sharing, speaks: bool, positions: Positions
    ) -> None:
        """Install the group in this rank's chunks of a model that `check_sequence` has passed, in place.

        speaks     this rank tells people what it chooses in a forward
        positions  what `check_sequence` returned
        """
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        chunks = list(chunks)
        models: list[Any] = [model_of(chunk) for chunk in chunks]
        decoders = [decoder_of(model) for model in models]
        self._sharing = sharing
        self._comm, self._configs = comm, {id(decoder.config): decoder.config for decoder in decoders}
        self._own: str = decoders[0].config._attn_implementation
        self._name = f"sequence_parallel_{next(_numbers)}"
        functions = ALL_ATTENTION_FUNCTIONS
        names = {module: name for model in models for name, module in model.named_modules()}
        masks = ALL_MASK_ATTENTION_FUNCTIONS
        self._masks = masks
        self._fallback = Fallback(decoders[0], comm.device, speaks)
        self._attention = SharedAttention(
            _function(decoders[0], self._own), self._own == "eager", comm, sharing, self._fallback, names
        )
        functions.register(self._name, self._attention)
        masks.register(self._name, self._mask)
        self._forget = weakref.finalize(decoders[0], _forget, self._name)
        self._mixers = SharedMixers(comm, models, sharing.mixers)
        told = self._fallback, positions, self._attention.tell, self._mixers.of
        self._entries = [Entry(each, self._own, comm.rank, sharing, *told) for each in decoders]
        for chunk, decoder, entry in zip(chunks, decoders, self._entries, strict=True):
            if chunk is not decoder:
                chunk.register_forward_pre_hook(entry.hear, with_kwargs=True)
            decoder.register_forward_pre_hook(entry, with_kwargs=True)
            decoder.register_forward_hook(entry.leave, always_call=True)
        self._routing = GroupRouting(comm)
        for chunk, decoder in zip(chunks, decoders, strict=True):
            if getattr(chunk, "is_last", True):  # where a pipeline's head has the router logits of all chunks
                decoder.register_forward_hook(self._gather_routed)
        inners: list[Any] = [inner_model(model) for model in models]
        self._losses = [found for inner in inners if (found := _take_loss(inner, comm)) is not None]
        self._scores = [_take_scores(inner, comm) for inner in inners if gives_scores(inner.forward)]
        self._set(self._name)

    @property
    def implementation(self) -> str:
        """Return the name of the attention that the model has without the group."""
        return self._own

    @property
    def mixers(self) -> str:
        """Return how recurrences are shared out."""
        return self._sharing.mixers

    @property
    def masks(self) -> str:
        """Return how masks are made, on which an accelerator's bits depend."""
        return self._fallback.describe(self._sharing.masked)

    def by_heads(self, tp: int) -> bool:
        """Return whether attention is shared out by heads, or else by rows, to which keys are gathered."""
        text = next(iter(self._configs.values())).get_text_config()
        heads = layer_numbers(text, "num_attention_heads")
        query, key = (min(n, default=0) // tp for n in (heads, layer_numbers(text, "num_key_value_heads") or heads))
        return self._sharing.by_heads(query, max(1, key))

    def describe(self, tp: int) -> str:
        """Say how sequences are shared out, and attention."""
        by = "heads" if self.by_heads(tp) else "rows, to which keys are gathered"
        told = f"sequences over {self._sharing.ranks} ranks, attention by {by}"
        told += ", recurrences by states" * (self.mixers == PREFIX)
        return f"{told}, exact for mesh.sp={self._sharing.ranks} alone" if self._sharing.repeats else told

    def _set(self, implementation: str) -> None:
        for config in self._configs.values():
            config._attn_implementation = implementation
        self._cuts = implementation == self._name
        for entry in self._entries:
            entry.open = self._cuts

    def _mask(self, *args: Any, **options: Any) -> Any:
        """Make a mask of whole sequences; inside the decoder, which was handed that and has rows, make none."""
        if any(entry.inside for entry in self._entries):
            return None
        try:
            with Within(self._sharing, options["q_length"]):
                return self._masks[self._own](*args, **options)
        except MaskTooLarge as refused:
            return self._masks[self._fallback.choose(refused, documents=False)](*args, **options)

    def _gather_routed(self, decoder: nn.Module, args: Any, output: Any) -> None:
        """Give the head router logits of whole sequences, for the loss that balances experts: a forward hook."""
        routed = getattr(output, "router_logits", None)
        if self._cuts and routed:
            batch = output.last_hidden_state.shape[0]
            output["router_logits"] = self._routing.gather(routed, batch, self._attention.length)

    def own_shape(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what this rank computes of token ids, [.., S]: all of them inside `whole()`."""
        return (*ids[:-1], len(even_parts(ids[-1], self._comm.size)[self._comm.rank]) if self._cuts else ids[-1])

    def with_length(self, batch: Any) -> Any:
        """Return a micro-batch that says how long its sequences are: a pipeline's later stages are given rows."""
        return {**batch, LENGTH: batch["input_ids"].shape[1]} if isinstance(batch, Mapping) else batch

    def own_part(self, batch: Any) -> Any:
        """Return a micro-batch as a loss of one's own sees it, beside an output of this rank's rows.

        What has the sequence for its second dimension is cut; `shift_labels` are the rows' targets.
        """
        if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):
            return batch
        length = batch["labels"].shape[1]
        rows = even_parts(length, self._comm.size)[self._comm.rank]
        whole = {**batch, "shift_labels": shifted(batch["labels"])}
        return {
            name: t[:, rows.start : rows.stop] if isinstance(t, Tensor) and t.dim() > 1 and t.shape[1] == length else t
            for name, t in whole.items()
        }

    @property
    def calls(self) -> Calls:
        """Return how often attention and loss were called since the beginning."""
        counted: Iterable[Any] = (*self._attention.calls.items(), *self._mixers.calls.items())
        mixed: Counter[Any] = Counter()
        for name, calls in counted:
            mixed.update({(name, *key): times for key, times in calls.items()})
        exchanging: list[Any] = [*self._losses, *self._scores]
        return Calls(mixed, sum((each.calls for each in exchanging), self._routing.calls))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave calls inside out of the counts."""
        counted: list[Any] = [*self._losses, *self._scores, self._routing, self._attention, self._mixers]
        before = [copy.deepcopy(each.calls) for each in counted]
        try:
            yield
        finally:
            for each, calls in zip(counted, before, strict=True):
                each.calls = calls

    def traffic(self, calls: Calls) -> Iterator[Sent]:
        """Yield what this rank has sent in calls, by formula."""
        return calls.traffic(self._comm.rank, self._comm.size)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let sequences go through the model whole, on every rank by itself, inside: for generation."""
        self._set(self._own)
        try:
            yield
        finally:
            self._set(self._name)

    def close(self) -> None:
        """Give the model its own attention back; hooks and losses are undone with the engine's other changes."""
        self._set(self._own)
        self._mixers.close()
        self._forget()


def check_sequence(model: nn.Module, sp: int, tp: int, sharing: str, mixers: str = HEADS) -> Positions:
    """Return how a model makes positions; refuse one whose sequences cannot be shared out over sp ranks.

    sharing, mixers  mesh.sp_kind and mesh.sp_mixers. Raises ConfigError.
    """
    decoder, inner = decoder_of(model), inner_model(model)
    kind = type(inner).__name__
    if decoder is None or not hasattr(decoder.config, "_attn_implementation"):
        raise ConfigError(
            f"mesh.sp={sp} replaces the attention of Hugging Face models, and {kind} is not one of them: type "
            "mesh.sp=1."
        )
    if sees_images(model) and image_model(model) is decoder:
        raise ConfigError(
            f"mesh.sp={sp} splits sequences where the language model begins, and {type(decoder).__name__} of {kind} "
            "puts images into whole sequences itself: type mesh.sp=1."
        )
    text = decoder.config.get_text_config()
    if text._attn_implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"mesh.sp={sp} works with sdpa or eager attention, and {kind} has {text._attn_implementation}: type "
            "model.attn=sdpa."
        )
    if getattr(text, "is_encoder_decoder", False):
        raise ConfigError(
            f"mesh.sp={sp} splits a single sequence, and {kind}, an encoder and a decoder, has two: type mesh.sp=1."
        )
    if (layers := mixing_layers(decoder)) is not None:
        raise ConfigError(
            f"mesh.sp={sp} needs a model in which tokens are mixed by attention, and by convolutions and recurrences "
            f"that it knows, and {kind} has {layers}: type mesh.sp=1. activations=full and mesh.tp save memory with "
            "long sequences, too."
        )
    if getattr(text, "hidden_size_per_layer_input", None):
        raise ConfigError(
            f"mesh.sp={sp} splits hidden states where the language model begins, but {kind} also feeds the tokens "
            "themselves to each layer: type mesh.sp=1."
        )
    heads = min(layer_numbers(text, "num_attention_heads"), default=None)
    if sharing == "heads" and heads is not None and tp * sp > heads:
        raise ConfigError(
            f"mesh.sp={sp} x mesh.tp={tp} = {tp * sp} is more than the {heads} attention heads of {kind}, which they "
            f"share: type mesh.sp={max(1, heads // tp)} or less, or mesh.sp_kind=gather."
        )
    tried = try_rows(decoder)
    if tried.mixing is not None:
        raise ConfigError(
            f"mesh.sp={sp} needs a model in which tokens are mixed by attention, and by convolutions and recurrences "
            f"that it knows, and {kind} mixes them elsewhere, too: {tried.mixing} gives a part of a sequence other "
            "values than the whole. Type mesh.sp=1."
        )
    if (scanned := tried.heads(mixers)) is not None:
        check_heads(f"the recurrences of {kind}", scanned, sp, tried.heads(PREFIX) is None)
    if (positions := find_positions(decoder)) is None:
        raise ConfigError(
            f"mesh.sp={sp} gives each rank the positions of its rows, and where {kind} is given none, it counts "
            "neither rows, nor what the attention mask shows, nor tokens that are not padding: type mesh.sp=1."
        )
    return positions


def _forget(name: str) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        functions._global_mapping.pop(name, None)


def _take_loss(inner: Any, comm: Comm) -> GroupLoss | None:
    """Put the group's loss in the place of a model's loss of tokens; None, and no labels, for a model that has none."""
    loss: Any = getattr(inner, "loss_function", None)
    if not has_known_loss(inner):
        inner.register_forward_pre_hook(partial(_refuse_labels, inspect.signature(inner.forward)), with_kwargs=True)
        return None
    inner.loss_function = taken = GroupLoss(loss, comm, getattr(loss, "__name__", SHIFTED) == SHIFTED)
    return taken


def _take_scores(inner: Any, comm: Comm) -> GroupScores:
    """Put the group's numbers of labels in the place of those of rows."""
    inner.forward = taken = GroupScores(inner.forward, comm)
    return taken


def has_known_loss(inner: nn.Module) -> bool:
    """Return whether a model calls a loss of tokens that the group's can stand for."""
    loss: Any = getattr(inner, "loss_function", None)
    return calls_loss(inner) and (hasattr(loss, "of_tokens") or getattr(loss, "__name__", "") in LOSSES)


def _refuse_labels(signature: inspect.Signature, inner: nn.Module, args: Any, kwargs: Any) -> None:
    given = signature.bind_partial(*args, **kwargs).arguments
    if (
        name := next((name for name in ("labels", "start_positions") if given.get(name) is not None), None)
    ) is not None:
        raise ConfigError(own_loss(inner, name))


def own_loss(inner: nn.Module, name: str = "labels") -> str:
    """Return why ranks cannot share the targets of a loss that the model computes in its own way."""
    return (
        f"{type(inner).__name__} computes a loss of its own from its {name}, not one of transformers' losses of "
        f"tokens ({', '.join(LOSSES)}), and mesh.sp cannot split {name} for it: pass no {name} and a loss of "
        "rows, Engine(loss=...), or type mesh.sp=1."
    )


def _function(decoder: Any, implementation: str) -> Any:
    """Return the attention function that a model calls: a registered one, or that of its file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[implementation]
    own = vars(sys.modules[type(decoder).__module__]).get("eager_attention_forward")
    if own is None and not any("Attention" in type(module).__name__ for module in decoder.modules()):
        return ALL_ATTENTION_FUNCTIONS["sdpa"]  # which nothing calls
    if own is None:
        raise ConfigError(f"{type(decoder).__name__} has no eager attention of its own to call: type model.attn=sdpa.")
    return own
