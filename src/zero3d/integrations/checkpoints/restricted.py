"""Reading pickles of other trainers without running anything that is in them.

A pickle names functions and classes to be called. Here it may name what tensors, numbers and containers are made of;
everything else becomes an `Inert`, which keeps its attributes and does nothing. Tensors are mapped from the file, so
that only what is used is read.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import Tensor

from zero3d.errors import CheckpointError, short


def _without_state(data: Tensor, *given: Any) -> Tensor:
    """Return a parameter's values, without the attributes that were saved with it."""
    return data


def _of_type(make: Any, kind: Any, given: tuple[Any, ...], *state: Any) -> Any:
    """Return a tensor of a class of its own as an ordinary one; `make` comes from `find_class`, too."""
    return make(*given)


PLAIN = {
    **{("collections", name): getattr(collections, name) for name in ("OrderedDict", "defaultdict")},
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, list, dict, tuple, int, float, bool, bytearray)},
    **{("torch", name): getattr(torch, name) for name in ("Size", "device", "Tensor")},
    **{
        ("torch._utils", name): getattr(torch._utils, name)
        for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")
    },
    ("torch._utils", "_rebuild_parameter_with_state"): _without_state,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
}
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


class RestrictedUnpickler(pickle.Unpickler):
    """Makes tensors, numbers and containers; all else is `Inert`.

    known  further classes that may be made, by module and name
    """

    known: dict[tuple[str, str], Any] = {}  # noqa: RUF012 (a subclass has others)

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle may name, and `Inert` for the rest."""
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module == "torch" and name.endswith("Storage"):
            return getattr(torch, name, Inert)
        return (PLAIN | self.known).get((module, name), Inert)


def read_pickle(file: BinaryIO, known: dict[tuple[str, str], Any]) -> Any:
    """Read a plain pickle, which may make objects of the `known` classes, too. Raises CheckpointError."""
    unpickler = type("Unpickler", (RestrictedUnpickler,), {"known": known})
    return _read(getattr(file, "name", "a pickle"), lambda: unpickler(file).load())


def read_torch(path: Path) -> Any:
    """Read what torch.save has written; tensors are on the CPU, mapped from the file. Raises CheckpointError."""

    def refuse(*given: Any, **named: Any) -> Any:
        raise ValueError("it has the format of torch 1.5 and older")

    module = SimpleNamespace(Unpickler=RestrictedUnpickler, load=refuse, __name__="zero3d")
    return _read(
        path, lambda: torch.load(path, map_location="cpu", pickle_module=module, weights_only=False, mmap=True)
    )


def _read(path: Any, load: Any) -> Any:
    try:
        return load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or short(str(error))}.") from error
    except Exception as error:  # a pickle can fail in any way
        raise CheckpointError(
            f"{path} is damaged, or nothing that torch has saved ({type(error).__name__}: {short(str(error))}): "
            "copy it again."
        ) from error
