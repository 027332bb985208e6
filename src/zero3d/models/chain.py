"""Whether a model is a chain, embedding - blocks - norm and head: it is run once without weights and blocks.

    before      modules with parameters that run before the first block: embeddings
    blocks      one list; each takes the hidden state that the one before it returned, untouched
    after       modules that run after the last block: norm, head

A second trial enters the model as later pipeline stages do, by a hidden state: blocks must get what they got.
Trials run on the CPU with parameters of zeros that take no memory (`expand`), whatever device
the model is on, and with stand-ins for its blocks. So names and the order of registration do not
matter, and a model that is no chain is refused instead of trained wrongly.

Where a Hugging Face model's blocks get more than later stages make by themselves, the chain has a `doubt`: whether it
can be cut is found by running its stages (pipeline/stages_trial.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.memory.arena import host_value
from zero3d.models.bases import base_of, decoder_of, language_model
from zero3d.models.blocks import find_blocks, owns
from zero3d.models.copies import copy_with, without_weights
from zero3d.models.image_trial import TrialImages, trial_images
from zero3d.models.images import is_for_towers
from zero3d.models.packing import forward_options, inner_model
from zero3d.models.placeholders import ChunkTensors, Placeholder, SkippedModule, first_argument, in_form
from zero3d.nested import tensors_in

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Chain:
    """A model's modules in the order in which a chain runs them, by name.

    blocks     name of the list of blocks; `length` of them
    before     modules that only the first pipeline stage needs
    after      modules that only the last one needs
    tuples     how long a tuple blocks return, which begins with the hidden state; 0 where it is the hidden state itself
    width      of the hidden state
    doubt      why later stages may miss something; "" where they need nothing but the hidden state
    loose      names of parameters beside modules that only the first stage needs
    images     sequences with images that its trial was given
    """

    blocks: str
    length: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    tuples: int
    width: int
    doubt: str = ""
    loose: tuple[str, ...] = ()
    images: TrialImages | None = field(default=None, compare=False, repr=False)

    def is_before(self, name: str) -> bool:
        """Return whether a parameter is one that only the first pipeline stage needs."""
        return name in self.loose or any(name.startswith(f"{module}.") for module in self.before)


def loose_parameter(model: nn.Module, name: str) -> Tensor:
    """Return what stands in the place of a parameter of this name: in a trial a tensor that is none."""
    holder, _, own = name.rpartition(".")
    found = model.get_submodule(holder)._parameters[own]
    assert found is not None
    return found


def find_chain(model: nn.Module, blocks: str | None = None) -> Chain:
    """Return the chain that `model` is, with the list of blocks called `blocks` (found if left out).

    One with a doubt is for `pipeline.split.chain_of` to decide about.
    Errors: no list or several, parameters that belong to no module of their own, a forward that is
    no chain or cannot run on token ids (ConfigError).
    """
    names = block_lists(model, blocks)
    if len(names) > 1:
        raise ConfigError(_several(model, names))
    _refuse_layer_drop(model)
    return _chain_of(model, names[0])


def _chain_of(model: nn.Module, name: str) -> Chain:
    """Return the chain whose blocks are in the list of this name. Raises ConfigError."""
    outside, loose = _outside(model, name)
    images = trial_images(model, outside)
    refusals, doubtful = [], None
    for tuples in (0, 1, 2):
        try:
            record = _trial(model, name, outside, tuples, images)
            chain = replace(
                _sorted(model, name, outside, record, tuples), doubt=record.doubt, loose=loose, images=images
            )
        except ConfigError as error:
            refusals.append(error)
        else:
            chain = chain if chain.doubt else replace(chain, doubt=_doubt_of_later_stage(model, chain, outside, record))
            if not chain.doubt:
                return chain
            doubtful = doubtful or chain
    if doubtful is not None:
        return doubtful
    raise refusals[0]


def block_lists(model: nn.Module, name: str | None) -> list[str]:
    """Return the names of the lists of blocks, or `name` where it is one's: at least one. Raises ConfigError."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))}
    if name is not None:
        if name in lists and len(lists[name]) > 0:
            return [name]
        raise ConfigError(f"blocks={name!r} names no list of modules of {type(model).__name__}. {_listed(lists)}")
    of_blocks = {block.rpartition(".")[0] for block in find_blocks(model)} & set(lists)
    if text := language_model(model):
        of_blocks = {name for name in of_blocks if name.startswith(f"{text}.")}
    if of_blocks:
        return sorted(of_blocks)
    single = _lists_of_one(lists)
    if len(single) == 1:
        return single
    raise ConfigError(
        f"{type(model).__name__} has no list of two or more blocks to cut into pipeline stages. {_listed(lists)}"
    )


