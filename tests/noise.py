"""Another CPU on this one: matrix products whose last bit is drawn, for `make test CPU=noise`.

Two CPUs differ in the order in which they sum, so in the last bit of a matrix product. `begin` puts a kernel in the place of
each of torch's for products on the CPU, which calls torch's and then moves elements of the result by one unit in the last
place. Below all dispatch modes, in all threads, and not reached by fake or meta tensors, it changes values and nothing else.

What is drawn is a function of the seed, of the shapes of the product and of the mantissa of the element, so that products of
numbers that are twice as large, or have another sign, move alike, as they round alike on every CPU. So

- the same product of the same operands has the same bits wherever it is computed: in a backward pass, a recomputation, a
  resumed run, another process, another stage of ZeRO. What zero3d promises by bits holds on a noisy CPU as on any other;
- the same rows have other bits in a product of another number of rows, as on CPUs whose kernels choose blocks by shape. The
  matrices of a batch are products of their own, whose number changes nothing.

Left as they are: zeros, infinities and NaN, and products of length 1, which every CPU rounds alike. In 16 bits, to which a sum
in fp32 is rounded, CPUs seldom differ: there one element of 32 moves.
"""

import threading
import warnings
from functools import cache
from hashlib import sha256
from typing import NamedTuple

import numpy as np

_libraries = []  # the kernels are in force as long as it is kept
_running = threading.local()


def begin(seed="1"):
    """Make the matrix products of this process noisy, and of those that are forked from it, unless they are."""
    import torch  # where commands' hook waits for it, that begins the noise

    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel" is what is meant
        for name, shape_of in PRODUCTS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, noisy(kernel.call_boxed, shape_of, seed), "CPU", with_keyset=True)
    _libraries.append(library)


def end():
    """Give torch its kernels back."""
    for library in _libraries:
        library._destroy()
    _libraries.clear()


def noisy(kernel, shape_of, seed):
    """A kernel's results with noise, drawn for the shapes of one matrix product that `shape_of` finds in its arguments."""
    from torch._C._dynamo import eval_frame

    def run(keyset, *args, **kwargs):
        if getattr(_running, "product", False):  # one that is made of others, as some of batches are
            return kernel(keyset, *args, **kwargs)
        _running.product = True
        try:
            result = kernel(keyset, *args, **kwargs)
        finally:
            _running.product = False
        shape = shape_of(*args)
        if shape[-1] > 1:
            for each in result if isinstance(result, tuple | list) else (result,):
                if each is not None and each.dtype.itemsize in WORDS and each.is_floating_point():
                    add_noise(each, salt_of(seed, shape))
        return result

    skipped = eval_frame._FrameAction.SKIP  # a kernel that compiled code calls is not to be compiled with what it calls
    eval_frame.set_code_exec_strategy(run.__code__, eval_frame._FrameExecStrategy(skipped, skipped))
    return run


@cache
def salt_of(seed, shape):
    return int.from_bytes(sha256(f"{seed} {shape}".encode()).digest()[:4], "little")


class Word(NamedTuple):
    """Bits of an element, as torch and numpy call integers of its size, and the unsigned ones that its hash is made of."""

    torch: str
    signed: type
    unsigned: type
    shift: int
    multiplier: int
    seldom: int  # one element in so many moves, a power of 2


WORDS = {  # bytes of an element -> its word
    8: Word("int64", np.int64, np.uint64, 32, 0x2545F4914F6CDD1D, 2),
    4: Word("int32", np.int32, np.uint32, 16, 0x2C1B3C6D, 2),
    2: Word("int16", np.int16, np.uint32, 16, 0x2C1B3C6D, 32),
}


def add_noise(values, salt):
    """Move elements of a tensor by at most one unit in the last place, each by its own bits and the salt."""
    import torch

    word, finite = WORDS[values.dtype.itemsize], torch.finfo(values.dtype)
    bits = np.atleast_1d(values.detach().view(getattr(torch, word.torch)).numpy())
    smallest, largest = (bits_of(number, values.dtype, word) for number in (finite.tiny, finite.max))
    drawn = (bits & word.signed(round(1 / finite.eps) - 1)).astype(word.unsigned)  # of the mantissa
    for shift in (word.shift - 1, word.shift):
        drawn += word.unsigned(salt)
        drawn *= word.unsigned(word.multiplier)
        drawn ^= drawn >> word.unsigned(shift)
    magnitude = bits & word.signed((1 << 8 * bits.itemsize - 1) - 1)
    moved = (magnitude > smallest) & (magnitude < largest) & (drawn & word.unsigned(2 * word.seldom - 2) == 0)
    bits += np.where(drawn & word.unsigned(1), word.signed(1), word.signed(-1)) * moved


@cache
def bits_of(number, dtype, word):
    """The bits of a number as an integer of numpy's."""
    import torch

    return word.signed(torch.tensor(number, dtype=dtype).view(getattr(torch, word.torch)).item())


# What one matrix product of an operation is: rows, columns and, last, the length of its sums. Batches are left out.


def product(left, right, *_):
    return left.shape[-2], right.shape[-1], left.shape[-1]


def added(_, left, right, *rest):
    return product(left, right)


def vector(matrix, right, *_):
    return matrix.shape[0], 1, matrix.shape[1]


def added_vector(_, matrix, right, *rest):
    return vector(matrix, right)


def inner(left, right, *_):
    return 1, 1, left.shape[0]


def attention(query, keys, *_):
    return query.shape[-2], query.shape[-1], keys.shape[-2]


def attention_backward(_, query, keys, *rest):
    return "backward", query.shape[-2], query.shape[-1], keys.shape[-2]


def convolved(inputs, weight, *_):
    return *inputs.shape, weight[0].numel()


def convolved_backward(outputs, inputs, weight, *_):
    return "backward", *inputs.shape, outputs.numel()


PRODUCTS = {  # operations of torch -> what one product of theirs is
    "mm": product, "mm.out": product,
    "bmm": product, "bmm.out": product,
    "addmm": added, "addmm_": added, "addmm.out": added,
    "_addmm_activation": added, "_addmm_activation.out": added,
    "baddbmm": added, "baddbmm_": added, "baddbmm.out": added,
    "addmv": added_vector, "addmv_": added_vector, "addmv.out": added_vector,
    "dot": inner,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "convolution": convolved, "convolution_backward": convolved_backward,
}  # fmt: skip
