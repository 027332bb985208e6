"""Bytes and operations of one forward and backward of each kind of part, by running it without data.

    embedding | block of kind A | (alike: skipped) | block of kind B | (skipped) | norm, head, loss
              ^ forward begins, ends; its output's gradient comes, its input's gradient is done

Blocks of one class with the same parameters are alike, and one of them runs; the others hand on what they are
given. Bytes are those of storages that live at an instant (`live.py`), so that whatever autograd, a
module or a collective keeps is counted, once. Gradients of parameters are counted apart: an engine moves them
into its buckets at once, and their size does not follow the tokens; neither does that of decoded matrices. Gradients
of a tied parameter wait from the head's backward for the embedding's if both are on one rank, and are left out here.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node

from zero3d.activations.targets import mixers_in
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.engine.autocast import compute_in_autocast, keep_statistics_in_fp32
from zero3d.expert_parallel.plan import find_experts, whole_over_tp
from zero3d.expert_parallel.share import share_out
from zero3d.memory import scratch
from zero3d.memory.arena import Arena
from zero3d.models.copies import copy_with
from zero3d.models.mixing import CONVOLUTION, Call, mixers, replace_functions
from zero3d.models.packed_documents import Inside, Told, during
from zero3d.models.packing import forward_options, inner_model, position_rows, with_position_rows
from zero3d.models.placeholders import Placeholder, first_argument
from zero3d.models.quantised import QuantisedLinear
from zero3d.models.quantised_experts import Stack
from zero3d.models.targets import Targets
from zero3d.nested import map_tensors, tensors_out
from zero3d.precision import at_least_fp32
from zero3d.sequence.mixers import SharedScan, halo_of
from zero3d.sequence.shares import Halo, Scanned
from zero3d.spec.mesh import EXACT
from zero3d.tensor_parallel.parallelize import parallelize
from zero3d.tools.sim.card_autocast import lists_of_cards
from zero3d.tools.sim.images import Images, with_images
from zero3d.tools.sim.known import KnownValues
from zero3d.tools.sim.live import StorageTracker
from zero3d.tools.sim.mixer_kernels import as_kernels
from zero3d.tools.sim.patches import around, dropout_of_cards, replaced, without_values
from zero3d.tools.sim.stand_ins import SilentAxis, empty_like
from zero3d.tools.sim.units import RUN, PartNames, config_of
from zero3d.train.setup.losses import next_token_loss

EMBEDDING, HEAD = "embedding", "head"
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Figures:
    """Bytes and operations of one part, for one micro-batch.

    kept       alive after its forward because of it
    attention  of these, what recomputing attention alone frees
    entering   its input, which is all that is left where it is recomputed
    curve      (bytes that follow the tokens, bytes of gradients and decoded matrices) beyond what was kept, at
               every event of its backward (the head: of its forward, too)
    rerun      the same of a block's forward, up to the last that it keeps, beside what its backward has
               by when it first uses any of that
    convolutions, scans  of hybrids, as mesh.sp would share them out
    moved      bytes that kernels of mixers read and write in its forward
    launches   kernels of its forward, and of its backward, where each is launched by itself
    passed     bytes that those of them read and write which are no products
    """

    kept: float
    attention: float
    entering: float
    curve: Curve
    matrices: float
    scores: float
    convolutions: tuple[Halo, ...] = ()
    scans: tuple[Scanned, ...] = ()
    moved: float = 0.0
    launches: tuple[float, float] = (0.0, 0.0)
    passed: tuple[float, float] = (0.0, 0.0)
    rerun: Curve = ()


class OutputForms(dict[int, bool]):
    """Kind of block -> whether it returns a tuple. All copies of a model share one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputForms:
        return self


