"""Checkpoints of other trainers that claim what is not so: each ends in one line and exit code 2, and writes nothing."""

import collections
import io
import os
import pickle
import struct
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zero3d.errors import CheckpointError
from zero3d.tools.cli.main import main
from zero3d.ways.checkpoints import dcp, deepspeed
from zero3d.ways.checkpoints.archives import map_file, read_torch
from zero3d.ways.checkpoints.restricted import DEEPEST, read_pickle

WIDE, DEEP = torch.arange(12.0).reshape(4, 3), 20_000
FILE = "__0_0.distcp"


class Saved:
    """A checkpoint of DCP's that is made by hand: one tensor in two chunks, another whole."""

    def __init__(self, folder):
        self.folder, self.data, self.described, self.stored = folder, b"", {}, {}
        self.add("w", WIDE, [(0, 2), (2, 4)])
        self.add("b", torch.tensor([1.0, 2.0]), [(0, 2)])

    def add(self, name, values, rows):
        chunks = []
        for start, stop in rows:
            piece = values[start:stop].clone()
            at = (start, *(0 for _ in values.shape[1:]))
            chunks.append(ChunkStorageMetadata(torch.Size(at), piece.shape))
            self.stored[MetadataIndex(name, at)] = self.placed(piece)
        self.described[name] = TensorStorageMetadata(TensorProperties(values.dtype), values.shape, chunks)

    def placed(self, piece):
        buffer = io.BytesIO()
        torch.save(piece, buffer)
        self.data += buffer.getvalue()
        return _StorageInfo(FILE, len(self.data) - len(buffer.getvalue()), len(buffer.getvalue()))

    def place(self, name, row=0):
        return next(info for index, info in self.stored.items() if index.fqn == name and index.offset[0] == row)

    def write(self, metadata=None):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / FILE).write_bytes(self.data)
        whole = pickle.dumps(Metadata(self.described, None, self.stored)) if metadata is None else metadata
        (self.folder / ".metadata").write_bytes(whole)
        return self.folder


def import_of(source, target):
    return main(["ckpt", "import", str(source), str(target)])


def refused(source, tmp_path, capsys):
    """What is said of a checkpoint: one line, nothing is written, exit code 2."""
    assert import_of(source, tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    assert "Traceback" not in told
    assert len(told) < 900, told
    assert not (tmp_path / "out").exists()
    return told


def test_what_is_made_by_hand_is_imported_as_it_is(tmp_path):
    Saved(tmp_path / "dcp").write()
    found = dcp.read(dcp.found(tmp_path / "dcp"))
    torch.testing.assert_close(found.masters, {"w": WIDE, "b": torch.tensor([1.0, 2.0])}, rtol=0, atol=0)
    assert import_of(tmp_path / "dcp", tmp_path / "out") == 0
    assert main(["ckpt", "verify", str(tmp_path / "out")]) == 0


def gap(saved):
    del saved.described["w"].chunks[1]


def overlap(saved):
    saved.described["w"].chunks[1].offsets = torch.Size([1, 0])
    saved.stored[MetadataIndex("w", (1, 0))] = saved.place("w", 2)


def gap_and_overlap(saved):
    saved.described["w"].chunks[1] = saved.described["w"].chunks[0]


def shape(saved, size, offsets=(0, 0)):
    chunk = saved.described["w"].chunks[0]
    chunk.sizes, chunk.offsets = torch.Size(size), torch.Size(offsets)


def huge(saved, rows=1 << 30):
    saved.described["w"].size = torch.Size([rows, 3])
    saved.described["w"].chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, 3]))]


def huge_everywhere(saved):
    huge(saved)
    saved.place("w").length = 1 << 40


def no_chunks(saved):
    saved.described["w"].chunks = []


def other_values(saved):
    info = saved.placed(torch.ones(2, 2))
    vars(saved.place("w")).update(vars(info))


def other_dtype(saved):
    saved.described["b"].properties.dtype = torch.float64


def no_tensor(saved):
    buffer = io.BytesIO()
    torch.save({"a": [0.0] * 100}, buffer)
    info = saved.place("b")
    info.offset, info.length = len(saved.data), len(buffer.getvalue())
    saved.data += buffer.getvalue()


def odd_dtype(saved):
    saved.described["b"].properties.dtype = torch.quint8


def text_for_dtype(saved):
    saved.described["b"].properties.dtype = "float32"


def path(name):
    def change(saved):
        saved.place("b").relative_path = name

    return change


def offset(at):
    def change(saved):
        saved.place("b").offset = at

    return change