def _several(model: nn.Module, names: Sequence[str]) -> str:
    """Say what to type where there are several lists of blocks: the one of which the model is a chain, if any."""
    listed = f"{type(model).__name__} has {len(names)} lists of blocks: {', '.join(names)}."
    refused = ""
    for name in sorted(names, key=lambda name: -sum(p.numel() for p in model.get_submodule(name).parameters())):
        try:
            _chain_of(model, name)
        except ConfigError as error:
            refused = refused or f"with blocks={name!r} {error}"
        else:
            return f"{listed} Name the one to cut into pipeline stages: blocks={name!r} (mesh.blocks in a file)."
    return f"{listed} None of them can be cut alone; {refused}"


def early_beside_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return embeddings and matrices of a language model that run before its blocks, though registered behind them.

    Gemma 4 has such, by which each layer has an input of its own. They are looked for where a language model has
    matrices beside its blocks; none are known of one that is no chain.
    """
    decoder = decoder_of(model)
    if decoder is None:
        return {}
    names = {module: name for name, module in model.named_modules()}
    beside = {names[module]: module for module in decoder.children() if isinstance(module, (nn.Embedding, nn.Linear))}
    if not any(isinstance(module, nn.Linear) for module in beside.values()):
        return {}
    try:
        before = find_chain(model).before
    except ConfigError:
        return {}
    return {name: module for name, module in beside.items() if name in before}


def _refuse_layer_drop(model: nn.Module) -> None:
    """Refuse models that skip blocks at random, for each stage would skip others. Raises ConfigError."""
    config: Any = getattr(inner_model(model), "config", None)
    for name in ("layerdrop", "decoder_layerdrop"):
        if (getattr(config, name, None) or 0) > 0:
            raise ConfigError(
                f"{refusal(model)}: it skips layers at random ({name}={getattr(config, name)}), and each stage would "
                f"skip different ones. Set {name} to 0.0 in its config before it is built, or pass pp=1."
            )


def _listed(lists: Mapping[str, nn.Module]) -> str:
    """Say which lists there are, and what to type."""
    sizes = {name: len(list(module.children())) for name, module in lists.items() if name}
    names = ", ".join(f"{name} ({size})" for name, size in list(sizes.items())[:8]) or "none"
    if max(sizes.values(), default=0) < 2:
        return f"Its lists: {names}. Put its blocks in an nn.ModuleList, or pass pp=1."
    return f"Its lists: {names}. Pass blocks='NAME' of an nn.ModuleList (mesh.blocks=NAME in a file), or pp=1."


def _lists_of_one(lists: Mapping[str, nn.Module]) -> list[str]:
    """Return the outermost nn.ModuleLists of a single module with parameters and modules of its own, as a block has."""
    names: list[str] = []
    for name, module in lists.items():
        if isinstance(module, nn.ModuleList) and len(module) == 1 and owns(module):
            inside = any(name.startswith(outer + ".") for outer in names)
            names += [name] if name and not inside and any(True for _ in module[0].children()) else []
    return names


def _outside(model: nn.Module, blocks: str) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Return the outermost modules outside the list of blocks that have parameters or draw random numbers, by name.

    Behind them names of parameters that lie beside these around the language model of a vision-language one: what
    comes before that has them. Raises ConfigError for others.
    """
    outside: dict[str, nn.Module] = {}
    loose: list[str] = []
    path, text = blocks.split("."), language_model(model)
    for depth in range(len(path)):
        around = ".".join(path[:depth])
        holder = model.get_submodule(around)
        for name, _ in holder.named_parameters(recurse=False):
            loose.append(f"{around}.{name}".lstrip("."))
            if text.startswith(f"{around}.") and base_of(model) is holder:
                continue
            raise ConfigError(
                f"{loose[-1]} is a parameter of {type(holder).__name__} itself, so it cannot be "
                "placed on one pipeline stage: move it into a module of its own, or pass pp=1."
            )
        for name, child in holder.named_children():
            if name != path[depth] and (owns(child) or isinstance(child, DROPOUTS)):
                outside[f"{around}.{name}".lstrip(".")] = child
    return outside, tuple(loose)


