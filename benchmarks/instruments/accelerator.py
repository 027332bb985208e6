"""A stand-in accelerator: a device `standin` (torch's PrivateUse1), whose kernels are the CPU's.

A tensor on it is one for torch: its storage has a device, a size and an address that nobody may read. What it
holds lies in host memory behind that storage, and only `run` reads it, where the dispatcher would launch a kernel:

    tensor on standin -> storage -> `host`, a storage in host memory -> twin, a CPU tensor -> the CPU's kernel

So autograd, views, hooks and in-place resizes work as on any device, values are bitwise the CPU's, and an operation
that mixes devices fails as it would on CUDA: only numbers (tensors of no dimension) may come from the host.

What a kernel cannot show is noted in `Log`: copies between the devices and everything that makes the host wait.
Streams and events are host objects. Nothing is asynchronous here but copies to pinned memory: their values come when
the host waits for them.

There may be several of them, as a machine has cards. Whoever names none gets the current one of its thread, which is
number 0 in each new thread, whatever the thread that started it had made current; `Log.made` has who made what where.
An operation takes tensors of one device.

Registration is for ever and must come before the process' first backward: use a process of its own.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
CARD = 80 * 10**9  # bytes that the stand-in says it has, all of them free
_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ALIGNMENT = 512
_ADDRESSES = 1 << 44  # where no host memory is
aten = torch.ops.aten

# These kernels touch no memory: the CPU's make a tensor of another shape over the same storage.
VIEWS = (
    aten.as_strided.default, aten.view.default, aten._reshape_alias.default, aten.unfold.default,
    aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default,
)  # fmt: skip
# The result's shape depends on values, or is one: CUDA's kernels of these wait for the device.
READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_consecutive", "unique_dim")


class Log:
    """Tells `listener` of copies and waits, while there is one.

    listener   (what, whether the host waits for the device)
    made       what was made on the device of a number (tensor, stream, event, pinned memory), and by which line; None:
               nobody wants to know
    """

    listener: Callable[[str, bool], None] | None = None
    made: dict[int, Counter[str]] | None = None

    @classmethod
    def note(cls, what: str, waits: bool) -> None:
        if cls.listener is not None:
            cls.listener(what, waits)

    @classmethod
    def make(cls, what: str, index: int) -> None:
        """Note that something is made on a device; it has a context from now on."""
        _contexts.add(index)
        if cls.made is not None:
            cls.made[index][f"{what} by {_maker()}"] += 1


def _maker() -> str:
    """Return the line outside of torch and of this file that makes something."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


_contexts: set[int] = set()  # of devices on which there is something


# --- tensors ------------------------------------------------------------------------------------


class _Addresses:
    """Hands out addresses of storages, each its own."""

    def __init__(self) -> None:
        self._next, self._lock = _ADDRESSES, threading.Lock()

    def take(self, nbytes: int) -> int:
        with self._lock:
            found = self._next
            self._next += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        return found


_addresses = _Addresses()