def one_place_for_all(saved):
    for i in range(50):
        saved.described[f"x{i}"] = saved.described["b"]
        saved.stored[MetadataIndex(f"x{i}", (0,))] = saved.place("b")


def lose_a_place(saved):
    del saved.stored[MetadataIndex("b", (0,))]


def name(given):
    def change(saved):
        saved.described[given] = saved.described["b"]

    return change


def packed(saved):
    saved.place("b").transform_descriptors = ["zstd"]


@pytest.mark.parametrize(("harm", "words"), [
    (gap, "1 chunks of w are not all of its [4, 3] exactly once (nothing at (2:4"),
    (overlap, "2 chunks of w are not all of its [4, 3] exactly once (2 boxes at (1"),
    (gap_and_overlap, "2 chunks of w are not all of its [4, 3] exactly once (2 boxes at (0:2"),
    (no_chunks, "0 chunks of w are not all"),
    (lambda saved: shape(saved, (2, 3), (-1, 0)), "for a shape or a place"),
    (lambda saved: shape(saved, (2, -3)), "for a shape or a place"),
    (lambda saved: shape(saved, (1 << 62, 3), (1 << 62, 0)), "for a shape or a place"),
    (lambda saved: shape(saved, (2, 4)), "beyond the tensor's [4, 3]"),
    (lambda saved: shape(saved, (6,), (0,)), "has other dimensions"),
    (lambda saved: shape(saved, (1 << 52, 3)), "beyond the tensor's [4, 3]"),
    (huge, "12,884,901,888 of its own: copy it again"),
    (huge_everywhere, "12,884,901,888 of its own: copy it again"),
    (lambda saved: huge(saved, 1 << 52), "of its own: copy it again"),
    (other_values, "has [2, 2] torch.float32 where w at [0, 0] is [2, 3]"),
    (other_dtype, "has [2] torch.float32 where b at [0] is [2] torch.float64"),
    (no_tensor, "has a dict where b at [0] is [2]"),
    (odd_dtype, "b has the dtype torch.quint8, which no weight has"),
    (text_for_dtype, "b has the dtype float32, which no weight has"),
    (path("../other"), "names the file '../other', which is not in it"),
    (path("a/../../other"), "which is not in it"),
    (path("/etc/passwd"), "names the file '/etc/passwd', which is not in it"),
    (path("a\0b"), "which is not in it"), (path(""), "which is not in it"), (path(3), "names no file for b"),
    (path("missing"), "cannot be read: No such file"), (path("x" * 5000), "cannot be read: File name too long"),
    (path("."), "which is not in it"),
    (offset(-1), "for a shape or a place"), (offset(1 << 40), "copy it again"), (offset("a"), "for a shape or a place"),
    (offset(100), "is damaged"),
    (one_place_for_all, "of its own: copy it again"),
    (lose_a_place, "does not say where b at [0] is"),
    (name(3), "by the name 3, which no module has"), (name("a\nb"), "which no module has"),
    (name(""), "which no module has"), (name("x" * 5000), "which no module has"),
    (packed, "is compressed"),
])  # fmt: skip
def test_metadata_that_cannot_be_true_are_refused(tmp_path, capsys, harm, words):
    saved = Saved(tmp_path / "dcp")
    harm(saved)
    told = refused(saved.write(), tmp_path, capsys)
    assert words in told, told


def link_out(folder, path):
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


def link_to_a_pipe(folder, path):
    os.mkfifo(folder / "pipe")
    path.unlink()
    path.symlink_to(folder / "pipe")


def pipe(folder, path):
    path.unlink()
    os.mkfifo(path)


def circle(folder, path):
    path.unlink()
    path.symlink_to(path.name)


def device(folder, path):
    path.unlink()
    path.symlink_to("/dev/zero")


def folder_for_file(folder, path):
    path.unlink()
    path.mkdir()


def empty(folder, path):
    path.write_bytes(b"")


@pytest.mark.parametrize(("harm", "words"), [
    (link_out, "out of the folder"), (link_to_a_pipe, "out of the folder"), (device, "out of the folder"),
    (pipe, "is not a regular file"), (folder_for_file, "is not a regular file"), (circle, "cannot be read"),
    (empty, "is empty"),
])  # fmt: skip
@pytest.mark.parametrize("file", [FILE, ".metadata"])
def test_only_regular_files_of_the_folder_are_opened(tmp_path, capsys, file, harm, words):
    folder = Saved(tmp_path / "dcp").write()
    harm(tmp_path, folder / file)
    told = refused(folder, tmp_path, capsys)
    assert words in told or "has neither" in told, told