@dataclass
class _TrialRecord:
    """Records a trial run: which modules and blocks were called, and on what.

    ids            the token ids of the run
    of_all_stages  what later pipeline stages get beside it, too
    order          names of modules outside the blocks, and indices of blocks, as they were called
    latest         the hidden state that the latest block returned
    other_tensors  tensors that each block was given beside its hidden state
    strict         whether what later stages may miss is refused; else it is a `doubt`, the first one
    """

    ids: Tensor
    of_all_stages: dict[str, Tensor] = field(default_factory=dict)
    order: list[str | int] = field(default_factory=list)
    latest: Tensor | None = None
    other_tensors: list[list[Tensor]] = field(default_factory=list)
    strict: bool = True
    doubt: str = ""

    def may_miss(self, what: str) -> None:
        """Note what a later stage may miss. Raises ConfigError where nothing can be sent beside a hidden state."""
        if self.strict:
            raise ConfigError(what)
        self.doubt = self.doubt or what


class _TrialBlock(Placeholder):
    """Stands for a block in a trial: checks what it is given, and returns a new hidden state."""

    def __init__(self, module: nn.Module, index: int, record: _TrialRecord, tuples: int) -> None:
        super().__init__(module)
        self._index = index
        self._record = record
        self._tuples = tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        record, index = self._record, self._index
        hidden = first_argument(args, kwargs)
        if record.latest is not None and hidden is not record.latest:
            record.may_miss(f"something happens to the hidden state between blocks {index - 1} and {index}")
        for value in tensors_in([args, kwargs]):
            if value is record.ids:
                record.may_miss(f"block {index} takes the token ids, which only the first pipeline stage has")
            if value is not hidden and value.requires_grad:
                record.may_miss(f"block {index} takes a second tensor with a gradient, {list(value.shape)}")
        record.order.append(index)
        record.other_tensors.append([value for value in tensors_in([args, kwargs]) if value is not hidden])
        record.latest = torch.zeros_like(hidden).requires_grad_()
        return in_form(record.latest, self._tuples)


def _trial(
    model: nn.Module, blocks: str, outside: Mapping[str, nn.Module], tuples: int, images: TrialImages | None
) -> _TrialRecord:
    """Run a copy on two sequences of three tokens, and an image where it takes some; return what was called."""
    ids = torch.zeros(2, 3, dtype=torch.long, device="cpu") if images is None else images.ids
    record = _TrialRecord(ids, strict=base_of(model) is None)
    trial = _copy_without_weights(model, blocks, record, tuples, {})
    base = base_of(trial)
    for name in outside:
        trial.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: record.order.append(name))
    run = trial if base is None else base
    inputs: dict[str, Tensor] = {}
    if images is not None:
        inputs, record.order[:] = images.inputs, images.ran
        record.of_all_stages = {name: t for name, t in inputs.items() if not is_for_towers(name)}
        base.get_image_features = lambda *_, **__: images.features
    try:
        with torch.enable_grad(), torch.device("cpu"):
            run(record.ids, **forward_options(run), **inputs)
    except ConfigError as error:
        raise ConfigError(f"{refusal(model)}: {error}. Pass pp=1.") from error
    except Exception as error:  # any error of its own, quoted
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"{refusal(model)}: called with token ids {list(record.ids.shape)}, it raises {type(error).__name__}: "
            f"{line}. Pass pp=1."
        ) from error
    return record