class _Place(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _Kind(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Strided(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("place", _Place), ("dims", ctypes.c_int32), ("kind", _Kind),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    """What DLPack hands over; nobody is told when torch has done with it."""

    _fields_ = (("tensor", _Strided), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_DLPACK = 12  # what it calls a device of an extension
_CODES = {torch.bfloat16: 4, torch.bool: 6, torch.uint8: 1}


@cache
def _empty_on(index: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor without elements: torch makes such ones on device 0 alone, but takes others by DLPack."""
    if index == 0:
        return torch._C._acc.create_empty_tensor((0,), dtype)
    code = _CODES.get(dtype, 5 if dtype.is_complex else 2 if dtype.is_floating_point else 0)
    shape = (ctypes.c_int64 * 1)(0)
    kind = _Kind(code, 8 * dtype.itemsize, 1)
    managed = _Managed(_Strided(_addresses.take(1), _Place(_DLPACK, index), 1, kind, shape, None, 0), None, None)
    _handed_over.append((managed, shape))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.utils.dlpack.from_dlpack(capsule(ctypes.addressof(managed), b"dltensor", None))


_handed_over: list[Any] = []


def on_device(values: Tensor, index: int | None = None) -> Tensor:
    """Return a tensor on a stand-in over the memory of a CPU tensor, which nobody else may use from now on.

    index  of the device; None: the current one
    """
    host = values.untyped_storage()
    index = _current.index if index is None else index
    device = torch.device(NAME, index)
    Log.make("tensor", index)
    storage = torch._C._construct_storage_from_data_pointer(_addresses.take(host.nbytes()), device, host.nbytes())
    storage.host = host
    empty = _empty_on(index, values.dtype)
    made = aten.as_strided.default.redispatch(_HOST, empty, (0,), (1,))
    place = storage, values.storage_offset(), values.size(), values.stride()
    return aten.set_.source_Storage_storage_offset.redispatch(_HOST, made, *place)


def twin(t: Tensor) -> Tensor:
    """Return the CPU tensor behind one on the stand-in. Raises RuntimeError where its memory is freed."""
    made = torch.empty(0, dtype=t.dtype)
    return made.set_(t.untyped_storage().host, t.storage_offset(), t.size(), t.stride())


def is_here(value: Any) -> bool:
    """Return whether a value is a tensor on the stand-in."""
    return isinstance(value, Tensor) and value.device.type == NAME


def _is_host_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation: the CPU's kernel on the tensors behind. Raises RuntimeError for mixed devices."""
    if op in VIEWS:
        return op.redispatch(_HOST, *args, **kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if any(isinstance(leaf, torch.device) and leaf.type not in (NAME, "cpu") for leaf in leaves):
        raise RuntimeError(f"{op} from or to a device that is neither the host nor {NAME}")
    name = op._schema.name.removeprefix("aten::")
    wanted = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    given = [leaf for leaf in leaves if is_here(leaf)]
    places = {leaf.device.index for leaf in given if leaf.dim()}
    if len(places) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {op} found {NAME}:{sorted(places)}.")
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not is_here(leaf) and not _is_host_scalar(leaf):
            if name not in ("index", "index_put_", "index_put", "_index_put_impl_"):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {op} found {NAME} and {leaf.device}."
                )
            Log.note(f"indices from the host ({name})", True)
    if name in READS or (name in ("index", "index_put_", "_index_put_impl_") and _has_mask(leaves)):
        Log.note(name, True)
    behind = {id(leaf): twin(leaf) for leaf in given}
    swapped = [behind.get(id(leaf), torch.device("cpu") if isinstance(leaf, torch.device) else leaf) for leaf in leaves]
    host_args, host_kwargs = pytree.tree_unflatten(swapped, spec)
    result = _kernel(op, host_args)(*host_args, **host_kwargs)
    if wanted is not None and wanted.type == "cpu":
        return result
    index = next(iter(places), given[0].device.index if given else None) if wanted is None else wanted.index
    return pytree.tree_map(lambda value: _come_back(value, given, behind, index), result)


def _kernel(op: Any, args: Any) -> Any:
    """Return the overload to call: numbers that torch had made tensors of arrive as numbers again."""
    for value, argument in zip(args, op._schema.arguments, strict=False):
        if isinstance(value, (int, float, complex)) and str(argument.type) == "Tensor":
            return op.overloadpacket
    return op


def _has_mask(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves[1:])


def _come_back(value: Any, given: list[Tensor], behind: dict[int, Tensor], index: int | None) -> Any:
    """Return what a kernel gave: the tensor that it wrote into, a view of one, or a new one on a device."""
    if not isinstance(value, Tensor):
        return value
    for t in given:
        host = behind[id(t)]
        if value is host:
            if host.size() != t.size():  # an `out=` that the kernel has resized
                grown = on_device(host, t.device.index)
                place = grown.untyped_storage(), 0, grown.size(), grown.stride()
                aten.set_.source_Storage_storage_offset.redispatch(_HOST, t, *place)
            return t
        if value.untyped_storage()._cdata == host.untyped_storage()._cdata:
            return aten.as_strided.default.redispatch(_HOST, t, value.size(), value.stride(), value.storage_offset())
    return on_device(value, index)


# --- copies between the devices -----------------------------------------------------------------


def is_pinned(t: Tensor) -> bool:
    """Return whether a host tensor's memory is pinned."""
    return getattr(t.untyped_storage(), "pinned", False)


def pin(t: Tensor) -> Tensor:
    """Mark a host tensor's memory as pinned: by the current device, or one that has a context where that has none."""
    if not is_pinned(t):
        Log.make("pinned memory", _current.index if _current.index in _contexts else min(_contexts, default=0))
    t.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return t


def copy_(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values, also from and to the host, which waits unless its memory is pinned and it asks not to."""
    if is_here(into) != is_here(source):
        outside = source if is_here(into) else into
        waits = not (non_blocking and is_pinned(outside))
        Log.note("host to device" if is_here(into) else "device to host", waits)
        if is_here(source) and not waits:
            return _arriving.put(into, twin(source).to(into.dtype, copy=True))
        if is_here(into) and not waits:
            _arriving.land_in(source)  # before it on the device, if the streams are right
    (twin(into) if is_here(into) else into).copy_(twin(source) if is_here(source) else source)
    return into


class _Arriving:
    """Holds back what is copied to pinned memory until the host waits: who reads before that finds no value there.

    begun   copies so far
    """

    def __init__(self) -> None:
        self.begun = 0
        self._copies: deque[tuple[int, Tensor, Tensor]] = deque()
        self._lock = threading.RLock()  # ranks may be threads

    def put(self, into: Tensor, values: Tensor) -> Tensor:
        into.fill_(float("nan") if into.is_floating_point() else -1)
        with self._lock:
            self.begun += 1
            self._copies.append((self.begun, into, values))
        return into

    def arrive(self, begun: int | None = None) -> None:
        """Complete the copies that had begun by then; all of them."""
        with self._lock:
            while self._copies and self._copies[0][0] <= (self.begun if begun is None else begun):
                _, into, values = self._copies.popleft()
                into.copy_(values)

    def land_in(self, source: Tensor) -> None:
        """Complete the copies to memory that the device itself reads now."""
        start, stop = source.data_ptr(), source.data_ptr() + source.nbytes
        with self._lock:
            for begun, into, _ in reversed(self._copies):
                if into.data_ptr() < stop and start < into.data_ptr() + into.nbytes:
                    self.arrive(begun)
                    return


_arriving = _Arriving()


def _to_copy(
    t: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> Tensor:  # fmt: skip
    """Return a copy of another dtype or on another device; one that nobody waits for lands in pinned memory."""
    device, dtype = t.device if device is None else device, t.dtype if dtype is None else dtype
    into = torch.empty_like(t, dtype=dtype, device=device, memory_format=memory_format or torch.preserve_format)
    if device.type == "cpu" and non_blocking:
        pin(into)
    return copy_(into, t, non_blocking)


def resize_(storage: Any, nbytes: int) -> Any:
    """Free or fill the memory behind a storage, which keeps its identity."""
    host = getattr(storage, "host", None)
    if host is None:
        return _RESIZE(storage, nbytes)
    _RESIZE(host, nbytes)
    return storage


_RESIZE = torch.UntypedStorage.resize_
_RESIZABLE = torch.UntypedStorage.resizable


# --- streams and events: who waits for whom -----------------------------------------------------


class _Current(threading.local):
    """The current device of a thread, and the current stream of each device."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, Stream] = {}

    @property
    def stream(self) -> Stream:
        """The current stream of the current device."""
        return self.on(self.index)

    def on(self, index: int) -> Stream:
        """Return the current stream of a device."""
        if index not in self.streams:
            self.streams[index] = Stream._default(index)
        return self.streams[index]


def _index(device: Any) -> int:
    """Return the number of a device, which may be one or a name: the current one's where it has none."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _current.index if index is None else index


class Stream:
    """A stream of the stand-in, whose work is done when it is enqueued."""

    def __init__(self, device: Any = None, *, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self._index = _index(device)
        self._before: list[tuple[int, Stream]] = []
        Log.make("stream", self._index)

    @classmethod
    def _default(cls, index: int) -> Stream:
        """Return the stream that a device has without anybody making it."""
        made = cls.__new__(cls)
        made.priority, made._index, made._before = 0, index, []
        return made

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, self._index)

    def __enter__(self) -> Stream:
        self._before.append((_current.index, _current.on(self._index)))
        _current.index = self._index
        _current.streams[self._index] = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.index, _current.streams[self._index] = self._before.pop()

    def wait_stream(self, other: Stream) -> None:
        """Let what comes next on this stream wait for the other; the host does not."""

    def wait_event(self, event: Event) -> None:
        """Let what comes next on this stream wait for an event; the host does not."""

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        Log.note("stream.query", True)
        _arriving.arrive()
        return True

    def synchronize(self) -> None:
        Log.note("stream.synchronize", True)
        _arriving.arrive()


class Event:
    """An event of the stand-in. The host that polls it waits: once it is not there yet, then it is.

    One that tells the time is looked at and not waited for: it says nothing of copies.
    """

    def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
        Log.make("event", _index(device))
        self._tells_time = enable_timing
        self._begun: int | None = None  # copies, when it was recorded
        self._asked, self._waited = False, False

    def record(self, stream: Stream | None = None) -> None:
        self._begun, self._asked, self._waited = _arriving.begun, False, False

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait; the host does not."""

    def query(self) -> bool:
        if self._begun is None or self._tells_time:
            return True
        there, self._asked = self._asked, True
        if there:
            self._wait("event.query")
        return there

    def synchronize(self) -> None:
        self._wait("event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds: none, as nothing takes time here."""
        return 0.0

    def _wait(self, how: str) -> None:
        if not self._waited and self._begun is not None:
            Log.note(how, True)
            _arriving.arrive(self._begun)
            self._waited = True


_current = _Current()


def current_stream(device: Any = None) -> Stream:
    """Return the stream of a device on which this thread enqueues."""
    return _current.on(_index(device))


def current_index() -> int:
    """Return the number of this thread's current device."""
    return _current.index


def set_index(device: Any) -> None:
    """Make a device this thread's current one."""
    _current.index = _index(device)


def synchronize(device: Any = None) -> None:
    """Wait for everything on the stand-in."""
    Log.note("synchronize", True)
    _arriving.arrive()


class Module:
    """What `torch.get_device_module` returns for the stand-in."""

    Stream, Event = Stream, Event
    current_stream, synchronize = staticmethod(current_stream), staticmethod(synchronize)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    devices = 1

    def current_device(self) -> int:
        return _current.index

    def device_count(self) -> int:
        return self.devices

    def set_device(self, device: Any) -> None:
        set_index(device)

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def max_memory_reserved(self, device: Any = None) -> int:
        return 0

    def memory_reserved(self, device: Any = None) -> int:
        return 0

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return CARD, CARD

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...

    def is_bf16_supported(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]


# --- registration -------------------------------------------------------------------------------


def _with_pinning(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a factory that marks memory as pinned where it would pin it."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        values = factory(*args, **kwargs)
        return pin(values) if pin_memory else values

    return made


def _composed() -> Iterator[Any]:
    """Yield operations that the CPU has a kernel of, and torch composes of others where a device has none."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has(name, "CPU"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            if any(has(name, f"CompositeExplicitAutograd{rest}") for rest in ("", "NonFunctional")):
                yield getattr(getattr(aten, packet), overload or "default")


def register(devices: int = 1) -> torch.device:
    """Make the stand-in this process' accelerator, for ever, and return its device. Call it before any backward.

    devices  how many there are; the last one is returned
    """
    Module.devices = devices
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    for namespace in ("_", "aten"):
        _libraries.append(torch.library.Library(namespace, "IMPL"))
    everything, own = _libraries
    everything.fallback(run, "PrivateUse1")
    own.impl("copy_", copy_, "PrivateUse1")
    own.impl("_to_copy", _to_copy, "PrivateUse1")
    for op in _composed():
        own.impl(op, partial(run, op), "PrivateUse1")
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resizable = lambda s: hasattr(s, "host") or _RESIZABLE(s)  # type: ignore[method-assign]
    for factory in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like"):
        setattr(torch, factory, _with_pinning(getattr(torch, factory)))
    torch.Tensor.pin_memory = lambda t, *_: pin(t.clone())  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lambda t, *_: is_pinned(t)  # type: ignore[method-assign, assignment]
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc, assignment]
    torch.accelerator.current_stream, torch.accelerator.synchronize = current_stream, synchronize  # type: ignore[assignment]
    torch.accelerator.set_device_index, torch.accelerator.current_device_index = set_index, current_index  # type: ignore[assignment]
    torch.autograd.set_multithreading_enabled(
        False
    )  # backward on the thread that asks for it, so that a caller is known
    return torch.device(NAME, devices - 1)


_libraries: list[torch.library.Library] = []  # a registration ends with its library
