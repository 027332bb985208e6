"""The model inside its wrappers, so that names are those of the original module in checkpoints and exports.

    DistributedDataParallel(model)   its parameters are named module.*; its hooks rest while it is not called itself
    torch.compile(block)             its parameters are named _orig_mod.*
    checkpoint_wrapper(block)        its parameters are named _checkpoint_wrapped_module.*; so are offload_wrapper's
    block.compile()                  no wrapper: compiles the call, with the hooks that an engine adds later
    block.forward = Compiled(...)    no wrapper: compiles the forward, inside the hooks
    block.forward = Wrapped(...)     no wrapper: does inside the hooks what torch's wrapper of activations did

`unwrap` takes the first three off, wherever they are in the model and around one another. What the second has compiled
becomes `Compiled`, what the third does `Wrapped`, around the compiled forward in either order.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from zero3d.errors import ConfigError, short
from zero3d.models.blocks import find_blocks

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]  # such as torch.compile


class Compiled:
    """Calls a module's own forward, compiled.

    torch.compile keeps few graphs of one code, after which it compiles nothing more there, and blocks of all kinds may
    have one code. So modules of one structure share graphs, and each other structure has the code once more.
    """

    def __init__(self, module: nn.Module, compile: Compile) -> None:
        self._module, self._compile = module, compile
        self._forward = compile(_of_own_kind(module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """Compile the copied module's forward: the compiled function would go on calling the original."""
        return Compiled(copy.deepcopy(self._module, memo), self._compile)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.training and torch.is_grad_enabled():  # each block would guard its own layer of the cache
            args = tuple(map(_without_empty_cache, args))
            kwargs = {name: _without_empty_cache(value) for name, value in kwargs.items()}
        return self._forward(*args, **kwargs)


def _without_empty_cache(value: Any) -> Any:
    """Return None for a Hugging Face cache that holds nothing: training leaves its keys to nobody."""
    return None if hasattr(value, "get_seq_length") and not int(value.get_seq_length()) else value


_codes: dict[CodeType, dict[Any, CodeType]] = {}  # by the structure of modules that have it


