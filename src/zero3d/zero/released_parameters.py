"""Released parameters: an operation on their values raises an error with their names, and passes on no NaN.

While a unit has no values (SHARDED, GATHERING or KEPT) its parameters are of a class that checks every operation by
torch's own schema, as it is dispatched. Reading or writing a value is refused, on their views too. Making a view,
asking for a shape and making a tensor of that shape are allowed. While the unit is gathered they are plain parameters
again, so a forward is not slower.

Below this the placeholder's NaN stays (weights.py, Note 1), for what no Python object sees: kernels of a backward, a
parameter of a class of its own, `torch.tensor(p)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode

from zero3d.errors import ReleasedParameterError
from zero3d.nested import tensors_in

RELEASED = (
    "at stage 3 it is gathered while its module runs, and here it is not. Put `with engine.full_params():` around "
    "this, on all ranks (of a Trainer trainer.accelerator.engine.full_params()); for files use engine.export(FOLDER), "
    "or accelerator.get_state_dict(model). Or pass stage=2."
)
untold = torch._C.DisableTorchFunctionSubclass  # a context in which the engine itself asks released parameters
undispatched: Any = torch._C._DisableTorchDispatch  # and one in which their views do not look at what is dispatched

MAKE_OTHERS = {  # operations that ask for a shape alone
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size", "_has_same_storage_numel",
    "_has_compatible_shallow_copy_type", "detach_", "is_pinned", "dense_dim",
    "sparse_dim", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
}  # fmt: skip
REFUSED = {  # operations on the memory itself, undispatched; and cpu(), which is no copy on a CPU alone
    getattr(Tensor, name)
    for name in (
        "numpy", "__array__", "tolist", "__dlpack__", "__deepcopy__", "__reduce_ex__", "cpu", "apply_", "map_", "map2_",
        "share_memory_", "storage",
    )
} | {Tensor.__cuda_array_interface__.__get__}  # fmt: skip
ASK = {  # what is asked most often and reads nothing: not dispatched at all
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "grad", "grad_fn", "is_leaf", "ndim", "layout", "is_cuda",
                 "is_meta", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "nbytes", "itemsize")
} | {
    getattr(Tensor, name)
    for name in ("size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "data_ptr",
                 "untyped_storage", "is_floating_point", "is_complex", "is_contiguous", "get_device", "requires_grad_",
                 "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__len__", "__format__")
}  # fmt: skip
GRAD: Any = Tensor.grad
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
COMPARE = (Tensor.__eq__, Tensor.__ne__)


class Told(NamedTuple):
    """Holds what an error says of a released parameter.

    remedy  what to do
    first   is called before: may raise an error that says more
    """

    name: str
    remedy: str
    first: Sequence[Callable[[], None]] = ()


class _Released:
    """What released parameters and their views share."""

    __slots__ = ()
    released: Told

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function that reads and writes no released values. Raises ReleasedParameterError."""
        if func in ASK:
            with untold():
                return func(*args, **kwargs or {})
        if func is Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            _refuse(args[0], "nn.Parameter()")  # else it says that detach() is wrong
        if torch.compiler.is_compiling():  # else torch's compiler, which takes seconds to import, is not needed
            return _looked_at_untraced(func, args, kwargs or {})
        return _looked_at(func, args, kwargs or {})

    def __hash__(self) -> int:
        return id(self)  # as a tensor's

    def __repr__(self) -> str:
        with untold():
            assert isinstance(self, Tensor)
            kind = "Parameter" if isinstance(self, nn.Parameter) else "Tensor"
            return f"{kind} {self.released[0]!r} (released: shape {tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self, "a copy or pickle")


class ReleasedTensor(_Released, Tensor):  # type: ignore[misc]
    """A view of a released parameter: of its placeholder, and so without values for ever.

    A view without a gradient, such as `p.data`, checks operations at dispatch, too: `__torch_function__` is not told of
    `tensor.set_(p.data)`, `torch.tensor(p.data)` and the tensors that torch.vmap gives its function.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run what makes a view, or asks for a shape alone. Raises ReleasedParameterError."""
        released = next(t for t in tensors_in((args, kwargs)) if isinstance(t, ReleasedTensor))
        if not _is_free(func):
            _refuse(released, f"{_name(func)}()")
        with undispatched():
            result = func(*args, **kwargs or {})
        if _makes_view(func) and isinstance(result, Tensor):
            return _view(result, released.released)
        return result


