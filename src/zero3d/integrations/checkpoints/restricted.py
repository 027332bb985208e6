"""Reading pickles of other trainers without running anything that is in them.

A pickle names functions and classes to be called. Here it may name what tensors, numbers and containers are made of,
each as a function of ours that makes no more than the pickle has bytes for; everything else becomes an `Inert`, which
keeps its attributes and does nothing. `check_pickle` looks at the instructions before any is followed:

    nested deeper than DEEPEST   hashing a tuple recurses in C, and ends the process where its stack ends
    places of the memo           a number of four bytes makes the unpickler allocate as many places
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zero3d.errors import CheckpointError, short

DEEPEST = 200  # levels of containers; DeepSpeed's and torch's have fewer than 20
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
STORAGES = {
    "UntypedStorage": torch.uint8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


class Tensors(Protocol):
    """The part of a file that is behind its pickle: what persistent ids stand for."""

    def storage(self, name: Any) -> Stored:
        """Return the storage that a persistent id names. Raises ValueError."""


class Stored(Protocol):
    """A storage of a file, of which tensors are made."""

    def tensor(self, offset: int, size: Any, stride: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor whose elements all lie in it. Raises ValueError."""


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


class StorageType:
    """Stands for one of torch's classes of storages: the dtype of its elements."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it changes a class")


def _tensor(storage: Stored, offset: int, size: Any, stride: Any, *others: Any) -> Tensor:
    if len(others) > 2 and others[2]:
        raise ValueError("it has a tensor that is conjugate or negated")
    return storage.tensor(offset, size, stride)


def _tensor_of_dtype(
    storage: Stored, offset: int, size: Any, stride: Any, trained: bool, hooks: Any, dtype: torch.dtype, *others: Any
) -> Tensor:
    return storage.tensor(offset, size, stride, dtype)


def _values(data: Tensor, *given: Any) -> Tensor:
    """Return a parameter's values, without what was saved with it."""
    return data


def _of_type(make: Any, kind: Any, given: tuple[Any, ...], *state: Any) -> Any:
    """Return a tensor of a class of its own as an ordinary one; `make` comes from `find_class`, too."""
    return make(*given)


def _text(*given: Any) -> bytearray:
    if given and not isinstance(given[0], (bytes, str)):
        raise ValueError("it makes bytes of something else")
    return bytearray(*given)


def _default(make: Any = None, *given: Any) -> dict[Any, Any]:
    return dict(*given)


MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    **{("builtins", kind.__name__): kind for kind in (int, float, bool)},
    ("builtins", "bytearray"): _text,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _values,
    ("torch._utils", "_rebuild_parameter_with_state"): _values,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
}
CONTAINERS: dict[tuple[str, str], Callable[..., Any]] = {
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, list, dict, tuple)},
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): _default,
    ("torch", "Size"): torch.Size,
}


class RestrictedUnpickler(pickle.Unpickler):
    """Makes tensors, numbers and containers of a pickle; all else is `Inert`. Raises ValueError for a hostile one.

    known    classes that stand for further ones, by module and name: subclasses of Inert
    tensors  what persistent ids stand for
    """

    def __init__(
        self, data: bytes, known: dict[tuple[str, str], type[Inert]] | None = None, tensors: Tensors | None = None
    ) -> None:
        check_pickle(data)
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._known, self._tensors = known or {}, tensors
        self._room = len(data)

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle may name, and `Inert` for the rest."""
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return StorageType(STORAGES[name])
        if (module, name) in MAKERS:
            return Maker(MAKERS[module, name])
        if (module, name) in CONTAINERS:
            return Maker(lambda *given: self._collected(CONTAINERS[module, name], given))
        return self._known.get((module, name), Inert)

    def persistent_load(self, pid: Any) -> Any:
        """Return a storage."""
        if self._tensors is None:
            raise ValueError("it names a storage")
        return self._tensors.storage(pid)

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
GROW = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}  # their first value is what stays


def check_pickle(data: bytes) -> None:
    """Raise ValueError for a pickle that nests too deeply, or whose memo would be larger than itself.

    The stack holds depths in place of values: 0 for a number or a text, one more than its elements for all else.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for code, argument, _ in pickletools.genops(data):
        name = code.name
        if name in LEAVES:
            stack.append(0)
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
                stack.append(max(inner[0], 1 + max(inner[1:], default=0)))
            elif name in PUSHES:
                stack.append(1 + max(inner, default=0))
            if stack and stack[-1] > DEEPEST:
                raise ValueError(f"it nests more than {DEEPEST} levels of containers")


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
            f"{path} is damaged, or nothing that torch has saved ({type(error).__name__}: {short(str(error))}): "
            "copy it again."
        ) from error
