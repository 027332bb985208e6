"""Packed weights: the bits of bitsandbytes, bytes by formula, any part of a matrix by itself, odd ones, NaN."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zero3d.errors import ConfigError
from zero3d.models import codecs
from zero3d.models.codecs import CODECS, weights_under
from zero3d.models.quantised import Matrix, PackedSource
from zero3d.shards.boxes import boxes, slices, whole
from zero3d.spec.formats import FORMATS
from zero3d.tools.sim.memory import NOWHERE, MemoryTracker

SHAPES = [(70, 128), (64, 48), (7, 7), (1, 65), (129, 200), (1, 1)]


def matrix(shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def packed_of(name, weights):
    codec, shape = CODECS[name], tuple(weights.shape)
    return codec.read(lambda box: weights[slices(box)], shape, whole(codec.format.packed_shape(shape)))


def decoded(name, weights, dtype):
    return CODECS[name].decode(packed_of(name, weights), tuple(weights.shape), dtype)


def of_the_library(weights, dtype):
    """What bitsandbytes makes of a matrix: codes, maxima, and the matrix decoded.

    By its arithmetic in torch: its own kernel for CPUs takes other maxima where 64 does not divide a row.
    """
    with mock.patch("torch.compile", lambda function=None, **_: function or (lambda each: each)):  # takes seconds
        import bitsandbytes.functional as bnb
        from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as arithmetic

    codes, state = bnb.quantize_4bit(weights, quant_type="nf4", blocksize=64)
    values = arithmetic(codes.view(-1), state.absmax, state.code, 64, weights.shape, dtype)
    if weights.shape[1] % 64 == 0:
        state.dtype = dtype
        assert bnb.dequantize_4bit(codes, state).equal(values)
    return codes.view(-1), state.absmax, values


@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_has_the_bits_of_bitsandbytes(shape):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weights = matrix(shape, dtype)
        codes, maxima, values = of_the_library(weights, dtype)
        packed = packed_of("nf4", weights)
        assert packed[..., :-4].reshape(-1)[: len(codes)].equal(codes)
        assert packed[..., -4:].contiguous().view(torch.float32).reshape(-1).equal(maxima)
        assert decoded("nf4", weights, dtype).equal(values)


def doubled_by_the_library(weights):
    """The run of a matrix as bitsandbytes has its parts: maxima rounded by its arithmetic in torch.

    Its kernel for CPUs takes another level than the nearest for one maximum in some hundred.
    """
    import bitsandbytes.functional as bnb

    codes, maxima, _ = of_the_library(weights, torch.float32)
    mean, levels = maxima.mean(), bnb.create_dynamic_map()
    in_torch = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    narrow, scales = torch.ops.bitsandbytes.quantize_blockwise.default.redispatch(in_torch, maxima - mean, levels, 256)
    parts = [part.reshape(-1).view(torch.uint8) for part in (codes, narrow, scales, mean)]
    return torch.cat(parts), bnb.QuantState(
        narrow, weights.shape, bnb.get_4bit_type("nf4", "cpu"), 64, "nf4", torch.float32, mean,
        bnb.QuantState(scales, code=levels, blocksize=256, dtype=torch.float32),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [*SHAPES, (300, 64), (257, 192)])
def test_double_quantisation_has_the_bits_of_bitsandbytes(shape):
    import bitsandbytes.functional as bnb

    weights = matrix(shape)
    run, state = doubled_by_the_library(weights)
    packed = packed_of("nf4-double", weights)
    assert packed.equal(run)
    if shape[1] % 64 == 0:
        codes = packed[: weights.numel() // 2, None]
        assert CODECS["nf4-double"].decode(packed, shape, torch.float32).equal(bnb.dequantize_4bit(codes, state))


def test_a_mean_of_maxima_does_not_depend_on_the_number_of_threads():
    weights = matrix((8192, 512))  # torch sums more numbers than 32,768 in an order that threads decide
    threads = torch.get_num_threads()
    packed = packed_of("nf4-double", weights)
    torch.set_num_threads(2)
    again = packed_of("nf4-double", weights)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert packed.equal(again)


def test_a_block_of_zeros_and_the_smallest_numbers_have_the_librarys_bits():
    weights = torch.zeros(3, 64)
    weights[1, 5], weights[2] = 1e-42, 1e-39
    for each in (weights, weights[:, :21].contiguous(), torch.zeros(1, 1)):
        assert decoded("nf4", each, torch.float32).equal(of_the_library(each, torch.float32)[2])


def test_int8_and_fp8_have_the_bits_that_are_written_out_here():
    weights = matrix((130, 200)).float()
    scales = weights.abs().amax(1, keepdim=True) / 127
    assert decoded("int8", weights, torch.float32).equal((weights / scales).round() * scales)
    tile = weights[128:, 128:]
    scale = tile.abs().max() / 448
    wanted = (tile / scale).to(torch.float8_e4m3fn).float() * scale
    assert decoded("fp8", weights, torch.bfloat16)[128:, 128:].equal(wanted.bfloat16())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_decoded_is_near_and_zeros_stay_zeros(name, shape):
    weights = matrix(shape).float()
    weights[0, -1] = 0.01
    error = (decoded(name, weights, torch.float32) - weights).abs().max() / weights.abs().max()
    assert error < {"nf4": 0.16, "nf4-double": 0.17, "int8": 0.005, "fp8": 0.04}[name]
    assert not decoded(name, torch.zeros(shape), torch.bfloat16).any()


def test_bytes_are_by_formula():
    count = 256 * 512
    assert FORMATS["nf4"].nbytes((256, 512)) == count // 2 + count // 16
    assert FORMATS["nf4-double"].nbytes((256, 512)) == count // 2 + count // 64 + 4 * count // 64 // 256 + 4
    assert FORMATS["nf4-double"].nbytes((7, 7)) == 25 + 1 + 4 + 4
    assert FORMATS["int8"].nbytes((256, 512)) == count + 4 * 256
    assert FORMATS["fp8"].nbytes((256, 512)) == count + 4 * count // 128**2
    for name, form in FORMATS.items():
        for shape in SHAPES:
            assert packed_of(name, matrix(shape)).numel() == form.nbytes(shape)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(70, 128), (33, 48), (129, 200)])
def test_any_part_of_a_matrixs_records_is_made_of_its_own_weights_alone(name, shape):
    weights, read = matrix(shape), []

    def source(name, box):
        read.append(box)
        return weights[slices(box)]

    packed = packed_of(name, weights)
    given = PackedSource(source, {"up.weight": Matrix(CODECS[name], shape, None)}, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        start, stop = sorted(torch.randint(packed.numel() + 1, (2,), generator=generator).tolist())
        for box in boxes(tuple(packed.shape), start, stop):
            assert given("up.packed", box).equal(packed[slices(box)])
    assert given("up.weight", ((3, 5), (1, 4))).equal(weights[3:5, 1:4])
    form = FORMATS[name]
    if name == "nf4-double":
        assert given("up.packed", ((40, 50),)).equal(packed[40:50])
        assert read[-1] == ((64 // shape[1], 1 + 127 // shape[1]), (0, shape[1]))
    else:
        (first, last), _ = weights_under(form, shape, (0, 1), (0, 1))
        assert last - first <= max(form.rows, 3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(name, bad):
    weights = matrix((8, 64))
    weights[3, 4] = bad
    matrices = {"up.weight": Matrix(CODECS[name], (8, 64), None)}
    source = PackedSource(lambda name, box: weights[slices(box)], matrices, torch.float32)
    with pytest.raises(ConfigError, match=rf"model\.quantize={name}: up\.weight is refused: .* NaN or infinite"):
        source("up.packed", tuple((0, size) for size in FORMATS[name].packed_shape((8, 64))))


def test_maxima_are_packed_alike_by_any_number_of_threads():
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            draws = (torch.rand(1 << 16, generator=torch.Generator().manual_seed(seed)) for seed in range(8))
            found.append([CODECS["nf4-double"]._run_of(scales) for scales in draws])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


def test_a_dry_run_leaves_no_table_without_values_behind():
    codes = torch.arange(256, dtype=torch.uint8)
    codecs._maxima.cache_clear()
    with FakeTensorMode():
        codecs._looked_up(codecs._maxima, torch.float32, torch.zeros(4, dtype=torch.uint8))
    found = codecs._looked_up(codecs._maxima, torch.float32, codes)
    assert found.tolist() == torch.tensor(codecs.LEVELS_OF_MAXIMA).tolist()


@pytest.mark.parametrize("levels", [codecs.LEVELS, codecs.LEVELS_OF_MAXIMA], ids=["weights", "maxima"])
def test_borders_are_counted_as_they_are_searched(levels):
    levels, inf = torch.tensor(levels), torch.tensor(float("inf"))
    borders = (levels[:-1] + levels[1:]) / 2
    around = [torch.nextafter(borders, far) for far in (-inf, inf)]
    others = torch.tensor([0.0, -0.0, 1e-45, -1e-45, float("inf"), -float("inf"), float("nan")])
    scaled = torch.cat([levels, borders, *around, others])
    codes = codecs._nearest_of_few(scaled, levels)
    assert codes.equal(codecs._nearest(scaled, levels))
    count = len(borders)
    assert codes[count + 1 : 2 * count + 1].tolist() == list(range(count))  # a tie is the lower level's


def scaled_by(scales, shape):
    """Groups of nf4 with all codes and the scales given, as a matrix of this shape has them."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(-(-FORMATS["nf4"].nbytes(shape) // 256))
    packed = packed[: FORMATS["nf4"].nbytes(shape)].view(FORMATS["nf4"].packed_shape(shape))
    groups = packed.view(-1, packed.shape[-1])
    groups[:, -4:] = torch.tensor(scales).repeat(len(groups))[: len(groups), None].view(torch.uint8)
    return packed