class UntracedBlock(Placeholder):
    """Stands for a block like one that has run: hands on its hidden state in the form in which that one did."""

    def __init__(self, block: nn.Module, forms: OutputForms, kind: int) -> None:
        super().__init__(block)
        self._forms, self._kind = forms, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state it is given."""
        hidden = first_argument(args, kwargs)
        return (hidden,) if self._forms[self._kind] else hidden


def kinds_of(model: nn.Module, part_names: PartNames) -> list[int]:
    """Return the kind of every block: those of one class with the same parameters are alike.

    A block whose input needs no gradient, as that of the first behind a frozen embedding, keeps less than others.
    """
    seen: dict[Any, int] = {}
    kinds = []
    trained = any(p.requires_grad for n, p in model.named_parameters() if part_names.part_of(n) <= part_names.of_tower)
    for name in part_names.blocks:
        block = model.get_submodule(name)
        parameters = dict(block.named_parameters())
        signature = type(block), trained, *((n, p.shape, p.dtype, p.requires_grad) for n, p in parameters.items())
        kinds.append(seen.setdefault(signature, len(seen)))
        trained = trained or any(p.requires_grad for p in parameters.values())
    return kinds


@dataclass
class ReducedModel:
    """A copy of a model with one block of each kind. ran: kind -> name of the block that runs."""

    module: nn.Module
    ran: dict[int, str]
    forms: OutputForms


def reduce_model(model: nn.Module, part_names: PartNames) -> ReducedModel:
    """Return a copy that runs one block of each kind; it shares all tensors with the model."""
    ran: dict[int, str] = {}
    forms = OutputForms()
    replaced: dict[nn.Module | Tensor, object] = {}
    for name, kind in zip(part_names.blocks, kinds_of(model, part_names), strict=True):
        if ran.setdefault(kind, name) != name:
            block = model.get_submodule(name)
            replaced[block] = UntracedBlock(block, forms, kind)
    return ReducedModel(copy_with(model, replaced), ran, forms)


class RunAs(NamedTuple):
    """Says how a model runs when it is measured.

    packed      every sequence is of several documents, which attention keeps apart by a mask
    images      of every sequence, whose features are there: the tower that makes them is measured apart (tower.py)
    dispatched  tokens are sent to experts, as many to each as to any other
    kernels     names of functions by which mixers call a kernel (mixer_kernels.py)
    fused       those that do all of a mixer run as well, and what it mixes is not noted
    autocast    the kind of device in whose autocast the forward runs, as an engine's does that is asked for it
    """

    packed: bool = False
    images: Images | None = None
    dispatched: bool = False
    kernels: Collection[str] = ()
    fused: bool = False
    autocast: str | None = None


PLAIN = RunAs()


def measure(
    model: nn.Module, part_names: PartNames, length: int, tp: int, batch: int = 1, run_as: RunAs = PLAIN
) -> dict[Any, Figures]:
    """Return figures of the embedding, every kind of block and the head, for `batch` sequences of `length` tokens.

    tp      1, or a degree that divides the model. The model stays as it is
    """
    packed, images, dispatched, kernels, fused, autocast = run_as
    reduced, rows = reduce_model(model, part_names), position_rows(model) if packed else 1
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, without_values(packed):
        tensors = [*reduced.module.parameters(), *reduced.module.buffers()]
        copies: dict[nn.Module | Tensor, object] = {t: empty_like(t, run_dtype(t)) for t in dict.fromkeys(tensors)}
        run = copy_with(reduced.module, copies).train()
        _without_loops(run)
        layers = find_experts(run) if dispatched else []
        if tp > 1:
            plan, axis = whole_over_tp(layers), SilentAxis("tp", 0, tp)
            parallelize(run, axis, Ledger(), plan, local_logits=takes_labels(model))
        ep = Comm(SilentAxis("ep", 0, 1), Arena(torch.device("cpu")), Ledger())
        share_out([run], layers, ep, EXACT, bool(layers))
        live = StorageTracker()
        live.leave_out(*run.parameters(), *run.buffers())
        recorder = Recorder(live, reduced)
        recorder.install(run)
        if getattr(config_of(model), "residual_in_fp32", False):  # Mamba's
            recorder.part_from_head(run)
        labels = torch.zeros(batch, length, dtype=torch.int64)
        ids = labels.clone()
        live.leave_out(ids, labels)
        options = forward_options(model)
        if packed and "position_ids" in inspect.signature(inner_model(model).forward).parameters:
            options["position_ids"] = ids.clone()
            live.leave_out(options["position_ids"])
            options = with_position_rows(options, rows)
        known: Any = nullcontext()
        if images is not None:
            ids, shown, known = *with_images(images, batch, length), KnownValues()
            options |= shown
            live.leave_out(ids, *shown.values())
            images.stand_in(run)
        replace_functions(run)
        keep_statistics_in_fp32({0: run}, RUN)
        if autocast is not None:
            compute_in_autocast({0: run}, 0, "cpu", RUN)
        mixing = during(Told(shared=recorder.mix)) if mixers(run) and not fused else nullcontext()
        lists = nullcontext() if autocast in (None, "cpu") else lists_of_cards()
        drops = dropout_of_cards() if kernels else nullcontext()
        pieces = as_kernels(run, kernels, in_pieces=not fused)
        with fake, known, live, recorder.constants(), pieces, mixing, lists, drops:
            _step(run, ids, labels, options, live)
    return {part: recorder.figures(part) for part in (EMBEDDING, *reduced.ran, HEAD)}


def _without_loops(model: nn.Module) -> None:
    """Run experts as one product of all: a loop over those that tokens were sent to cannot run without values."""
    inner: Any = inner_model(model)
    experts = any(name.endswith(".experts") for name, _ in inner.named_modules())
    if experts and hasattr(inner, "set_experts_implementation"):
        with suppress(ValueError):  # of a model whose experts are one product anyhow (Llama 4)
            inner.set_experts_implementation("grouped_mm")


def nodes_with_saved(node: Node | None, behind: Node | None) -> Iterator[Node]:
    """Yield those of a block's graph that have kept tensors for their backward. behind: what made the block's input."""
    waiting, seen = [node], {behind}
    while waiting:
        each = waiting.pop()
        if each is not None and each not in seen:
            seen.add(each)
            waiting += [before for before, _ in each.next_functions]
            saved = (getattr(each, name, None) for name in dir(each) if name.startswith("_saved_"))
            of_function = getattr(each, "saved_tensors", ())
            if any(isinstance(t, Tensor) and t.dim() for t in (*saved, *of_function)):
                yield each


def run_dtype(t: Tensor) -> torch.dtype:
    return RUN if isinstance(t, nn.Parameter) and t.is_floating_point() else t.dtype


def _step(model: nn.Module, ids: Tensor, labels: Tensor, options: dict[str, Any], live: StorageTracker) -> None:
    """Run one micro-batch as `Engine.train_batch` does."""
    loss = _loss(model, ids, labels, options)
    live.mark(("F", HEAD, "end"))
    live.mark(("B", HEAD, "begin"))
    loss.backward()  # type: ignore[no-untyped-call]
    live.mark(("end",))


def _loss(model: nn.Module, ids: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the sum of losses, of the model's own or of next tokens."""
    if takes_labels(model):
        loss = model(input_ids=ids, labels=labels, **options).loss
        targets = Targets.of(model).count({"labels": labels, **options})
        assert targets is not None, "there are labels"
        return at_least_fp32(loss) * targets
    return next_token_loss(model(ids, **options), {"labels": labels})[0]