def _grad(p: Any) -> Tensor | None:
    if (tell := vars(p).get("grad_is_read")) is not None:
        tell()
    with untold():
        return GRAD.__get__(p)  # type: ignore[no-any-return]


class TellingParameter(nn.Parameter):
    """Is the class of a plain parameter that tells when its `grad` is read, which an engine has taken."""

    grad = property(_grad, GRAD.__set__)


class ReleasedParameter(_Released, nn.Parameter):  # type: ignore[misc]
    """Is the class of a parameter while its unit has no values."""

    grad = property(_grad, GRAD.__set__)

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """Return a plain parameter."""
        return nn.Parameter(data, requires_grad)


def _refuse(released: Any, what: str) -> NoReturn:
    name, remedy, first = released.released
    for check in first:
        check()
    raise ReleasedParameterError(f"{what} of parameter {name!r}, which has no values: {remedy}")


@_disable_dynamo
def _looked_at_untraced(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _looked_at(func, args, kwargs)


def _looked_at(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    released = [t for t in tensors_in((args, kwargs)) if isinstance(t, _Released)]
    if func in COMPARE and not isinstance(args[1], Tensor | int | float | complex):
        return NotImplemented  # p == None
    if not released or func == SET_DATA:
        if released and args[0] is released[0] and type(args[1]) not in (ReleasedTensor, ReleasedParameter):
            gather(released[:1])  # it has values now, whoever gave them
        with untold():
            return func(*args, **kwargs)
    what = f"{getattr(func, '__name__', func)}()"
    if func in REFUSED:
        _refuse(released[0], what)
    with untold():
        own = {storage: t for t in released if (storage := _storage(t)) is not None}
        with _Look(own, what):
            result = func(*args, **kwargs)
        given = {id(t) for t in tensors_in((args, kwargs))}
        for t in tensors_in(result):
            of = own.get(_storage(t) or 0)
            if of is not None and id(t) not in given and type(t) in (Tensor, nn.Parameter):
                if t is result and not t.requires_grad:
                    return _view(t, of.released)
                t.__class__ = ReleasedTensor
                t.released = of.released  # type: ignore[attr-defined]
    return result


class _Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what is dispatched inside and reads or writes the memory of released parameters, by their storages."""

    def __init__(self, own: Mapping[int, Any], what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own, self._what = own, what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_free(func):
            for t in tensors_in((args, kwargs)):
                if (of := self._own.get(_storage(t) or 0)) is not None:
                    _refuse(of, self._what)
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    return str(func._schema.name.split("::")[1])


def _makes_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _is_free(func: Any) -> bool:
    return _makes_view(func) or _name(func) in MAKE_OTHERS


def _view(t: Tensor, words: Told) -> Tensor:
    with undispatched():  # what is made of one that looks would ask it again
        view = Tensor._make_subclass(ReleasedTensor, t)
    view.released = words
    return view


def _storage(t: Tensor) -> int | None:
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have none
        return None


def release(params: Iterable[nn.Parameter], told: Iterable[Told]) -> None:
    """Refuse operations on these parameters' values: told is what is said of each.

    Those of a class of their own stay as they are.
    """
    for p, words in zip(params, told, strict=True):
        if type(p) is nn.Parameter:
            p.__class__ = ReleasedParameter
            p.released = words  # type: ignore[attr-defined]


def gather(params: Iterable[Tensor]) -> None:
    """Make these plain parameters again."""
    for p in params:
        if type(p) is ReleasedParameter:
            del p.released
            p.__class__ = nn.Parameter  # type: ignore[assignment]


def tell_of_grad(params: Iterable[nn.Parameter], tell: Callable[[], None]) -> None:
    """Call `tell` whenever one of these parameters' `grad` is read, until `tell_no_more`."""
    for p in params:
        if type(p) in (nn.Parameter, ReleasedParameter):
            vars(p)["grad_is_read"] = tell
        if type(p) is nn.Parameter:
            p.__class__ = TellingParameter


def tell_no_more(params: Iterable[nn.Parameter]) -> None:
    """End what `tell_of_grad` began."""
    for p in params:
        vars(p).pop("grad_is_read", None)
        if type(p) is TellingParameter:
            p.__class__ = nn.Parameter  # type: ignore[assignment]