@pytest.mark.parametrize(("scales", "shape", "taken"), [
    ([0.3, 7.0], (6, 128), True),
    ([0.3, 0.0], (5, 24), True),
    ([0.0], (1, 1), True),
    ([0.3, 1e-38], (6, 128), False),
    ([0.3, float("nan")], (6, 128), False),
], ids=["plain", "with a group of zeros", "zeros alone", "subnormal", "released"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_librarys_kernel_is_taken_where_it_has_the_bits_of_plain_torch(scales, shape, taken, dtype):
    packed = scaled_by(scales, shape)
    with mock.patch.object(codecs, "_kernel", wraps=codecs._kernel) as kernel:
        assert codecs._has_kernel(packed.device, dtype)
        kernel.reset_mock()
        found = CODECS["nf4"].decode(packed, shape, dtype)
        assert kernel.called == taken
    with mock.patch.object(codecs, "_has_kernel", return_value=False):
        plain = CODECS["nf4"].decode(packed, shape, dtype)
    assert found.view(torch.uint8).equal(plain.view(torch.uint8))


def test_a_library_that_is_missing_broken_or_of_other_bits_is_not_taken():
    codecs._has_kernel.cache_clear()
    device = torch.device("cpu")
    for error in (ImportError, OSError, RuntimeError):
        with mock.patch.object(codecs.importlib, "import_module", side_effect=error):
            assert not codecs._has_kernel(device, torch.float32)
        codecs._has_kernel.cache_clear()
    with mock.patch.object(codecs, "_kernel", side_effect=lambda *given: codecs._values_nf4(given[0]).view(-1)):
        assert not codecs._has_kernel(device, torch.float32)
    codecs._has_kernel.cache_clear()
    assert not codecs._has_kernel(device, torch.float64)  # which the library refuses


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("part", [0, 1], ids=["first half", "second half"])
def test_making_groups_holds_no_more_than_a_block_of_weights_in_full_precision(name, part):
    shape, block = (1024, 256), 2 * 128 * 128
    weights, (rows, *others) = matrix(shape), FORMATS[name].packed_shape(shape)
    box = ((part * rows // 2, (part + 1) * rows // 2), *whole(tuple(others)))
    tracker = MemoryTracker(SimpleNamespace(now=lambda: NOWHERE))
    tracker.leave_out(weights)
    with mock.patch.object(codecs, "READ_AT_ONCE", block), tracker:
        packed = CODECS[name].read(lambda box: weights[slices(box)].clone(), shape, box)
    assert tracker.live == packed.nbytes
    assert 4 * block < tracker.log.peak - 2 * packed.nbytes < 22 * block  # fp32 is 4, and the whole half 16


def scratch_of_decoding(packed, shape):
    """Most bytes alive beside a matrix while it is decoded to bf16."""
    CODECS["nf4"].decode(packed, shape, torch.bfloat16)  # makes its tables
    tracker = MemoryTracker(SimpleNamespace(now=lambda: NOWHERE))
    tracker.leave_out(packed)
    with tracker:
        found = CODECS["nf4"].decode(packed, shape, torch.bfloat16)
    return tracker.log.peak - found.nbytes


def test_decoding_by_the_librarys_kernel_holds_no_more_than_in_plain_torch(monkeypatch):
    shape, group = (256, 300), 1 << 12
    packed = packed_of("nf4", matrix(shape))
    with mock.patch.object(codecs, "_kernel", wraps=codecs._kernel) as kernel:
        assert scratch_of_decoding(packed, shape) == packed.nbytes  # codes and scales, each by itself
        monkeypatch.setattr(codecs, "group_elements", lambda _: group)
        monkeypatch.setattr(codecs, "IN_ONE_CALL", 4 * group)
        kernel.reset_mock()
        by_kernel = scratch_of_decoding(packed, shape)
        assert kernel.call_count == 2 * -(-256 * 300 // group)
    found = CODECS["nf4"].decode(packed, shape, torch.bfloat16)
    monkeypatch.setattr(codecs, "_has_kernel", lambda *_: False)
    assert by_kernel < scratch_of_decoding(packed, shape) <= 10 * group
    assert found.equal(CODECS["nf4"].decode(packed, shape, torch.bfloat16))


@pytest.mark.parametrize("name", FORMATS)
def test_groups_are_decoded_wherever_their_bytes_lie(name):
    weights = matrix((130, 128))
    packed = packed_of(name, weights)
    moved = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].view(packed.shape).copy_(packed)
    assert CODECS[name].decode(moved, (130, 128), torch.float32).equal(decoded(name, weights, torch.float32))


def test_every_byte_of_fp8_is_decoded_as_torch_casts_it():
    packed = torch.zeros(FORMATS["fp8"].packed_shape((128, 128)), dtype=torch.uint8)
    packed[..., :256] = torch.arange(256, dtype=torch.uint8)
    packed[..., -4:] = torch.tensor([1.0]).view(torch.uint8)
    wanted = packed[0, 0, :-4].view(torch.float8_e4m3fn).float().view(128, 128)
    found = CODECS["fp8"].decode(packed, (128, 128), torch.float32)
    assert found.isnan().sum() == 2
    assert found.view(torch.int32).equal(wanted.view(torch.int32))
