"""Reading pickles of other trainers without running anything that is in them.

A pickle names functions and classes to be called. In a bare one, such as DCP's `.metadata`, it may name dtypes, and
containers as functions of ours that make no more than the pickle has bytes for. Everything else becomes an `Inert`,
which keeps its attributes and does nothing. Pickles in archives are read by torch.load (archives.py): there, too, the
classes here stand in for all that it refuses. `check_pickle` looks at the instructions before any is followed:

    nested deeper than DEEPEST   hashing a tuple recurses in C, and ends the process where its stack ends
    places of the memo           a number of four bytes makes the unpickler allocate as many places
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zero3d.errors import CheckpointError, short

DEEPEST = 200  # levels of containers; DeepSpeed's and torch's have fewer than 20
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class Inert:
    """Stands for an object of a class that is not loaded: it has the attributes that were saved, and no behaviour."""

    def __init__(self, *given: Any, **named: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update({name: value for name, value in state.items() if isinstance(name, str)})

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Take what a pickle adds to a list, and forget it."""

    extend = add = append

    def __call__(self, *given: Any, **named: Any) -> Inert:
        return Inert()

    def __hash__(self) -> int:
        return id(self)


class Maker:
    """Wraps a function that a pickle may call, so that the pickle cannot set its attributes."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *given: Any) -> Any:
        return self._make(*given)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it changes a function")


class InertMapping:
    """Stands for a class whose objects a pickle fills by keys: torch.load does that with mappings of its own alone."""

    def __new__(cls, *given: Any) -> Any:
        """Return a mapping."""
        return collections.OrderedDict()


class InertList:
    """Stands for a class whose objects a pickle fills as lists: torch.load does that with lists alone."""

    def __new__(cls, *given: Any) -> Any:
        """Return a list."""
        return []


def _default(make: Any = None, *given: Any) -> dict[Any, Any]:
    return dict(*given)


CONTAINERS: dict[tuple[str, str], Callable[..., Any]] = {
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, list, dict, tuple)},
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): _default,
    ("torch", "Size"): torch.Size,
}


class RestrictedUnpickler(pickle.Unpickler):
    """Makes numbers, texts and containers of a pickle; all else is `Inert`. Raises ValueError for a hostile one.

    known  classes that stand for further ones, by module and name: subclasses of Inert
    """

    def __init__(self, data: bytes, known: dict[tuple[str, str], type[Inert]]) -> None:
        check_pickle(data)
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._known = known
        self._room = len(data)

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle may name, and `Inert` for the rest."""
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) in CONTAINERS:
            return Maker(lambda *given: self._collected(CONTAINERS[module, name], given))
        return self._known.get((module, name), Inert)

    def _collected(self, make: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """Return a container: of an ordinary pickle each element takes a byte of it at least."""
        for values in given:
            if isinstance(values, (list, tuple, dict, set, frozenset)):
                self._room -= len(values)
            elif not isinstance(values, Maker):  # of a defaultdict
                raise ValueError(f"it makes a container of a {type(values).__name__}")
        if self._room < 0:
            raise ValueError("it copies its own containers")
        return make(*given)


def _before_mark(kinds: Sequence[object]) -> int:
    """Return how many values an instruction takes from the stack, those behind a mark not counted."""
    return kinds.index(pickletools.markobject) if pickletools.markobject in kinds else len(kinds)


POPPED = {code.name: _before_mark(code.stack_before) for code in pickletools.opcodes}
TO_MARK = {code.name for code in pickletools.opcodes if pickletools.markobject in code.stack_before}
PUSHES = {code.name for code in pickletools.opcodes if code.stack_after}
GETS = {"GET", "BINGET", "LONG_BINGET"}
PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
LEAVES = {code.name for code in pickletools.opcodes if not code.stack_before} & PUSHES - GETS - {"MARK"}
MAKES = {"REDUCE", "NEWOBJ"}
FILLS = {"APPEND": InertList, "APPENDS": InertList, "SETITEM": InertMapping, "SETITEMS": InertMapping}
GROW = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}  # their first value is what stays


def check_pickle(data: bytes) -> dict[str, type]:
    """Return what stands for the classes whose objects are filled after they were made, by their names.

    Raises ValueError for a pickle that nests too deeply, or whose memo would be larger than itself. The stack holds
    depths in place of values, 0 for a number or a text and one more than its elements for all else; and beside a
    function, a class and what it makes, its name.
    """
    stack: list[tuple[int, str]] = []
    marks: list[int] = []
    memo: dict[int, tuple[int, str]] = {}
    filled: dict[str, type] = {}
    for code, argument, _ in pickletools.genops(data):
        name = code.name
        if name in LEAVES:
            stack.append((0, str(argument).replace(" ", ".") if name == "GLOBAL" else ""))
        elif name in PUTS:
            place = argument if isinstance(argument, int) else len(memo)
            if place > len(data):
                raise ValueError(f"it has a memo of {place:,} places in {len(data):,} bytes")
            memo[place] = stack[-1]
        elif name in GETS:
            assert isinstance(argument, int)
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        else:
            at = (marks.pop() if name in TO_MARK else len(stack)) - POPPED[name]
            inner = stack[at:]
            del stack[at:]
            if name in GROW:
                (depth, made_by), *elements = inner
                stack.append((max(depth, 1 + max((each for each, _ in elements), default=0)), made_by))
                if name in FILLS:
                    filled[made_by] = FILLS[name]
            elif name in PUSHES:
                stack.append((1 + max((each for each, _ in inner), default=0), inner[0][1] if name in MAKES else ""))
            if stack and stack[-1][0] > DEEPEST:
                raise ValueError(f"it nests more than {DEEPEST} levels of containers")
    return filled


def read_pickle(path: object, data: bytes, known: dict[tuple[str, str], type[Inert]]) -> Any:
    """Read a plain pickle, in which `known` classes stand for others. Raises CheckpointError, which names `path`."""
    return told(path, lambda: RestrictedUnpickler(data, known).load())


def told(path: object, load: Callable[[], Any]) -> Any:
    """Return what is loaded. Raises CheckpointError for all that can be wrong with a file of others."""
    try:
        return load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or short(str(error))}.") from error
    except Exception as error:  # a pickle can fail in any way
        raise CheckpointError(
            f"{path} is damaged, or nothing that torch has saved ({type(error).__name__}: {short(_reason(error))}): "
            "copy it again."
        ) from error


def _reason(error: Exception) -> str:
    """Return what an error says, without the advice that torch.load puts around it."""
    return str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