def test_a_link_within_the_folder_and_a_folder_that_is_a_link_are_followed(tmp_path, capsys):
    folder = Saved(tmp_path / "dcp").write()
    (folder / FILE).rename(folder / "data")
    (folder / FILE).symlink_to("data")
    (tmp_path / "linked").symlink_to(folder)
    assert import_of(tmp_path / "linked", tmp_path / "out") == 0


def test_several_checkpoints_are_not_mixed(tmp_path, capsys):
    Saved(tmp_path / "all" / "step-1").write()
    Saved(tmp_path / "all" / "step-2").write()
    assert "they are several checkpoints" in refused(tmp_path / "all", tmp_path, capsys)


TUPLES = b"\x80\x04}(" + b")" + b"\x85" * 400_000 + b"K\x01u."  # {((((),),),): 1}
LISTS = b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b"."
MAPPINGS = b"\x80\x04" + b"}K\x00" * DEEP + b"}" + b"s" * DEEP + b"."
MARKS = b"\x80\x04" + b"(" * DEEP + b"t" * DEEP + b"."
SETS = b"\x80\x04" + b"(" * DEEP + b"\x91" * DEEP + b"."
BY_MEMO = b"\x80\x04)" + b"\x94h\x00\x85" * 200 + b"".join(b"\x94j" + struct.pack("<I", i) + b"\x85" for i in range(200, 900)) + b"."  # fmt: skip
REDUCED = b"\x80\x04" + b"cbuiltins\ntuple\n(" * 2000 + b")" + b"tR" * 2000 + b"."
MEMO = b"\x80\x04K\x01r\xff\xff\xff\xff."
LONG = b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"."
COPIES = (
    b"\x80\x04](" + b"K\x01" * 5000 + b"e\x94](" + b"cbuiltins\ntuple\nh\x00\x85R" * 5000 + b"e."
)  # a list of 5,000 lists of 5,000