def _of_own_kind(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward, of a code that modules of another structure do not have."""
    forward = module.forward
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType) or getattr(forward, "__self__", None) is not module:
        return forward
    kind = tuple((name, type(inner)) for name, inner in module.named_modules())
    codes = _codes.setdefault(function.__code__, {})
    code = codes.setdefault(kind, function.__code__.replace() if codes else function.__code__)
    if code is function.__code__:
        return forward
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__, own.__dict__ = function.__kwdefaults__, dict(vars(function))
    return MethodType(own, module)


class Wrapped:
    """Calls a module's own forward as torch's wrappers of its activations would: recomputed, or saved on the CPU.

    wrappers  the innermost first

    A recomputation calls the module, for an engine's hooks gather weights there, but with the arguments that the
    forward had, whatever other hooks make of them.
    """

    def __init__(self, module: nn.Module, wrappers: Sequence[nn.Module]) -> None:
        self._module, self.wrappers = module, tuple(wrappers)
        self.inner = module.forward
        self._again: Callable[[], Any] | None = None  # what a recomputation that is calling the module wants of it

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped:
        """Call the copied module's forward."""
        copied = Wrapped(copy.deepcopy(self._module, memo), self.wrappers)
        copied.inner = copy.deepcopy(self.inner, memo)
        return copied

    def compile(self, compile: Compile) -> None:
        """Compile the forward inside, if it is not yet."""
        if not isinstance(self.inner, Compiled):
            self._module.forward = self.inner
            self.inner = Compiled(self._module, compile)
            self._module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._again is not None:
            again, self._again = self._again, None
            return again()
        forward = self.inner
        for wrapper in self.wrappers:
            forward = partial(self._call, wrapper, forward)
        return forward(*args, **kwargs)

    def _call(self, wrapper: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what is inside a wrapper as it would."""
        is_recomputation = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_recomputation
            if not is_recomputation:
                is_recomputation = True
                return forward(*args, **kwargs)
            self._again = partial(forward, *args, **kwargs)
            try:
                return self._module(*args, **kwargs)
            finally:
                self._again = None

        wrapper = copy.copy(wrapper)
        vars(wrapper).update(_modules={}, _checkpoint_wrapped_module=run)
        return wrapper.forward(*args, **kwargs)


def wrap_forward(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a function around a module's own forward, inside of what recomputes it: a recomputation calls it, too."""
    outside: Any = module
    inside = module.forward
    while hasattr(inside, "inner"):
        outside, inside = inside, inside.inner
    setattr(outside, "forward" if outside is module else "inner", around(inside))


def unwrap(model: nn.Module) -> nn.Module:
    """Take wrappers off a model and its modules; return the model. Its modules do what the wrappers did (see above).

    Of a model that is compiled as a whole each block is compiled by itself: one graph would hold an engine's hooks.
    Raises ConfigError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {short(type(model).__name__)}, not a torch.nn.Module, which an Engine needs. "
            "(torch.compile of a compiled module returns a function: pass the module that it was made of.)"
        )
    around, model = _peel(model)
    for module in [module for module in model.modules() if _wrapped_by(module) is None]:
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            of_child, original = _peel(child)
            if of_child:
                module._modules[name] = original
                for compile in filter(None, map(_compile_of, of_child)):
                    compile_forward(original, compile)
                _wrap_forward(original, of_child)
    if (compiled := next(filter(None, map(_compile_of, around)), None)) and not _compile_blocks(model, compiled):
        warnings.warn(
            f"torch.compile({type(model).__name__}) has no effect: the model has no list of blocks to compile one "
            "by one. Compile parts of it: model.part = torch.compile(model.part).",
            stacklevel=2,
        )
    _wrap_forward(model, around)
    return model


def _peel(module: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """Return the wrappers around a module, the innermost first, and the module."""
    around: list[nn.Module] = []
    while (inner := _wrapped_by(module)) is not None:
        around.insert(0, module)
        module = inner
    return around, module


def _wrapped_by(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper; None for what is no wrapper."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module._modules["module"]
    if _compile_of(module) is not None:
        return module._modules["_orig_mod"]
    return module._modules["_checkpoint_wrapped_module"] if _is_of_activations(module) else None


def _wrap_forward(module: nn.Module, around: Iterable[nn.Module]) -> None:
    """Have a module's forward do what those of `around` did that are about activations; once, whatever its places."""
    wrappers = list(filter(_is_of_activations, around))
    if wrappers and not isinstance(vars(module).get("forward"), Wrapped):
        module.forward = Wrapped(module, wrappers)


def _is_of_activations(module: nn.Module) -> bool:
    """Return whether a module is torch's wrapper of activations. Only who has imported that has one."""
    imported = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return imported is not None and isinstance(module, imported.ActivationWrapper)


def compile_by_block(model: nn.Module) -> None:
    """Have `model.compile()` compile each block's forward: compiled as one, its graph would hold an engine's hooks."""

    def compile_blocks(*args: Any, **options: Any) -> None:
        _compile_blocks(model, partial(torch.compile, *args, **options))

    model.compile = compile_blocks  # type: ignore[method-assign]


def _compile_blocks(model: nn.Module, compile: Compile) -> bool:
    """Compile each block's forward; return whether there are blocks."""
    blocks = find_blocks(model)
    for block in blocks.values():
        compile_forward(block, compile)
    return bool(blocks)


def _compile_of(module: nn.Module) -> Compile | None:
    """Return what has compiled a module that is a wrapper of torch.compile. Only who has imported dynamo has one."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return module.dynamo_ctx if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


def compile_forward(module: nn.Module, compile: Compile) -> None:
    """Compile a module's own forward, inside what `Wrapped` does. One that is compiled or recomputed stays as it is."""
    forward = vars(module).get("forward")
    if isinstance(forward, Wrapped):
        forward.compile(compile)
    elif forward is None:
        module.forward = Compiled(module, compile)