def takes_labels(model: nn.Module) -> bool:
    """Say whether a model computes its own loss."""
    return "labels" in inspect.signature(inner_model(model).forward).parameters


class Recorder:
    """Marks instants of a run, and reads figures off the log."""

    def __init__(self, live: StorageTracker, reduced: ReducedModel) -> None:
        self._live = live
        self._ran = reduced.ran
        self._forms = reduced.forms
        self._kinds = list(reduced.ran)
        self._outputs: set[int] = set()  # storages of attention's outputs
        self._grads: set[int] = set()  # and of parameters' gradients
        self._decoded: set[int] = set()  # and of matrices of 8 or 4 bits in the compute dtype, with scratch
        self._entering: dict[Any, float] = {}
        self._kind: Any = None  # of the block whose forward is under way, and what made its input
        self._entered: Node | None = None
        self._mixed: dict[Any, list[Halo | Scanned]] = defaultdict(list)
        self._tied: set[tuple[int, ...]] = set()  # shapes of tied parameters

    def install(self, model: nn.Module) -> None:
        """Put hooks on the blocks that run, their attention, and parameters."""
        for kind, name in self._ran.items():
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._begins, kind), with_kwargs=True)
            block.register_forward_hook(partial(self._ends, kind))
            for i, (_, attention) in enumerate(mixers_in(block)):
                attention.register_forward_pre_hook(lambda *_, k=kind, i=i: self._live.mark(("A", k, i, "begin")))
                attention.register_forward_hook(partial(self._attended, kind, i))
        names = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
        for p, count in names.items():
            if count > 1:
                self._tied |= {tuple(p.shape), tuple(p.shape)[::-1]}
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._taken)  # type: ignore[no-untyped-call]

    @contextmanager
    def constants(self) -> Iterator[None]:
        """Tell decoded matrices from what follows the tokens, inside; their scratch is that of an accelerator."""
        with (
            around(QuantisedLinear, "decoded", self._decoding),
            around(Stack, "decode", self._decoding),
            replaced(scratch, "IN_CACHE", ()),
        ):
            yield

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        begun, self._live.decoding = len(self._live.events), True
        yield
        self._live.decoding = False
        self._decoded |= {number for change, number in self._live.events[begun:] if change > 0}

    def part_from_head(self, model: nn.Module) -> None:
        """Give what is behind a block a copy of its hidden state.

        Where that is in fp32 and the model is not, blocks keep a narrower one; the last norm alone keeps it as it is.
        """
        for name in self._ran.values():
            model.get_submodule(name).register_forward_hook(
                lambda module, args, output: map_tensors(output, lambda t: t.clone() if t.is_floating_point() else t)
            )

    def _begins(self, kind: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = first_argument(args, kwargs)
        self._entering[kind] = hidden.untyped_storage().nbytes()
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self._live.mark(("B", kind, "end")))
        self._live.mark(("F", kind, "begin"))
        self._kind, self._entered = kind, hidden.grad_fn

    def _ends(self, kind: Any, module: nn.Module, args: Any, output: Any) -> None:
        self._live.mark(("F", kind, "end"))
        self._forms[kind] = isinstance(output, tuple)
        hidden = next(iter(tensors_out(output)))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self._live.mark(("B", kind, "begin")))  # type: ignore[no-untyped-call]
            for node in nodes_with_saved(hidden.grad_fn, self._entered):
                node.register_prehook(partial(self._uses, kind))

    def _uses(self, kind: Any, grads: Any) -> None:
        """Mark where a backward first uses what its forward had kept: there a recomputed block runs again."""
        if ("B", kind, "uses") not in self._live.marks:
            self._live.mark(("B", kind, "uses"))

    def mix(self, function: str, call: Call, _: Any, inside: Inside) -> Any:
        """Run a convolution or scan, and note how a sequence axis would share it out."""
        made = inside(call, None)
        if function == CONVOLUTION:
            self._mixed[self._kind].append(halo_of(call, call.given["hidden_states"].shape[-1]))
        else:
            scan = SharedScan(function, call)
            output = made[0] if isinstance(made, tuple) else made
            self._mixed[self._kind].append(scan.note(output, scan.tensors[0].shape[1]))
        return made

    def _attended(self, kind: Any, number: int, module: nn.Module, args: Any, output: Any) -> None:
        self._live.mark(("A", kind, number, "end"))
        self._outputs |= {self._live.number_of(t) for t in tensors_out(output)}

    def _taken(self, p: Tensor) -> None:
        if p.grad is not None:
            self._grads.add(self._live.number_of(p.grad))
            p.grad = None

    # --- figures --------------------------------------------------------------------------------

    def figures(self, part: Any) -> Figures:
        """Return the figures of a kind of block, or of the embedding or head."""
        begin, end = self._forward_of(part)
        over = self._live.marks["F", HEAD, "end"]  # what a caller lets go a moment later was not kept
        kept = self._alive(begin, end, over)
        attention = 0.0
        marks = self._live.marks
        for key in [k for k in marks if k[0] == "A" and k[1] == part and k[3] == "begin"]:
            born = self._alive(marks[key], marks[(*key[:3], "end")], over)
            attention += sum(size for number, size in born.items() if number not in self._outputs)
        flops = [(n, scores) for at, n, scores in self._live.flops if begin <= at < end]
        launches, passed = self._launches((begin, end), self._backward_of(part))
        return Figures(
            float(sum(kept.values())),
            attention,
            self._entering.get(part, 0.0),
            tuple(self._windows(part)),
            sum(n for n, scores in flops if not scores),
            sum(n for n, scores in flops if scores),
            tuple(each for each in self._mixed[part] if isinstance(each, Halo)),
            tuple(each for each in self._mixed[part] if isinstance(each, Scanned)),
            sum(n for at, n in self._live.moved if begin <= at < end),
            launches,
            passed,
            tuple(self._rerun(part)) if part in self._kinds else (),
        )

    def _launches(self, *passes: tuple[int, int]) -> Iterator[tuple[float, float]]:
        """Yield kernels, and the bytes that they pass over, each of a forward and a backward."""
        inside = [[n for at, n in self._live.launches if begin <= at < end] for begin, end in passes]
        yield float(len(inside[0])), float(len(inside[1]))
        yield sum(inside[0]), sum(inside[1])

    def _backward_of(self, part: Any) -> tuple[int, int]:
        marks, over = self._live.marks, self._live.marks["end",]
        if part == EMBEDDING:
            return marks.get(("B", self._kinds[0], "end"), over), over
        if part == HEAD:
            return marks["B", HEAD, "begin"], marks.get(("B", self._kinds[-1], "begin"), over)
        begin, end = (marks.get(("B", part, edge), over) for edge in ("begin", "end"))
        return begin, end

    def _forward_of(self, part: Any) -> tuple[int, int]:
        marks = self._live.marks
        if part == EMBEDDING:
            return 0, marks["F", self._kinds[0], "begin"]
        if part == HEAD:
            return max(marks["F", kind, "end"] for kind in self._kinds), marks["F", HEAD, "end"]
        return marks["F", part, "begin"], marks["F", part, "end"]

    def _alive(self, begin: int, end: int, at: int) -> dict[int, int]:
        """Return the storages born between two instants that live at a third: number -> bytes."""
        alive: dict[int, int] = {}
        for i, (change, number) in enumerate(self._live.events[:at]):
            if change < 0:
                alive.pop(number, None)
            elif begin <= i < end:
                alive[number] = change
        return alive

    def _windows(self, part: Any) -> list[tuple[float, float]]:
        """Return the curve of a part's backward, the head's with that of its forward."""
        begin, end = self._backward_of(part)
        curve: list[tuple[float, float]] = []
        if part == HEAD:
            kept = sum(self._alive(*self._forward_of(HEAD), begin).values())
            curve = [(tokens - kept, gradients) for tokens, gradients in self._curve(*self._forward_of(HEAD))]
        return curve + list(self._curve(begin, end))

    def _rerun(self, kind: Any) -> Iterator[tuple[float, float]]:
        """Yield the curve of a forward that runs again in its backward, which ends with the last that was kept."""
        begin, end = self._forward_of(kind)
        kept = self._alive(begin, end, self._live.marks["F", HEAD, "end"])
        births = [
            i for i, (change, number) in enumerate(self._live.events[begin:end], 1) if change > 0 and number in kept
        ]
        uses = self._live.marks.get(("B", kind, "uses"), self._backward_of(kind)[0])
        more = self._since_forwards(uses) - sum(kept.values())
        for tokens, decoded in islice(self._curve(begin, end), max(births, default=0)):
            yield tokens + more, decoded

    def _curve(self, begin: int, end: int) -> Iterator[tuple[float, float]]:
        """Yield (bytes that follow the tokens, bytes that do not) beyond what forwards had kept, over a window."""
        waiting = self._waiting()
        tokens, gradients = self._since_forwards(begin), 0.0
        for change, number in self._live.events[begin:end]:
            if number in self._grads or number in self._decoded:
                gradients += change
            elif number not in waiting:
                tokens += change
            yield tokens, gradients

    def _since_forwards(self, at: int) -> float:
        """Return the bytes that follow the tokens and have come between the end of forwards and an instant."""
        forward, waiting = self._live.marks["F", HEAD, "end"], self._waiting()
        return float(sum(size for n, size in self._alive(min(at, forward), at, at).items() if n not in waiting))

    def _waiting(self) -> set[int]:
        """Return the gradients of tied parameters that wait for the embedding's, or are summed there."""
        marks = self._live.marks
        forward, last = marks["F", HEAD, "end"], marks.get(("B", self._kinds[0], "end"), len(self._live.events))
        born = set(self._alive(forward, last, last)) | {n for n in self._live.shapes if n >= last}
        return {n for n in born - self._grads if self._live.shapes[n] in self._tied}