@pytest.mark.parametrize(("data", "words"), [
    (TUPLES, "nests more than"), (LISTS, "nests more than"), (MAPPINGS, "nests more than"), (MARKS, "nests more than"),
    (SETS, "nests more than"), (REDUCED, "nests more than"), (MEMO, "a memo of 4,294,967,295 places"), (LONG, "is damaged"),
    (COPIES, "copies its own containers"), (b"", "is empty"), (b"\x80\x04.", "is damaged"), (b"cos\nsystem\n.", "is not metadata"),
    (b"\x80\x04cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "is not metadata"),
    (b"\x80\x04ctorch\nTensor\nJ\xff\xff\xff\x7f\x85R.", "is not metadata"),
    (b"\x80\x04ctorch\nFloatStorage\nJ\xff\xff\xff\x7f\x85R.", "is not metadata"),
    (b"\x80\x04ctorch._utils\n_rebuild_tensor_v2\nN}X\x08\x00\x00\x00__name__K\x01s\x86b.", "is damaged"),
    (pickle.dumps({"a": 1}), "is not metadata"), (pickle.dumps(Metadata(3)), "is not metadata"),
    (pickle.dumps(Metadata({}, None, {})), "has no weights"),
    (pickle.dumps(Metadata({}, None, {"a": 1})), "is not laid out"),
])  # fmt: skip
def test_pickles_that_would_end_the_interpreter_or_fill_memory_are_refused(tmp_path, capsys, data, words):
    told = refused(Saved(tmp_path / "dcp").write(data), tmp_path, capsys)
    assert words in told, told


def test_depth_is_counted_to_the_level(tmp_path):
    def nested(levels):
        value = ()
        for _ in range(levels):
            value = (value,)
        return pickle.dumps({value: [value]})

    assert len(read_pickle("x", nested(DEEPEST - 3), {})) == 1
    with pytest.raises(CheckpointError, match="nests more than"):
        read_pickle("x", nested(DEEPEST + 1), {})
    with pytest.raises(CheckpointError, match="nests more than"):
        read_pickle("x", BY_MEMO, {})


def test_lists_that_are_filled_from_the_outside_are_read_and_freed(tmp_path):
    """Each is filled after it was put into the one around it, so that no level is deep when it is made."""
    levels = 20_000
    rest = b"".join(b"]\x94a0j" + struct.pack("<I", level + 1) for level in range(levels))
    found = read_pickle("x", b"\x80\x04]\x94h\x00" + rest + b"0.", {})
    assert len(found) == 1


class Elements:
    """A storage as a pickle names it, with this number of elements."""

    def __init__(self, count, kind=torch.FloatStorage):
        self.count, self.kind = count, kind


class Forged:
    """A tensor as a pickle has it."""

    def __init__(self, count, size, stride=(1,), offset=0):
        self.given = Elements(count), offset, size, stride, False, collections.OrderedDict()

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.given


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", value.kind, "0", "cpu", value.count) if isinstance(value, Elements) else None


def save_forged(path, value, data=bytes(400), compression=zipfile.ZIP_STORED, order=b"little"):
    buffer = io.BytesIO()
    if isinstance(value, bytes):
        buffer.write(value)
    else:
        Pickler(buffer, 2).dump(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in (
            ("data.pkl", buffer.getvalue()),
            ("data/0", data),
            ("byteorder", order),
            ("version", b"3"),
        ):
            archive.writestr(f"archive/{name}", content)
    return map_file(path.parent, path.name)


def test_a_forged_file_that_claims_what_it_has_is_read(tmp_path):
    found = read_torch(
        save_forged(tmp_path / "x.pt", {"a": Forged(100, (10, 10), (10, 1)), "b": Forged(100, (5, 7), (0, 1))})
    )
    assert found["a"].equal(torch.zeros(10, 10))
    assert found["b"].shape == (5, 7)


@pytest.mark.parametrize(("value", "words"), [
    (Forged(1 << 30, (1 << 30,)), "resize storage"), (Forged(-1, (1,)), "resize storage"),
    (Forged(100, (1 << 30,)), "resize storage"), (Forged(100, (2,), (100,)), "resize storage"),
    (Forged(100, (1,), (1,), 100), "resize storage"), (Forged(100, (-5,)), "overflow"),
    (Forged(100, (5,), (-1,)), "overflow"), (Forged(100, (1 << 70,)), "set_"), (Forged(100, ("a",)), "set_"),
    (b"\x80\x02cposix\nsystem\nX\x01\x00\x00\x00a\x85R.", "names posix.system, which no checkpoint needs"),
    (pickle.dumps({"a": (1,)}, 4), "a pickle of protocol 4, and torch.load reads 2"),
    (b"\x80\x02]K\x01b.", "Can only build Tensor, Parameter, OrderedDict"),
    (Forged(100, (1 << 31, 100), (0, 1)), "more than 16 times as large"),
    ([Forged(100, (100, 40_000), (1, 0)) for _ in range(9)], "more than 16 times as large"),
    (TUPLES, "nests more than"),
])  # fmt: skip
def test_tensors_have_no_more_than_their_file(tmp_path, value, words):
    mapped = save_forged(tmp_path / "x.pt", value)
    with pytest.raises(CheckpointError) as told:
        read_torch(mapped)
    assert words in str(told.value)


def test_packed_records_are_refused_and_another_order_of_bytes_is_turned(tmp_path):
    one = Forged(100, (100,))
    with pytest.raises(CheckpointError, match="packed"):
        read_torch(save_forged(tmp_path / "packed", one, compression=zipfile.ZIP_DEFLATED))
    turned = save_forged(tmp_path / "order", one, struct.pack(">100f", *range(100)), order=b"big")
    assert read_torch(turned).tolist() == list(range(100))


@pytest.mark.parametrize("value", [
    torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.ones(2, dtype=torch.complex64).conj(),
])  # fmt: skip
def test_tensors_of_other_kinds_are_refused(tmp_path, value):
    torch.save({"a": [value]}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="a tensor that is"):
        read_torch(map_file(tmp_path, "x.pt"))


def test_bits_of_a_file_that_turn_end_in_an_error_or_in_values(tmp_path):
    torch.save({"a": torch.arange(20.0), "b": [1, ("c", 2.5)]}, tmp_path / "x.pt")
    whole, random = (tmp_path / "x.pt").read_bytes(), torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for at in torch.randint(len(whole), (3,), generator=random).tolist():
            damaged[at] ^= 1 << int(torch.randint(8, (1,), generator=random))
        (tmp_path / "y.pt").write_bytes(damaged)
        try:
            read_torch(map_file(tmp_path, "y.pt"))
        except CheckpointError:
            refused += 1
    assert 10 < refused < 150


class Slice:
    def __init__(self, start, numel):
        self.start, self.numel = start, numel


def save_deepspeed(folder, at, shapes, flat=10, about=None, step=1):
    """A checkpoint of stage 1 by one rank, with moments."""
    folder.mkdir(parents=True)
    part = torch.arange(float(flat))
    state = {"single_partition_of_fp32_groups": [part], "partition_count": [1], "param_slice_mappings": [at],
             "base_optimizer_state": {"state": {0: {"exp_avg": part, "exp_avg_sq": part, "step": step}}}}  # fmt: skip
    torch.save({"optimizer_state_dict": state}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"param_shapes": [shapes], "global_steps": step} | (about or {}), folder / "mp_rank_00_model_states.pt")
    return folder


def test_slices_of_deepspeed_are_put_together(tmp_path):
    folder = save_deepspeed(tmp_path / "ds", {"a": Slice(0, 6), "b": Slice(6, 4)}, {"a": (2, 3), "b": (4,)})
    found = deepspeed.read(folder)
    assert found.masters["a"].equal(torch.arange(6.0).reshape(2, 3))
    assert found.masters["b"].tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize(("at", "shapes", "about", "step", "words"), [
    ({"a": Slice(0, 6), "b": Slice(5, 4)}, {"a": (6,), "b": (4,)}, None, 1, "has 4 elements of b at 5, and a up to 6"),
    ({f"a{i}": Slice(0, 10) for i in range(9)}, {f"a{i}": (10,) for i in range(9)}, None, 1, "up to 10"),
    ({"a": Slice(-4, 4)}, {"a": (4,)}, None, 1, "has 4 elements of a at -4, and nothing before"),
    ({"a": Slice(4, 7)}, {"a": (7,)}, None, 1, "in a flat part of 10"),
    ({"a": Slice(1 << 62, 1 << 62)}, {"a": (4,)}, None, 1, "in a flat part of 10"),
    ({"a": Slice("0", "4")}, {"a": (4,)}, None, 1, "has 4 elements of a at 0, and nothing before"),
    ({"a": Slice(0, 4)}, {"a": (1 << 40, 1 << 40)}, None, 1, "the files have 4 of 1,208,925,819,614,629,174,706,176"),
    ({"a": Slice(0, 4)}, {"a": (-1,)}, None, 1, "the shape of a is (-1,)"),
    ({"a": Slice(0, 4)}, {"a": (-2, -2)}, None, 1, "the shape of a is"),
    ({"a": Slice(0, 4)}, {"a": "four"}, None, 1, "the shape of a is"),
    ({"a\n": Slice(0, 4)}, {"a\n": (4,)}, None, 1, "which no module has"),
    ({"a": Slice(0, 4)}, {"a": (4,)}, None, -1, "has applied -1 steps"),
    ({"a": Slice(0, 4)}, {"a": (4,)}, None, 1 << 200, "steps, which no run has"),
    ({"a": Slice(0, 4)}, {"a": (4,)}, None, float("inf"), "is not laid out"),
    ({"a": Slice(0, 4)}, {"a": (4,)}, {"frozen_param_shapes": {"f": (9,)}}, 1, "is not laid out"),
    ({"a": Slice(0, 4)}, {"a": (4,)}, {"frozen_param_shapes": {"f": (9,)}, "frozen_param_fragments": {"f": torch.ones(4)}},
     1, "the files have 4 of 9 elements of f"),
    ({"a": Slice(0, 4)}, {"a": (4,)}, {"frozen_param_shapes": 3}, 1, "is not laid out"),
])  # fmt: skip
def test_what_deepspeeds_files_claim_is_compared_with_what_they_have(tmp_path, capsys, at, shapes, about, step, words):
    told = refused(save_deepspeed(tmp_path / "ds", at, shapes, about=about, step=step), tmp_path, capsys)
    assert words in told, told


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "..", "a/b", "a\0b", "x" * 5000, ""])
def test_latest_names_a_folder_beside_it(tmp_path, capsys, name):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "latest").write_text(name)
    told = refused(tmp_path / "ds", tmp_path, capsys)
    assert "name the folder of a step itself" in told, told


@pytest.mark.parametrize("harm", [link_out, link_to_a_pipe, device, pipe, folder_for_file, empty])
@pytest.mark.parametrize("file", ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"])
def test_only_regular_files_of_deepspeeds_folder_are_opened(tmp_path, capsys, file, harm):
    folder = save_deepspeed(tmp_path / "ds", {"a": Slice(0, 4)}, {"a": (4,)})
    harm(tmp_path, folder / file)
    told = refused(folder, tmp_path, capsys)
    assert "out of the folder" in told or "is not a regular file" in told or "is empty" in told, told


@pytest.mark.parametrize("source", ["x" * 5000, "~nobody-by-that-name/x", "a\0b"])
def test_a_source_that_no_folder_can_be_is_told(tmp_path, capsys, source):
    assert "is not a folder" in refused(source, tmp_path, capsys)