def _copy_without_weights(
    model: nn.Module, blocks: str, record: _TrialRecord, tuples: int, others: dict[nn.Module | Tensor, object]
) -> Any:
    """Copy a model in eval mode without weights, with trial blocks and with `others` replaced."""
    children = list(model.get_submodule(blocks).children())
    replaced = without_weights(model)
    replaced |= {block: _TrialBlock(block, index, record, tuples) for index, block in enumerate(children)}
    return copy_with(model, replaced | others).eval()


def _doubt_of_later_stage(model: nn.Module, chain: Chain, outside: Mapping[str, nn.Module], first: _TrialRecord) -> str:
    """Run a copy as a later pipeline stage does, which has no token ids; return what is other than on the first."""
    if base_of(model) is None or first.latest is None:
        return ""
    record = _TrialRecord(first.ids, strict=False)
    hidden = torch.zeros_like(first.latest)
    tensors = ChunkTensors(received=hidden)
    skipped: dict[nn.Module | Tensor, object] = {m: SkippedModule(m, tensors) for m in outside.values()}
    base = base_of(_copy_without_weights(model, chain.blocks, record, chain.tuples, skipped))
    try:
        with torch.no_grad(), torch.device("cpu"):
            base(inputs_embeds=hidden, **first.of_all_stages, **forward_options(base))
    except Exception as error:  # noqa: BLE001 (any error of its own, quoted)
        line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        return (
            f"called with inputs_embeds {list(hidden.shape)} instead of token ids, as later stages "
            f"are, it raises {type(error).__name__}: {line}"
        )
    if hidden._version > 0:
        return "it modifies inputs_embeds in place, which on later stages is the hidden state received"
    given, expected = record.other_tensors, first.other_tensors
    if record.doubt or len(given) != len(expected) or not all(map(_equal, given, expected)):
        return (
            "its blocks get different masks or positions when it is called with inputs_embeds "
            "instead of token ids, as later stages are"
        )
    return ""


def _equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether these are the same tensors; in a dry run, where values do not exist, whether their shapes are."""
    if [t.shape for t in first] != [t.shape for t in second]:
        return False
    return all(host_value((a == b).all().view(1), [1.0]) == [1.0] for a, b in zip(first, second, strict=True))


def refusal(model: nn.Module) -> str:
    """Say that a model cannot be cut."""
    return f"{type(model).__name__} cannot be cut into pipeline stages"


def _sorted(model: nn.Module, blocks: str, outside: Mapping[str, nn.Module], seen: _TrialRecord, tuples: int) -> Chain:
    """Sort modules outside the blocks into those that run before and those that run after.

    A Hugging Face head lies around the model that a trial runs: it comes after.
    """
    calls = seen.order
    length = len(list(model.get_submodule(blocks).children()))
    ran = [index for index in calls if isinstance(index, int)]
    if ran != list(range(length)):
        raise ConfigError(f"{refusal(model)}: its {length} blocks run in the order {ran[:20]}. Pass pp=1.")
    start, stop = calls.index(0), calls.index(length - 1)
    base = base_of(model)
    head = set() if base is None else set(model.modules()) - set(base.modules())
    after = set(calls[stop + 1 :]) | {name for name, module in outside.items() if module in head}
    early = set(calls[:start])
    before: list[str] = []
    later: list[str] = []
    for name, module in outside.items():
        where = [name in early, name in calls[start:stop], name in after]
        if where == [True, False, False]:
            before.append(name)
        elif where == [False, False, True]:
            later.append(name)
        elif owns(module):
            fault = "runs between blocks" if where[1] else "runs at both ends" if any(where) else "never runs"
            raise ConfigError(
                f"{refusal(model)}: called with token ids {list(seen.ids.shape)}, {name} {fault}. Pass pp=1."
            )
    assert seen.latest is not None
    return Chain(blocks, length, tuple(before), tuple(later), tuples, seen.latest.shape[-1])
