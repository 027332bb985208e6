"""Streams of weights: the bits of an export on any mesh, and receivers in processes of their own that die, stop, sleep."""

import filecmp
import os
import re
import signal
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from unittest.mock import patch

import pytest
import torch
from meshes import engine_of, evaluated, mesh_of, share_of, step, world_of
from mixtures import engine_of as engine_with_experts, own_part, with_adapters
from models import adamw, build
from pipelines import Lm, covering
from safetensors import safe_open
from safetensors.torch import load_file
from tensors import tiny

import zero3d
from zero3d.checkpoint.streamed_folder import FolderSender
from zero3d.distributed.shared_buffer import SharedBuffer
from zero3d.errors import CheckpointError, ConfigError, NonFiniteError, RankError, ReleasedParameterError, StreamError
from zero3d.precision import DTYPES
from zero3d.watchdog.heartbeat import read_beat
from zero3d.weights import GroupSender, LocalSender, connect
from zero3d.weights.buckets import Assembler

SMALL = 8192  # bytes of a bucket: some tensors go in parts, some buckets have several
KINDS = {"none": None, "merged": "merged", "alone": "adapter"}  # of exports, by what is streamed of adapters
ADAPTERS = tuple(KINDS)
SETTINGS = (
    ("llama", "qwen3", "gpt2", "moe"),
    ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)),  # dp, tp, pp
    (0, 1, 2, 3),
    (None, "host", "disk"),
    (None, "bf16"),
    ADAPTERS,
)
FEW = (
    ("llama", (2, 1, 1), 3, "disk", "bf16", "merged"),
    ("qwen3", (1, 1, 2), 3, None, None, "none"),
    ("qwen3", (1, 2, 1), 2, "host", None, "alone"),
)


def is_possible(case):
    """An adapter that is tied over a pipeline is not merged; experts that are stacked have none over tp."""
    family, (_, tp, pp), _, _, _, adapters = case
    return not (family == "gpt2" and pp > 1 and adapters == "merged") and not (
        family == "moe" and tp > 1 and adapters != "none"
    )


def pairs():
    return covering(SETTINGS, is_possible, cost=lambda case: world_of(case[1]) + (case[3] is not None))


def trained(case, folder):
    """An engine after a step."""
    family, shape, stage, place, _, adapters = case
    model = tiny(family, kv_heads=4, layers=4 if shape[2] > 1 else 2, lora=adapters != "none")
    away = None if place is None else {"optimizer": place, "directory": str(folder)}
    if away and stage == 3:
        away["params"] = place
    engine = engine_of(
        model, mesh_of(shape), stage=stage, precision="fp32", optimizer=adamw, offload=away, accumulate=1
    )
    step(engine, 0)
    return engine


def exported(engine, folder, kind=None):
    """The tensors of an export."""
    engine.export(folder, kind)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def streamed(stream):
    """The tensors of a stream, verified, and the bytes of its buckets."""
    assembler, tensors, sizes = Assembler(), {}, []
    for bucket in stream:
        tensors |= {name: tensor.clone() for name, tensor in assembler.unpack(bucket)}
        sizes.append(bucket.nbytes)
    assert assembler.missing == []
    return tensors, sizes


def in_dtype(tensor, dtype):
    return tensor.to(DTYPES[dtype]) if dtype and tensor.is_floating_point() else tensor


def compare(case, folder):
    """Stream and export; return the number of buckets, and what differs."""
    *_, dtype, adapters = case
    engine = trained(case, folder / "states")
    before = engine.fingerprint()
    expected = exported(engine, folder / "hf", KINDS[adapters])
    form = "alone" if adapters == "alone" else "merged"
    tensors, sizes = streamed(engine.stream_weights(dtype, SMALL, form))
    assert engine.fingerprint() == before
    if engine.mesh.rank:
        assert (tensors, sum(sizes)) == ({}, 0)
        return len(sizes), []
    assert max(sizes) <= SMALL
    assert tensors.keys() == expected.keys()
    return len(sizes), [name for name, t in expected.items() if not same(in_dtype(t, dtype), tensors[name])]


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


def compare_all(cases, folder):
    return [compare(case, folder / str(number)) for number, case in enumerate(cases)]


def check(ranks, folder, cases):
    for shape in {case[1] for case in cases}:
        chosen = [case for case in cases if case[1] == shape]
        for found in ranks(world_of(shape), compare_all, chosen, folder / "".join(map(str, shape))):
            assert [different for _, different in found] == [[]] * len(chosen), chosen
            assert all(buckets > 1 for (buckets, _), case in zip(found, chosen, strict=True) if case[5] != "alone")


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_stream_has_the_bits_of_an_export(ranks, tmp_path, case):
    check(ranks, tmp_path, [case])


@pytest.mark.long
def test_a_stream_has_the_bits_of_an_export_over_all_pairs_of_settings(ranks, tmp_path):
    check(ranks, tmp_path, pairs())


def with_experts(folder, cases):
    """What differs, by case."""
    found = []
    for number, ((ep, tp, pp), stage, place, dtype, adapters) in enumerate(cases):
        away = None if place is None else {"optimizer": place, "directory": str(folder / f"{number}-states")}
        if away and stage == 3:
            away["params"] = place
        model = None if adapters == "none" else with_adapters()
        engine = engine_with_experts(model, ep=ep, tp=tp, pp=pp, stage=stage, offload=away)
        engine.train_batch(own_part(engine, 0))
        expected = exported(engine, folder / str(number), KINDS[adapters])
        tensors, _ = streamed(engine.stream_weights(dtype, SMALL, "alone" if adapters == "alone" else "merged"))
        found += (
            [name for name in expected if not same(in_dtype(expected[name], dtype), tensors[name])] if tensors else []
        )
        assert engine.mesh.rank or tensors.keys() == expected.keys()
    return found


def with_experts_pairs():
    meshes = ((2, None, None), (2, 2, None), (2, None, 2))  # ep, tp, pp
    settings = (meshes, (2, 3), (None, "host", "disk"), (None, "bf16"), ADAPTERS)
    return covering(settings, lambda case: not (case[0][1] and case[4] != "none"))


def test_experts_on_several_ranks_have_the_layout_of_an_export(ranks, tmp_path):
    assert ranks(2, with_experts, tmp_path, [((2, None, None), 3, None, None, "none")]) == [[], []]


@pytest.mark.long
def test_experts_on_several_ranks_have_the_bits_of_an_export_over_all_pairs_of_settings(ranks, tmp_path):
    assert ranks(4, with_experts, tmp_path / "four", with_experts_pairs()) == [[]] * 4
    assert ranks(8, with_experts, tmp_path / "eight", [((2, 2, 2), 3, "host", "bf16", "none")]) == [[]] * 8


class Counting(torch.nn.Module):
    """Has buffers of widths of their own: of floating numbers, of whole ones, and one that is not published."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.register_buffer("mean", torch.linspace(0, 1, 7, dtype=torch.float64))
        self.register_buffer("scale", torch.full((3,), 1 / 3))
        self.register_buffer("seen", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.zeros(9), persistent=False)


def test_buffers_are_streamed_as_they_are_in_whatever_dtype_weights_are():
    model = Counting()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name != "mask"}
    engine = zero3d.Engine(model, precision="bf16", stage=3)
    tensors, _ = streamed(engine.stream_weights("fp16"))
    assert tensors.keys() == {"inner.weight", "inner.bias", *buffers}
    assert {tensors[name].dtype for name in ("inner.weight", "inner.bias")} == {torch.float16}
    assert all(same(tensors[name], buffer) for name, buffer in buffers.items())


def over_stages():
    """Names of the tensors of a stream whose buckets are each read when the next one is there, and of its state dict.

    The buffer of the model's root is on both pipeline stages.
    """
    model = Lm(width=48, layers=4)
    model.register_buffer("seen", torch.tensor(2**40 + 1))
    expected = list(model.state_dict())
    engine = engine_of(model, mesh_of((1, 1, 2)), stage=3, precision="fp32", optimizer=adamw)
    assembler, names, before = Assembler(), [], None
    for bucket in engine.stream_weights(bucket_bytes=SMALL):
        if before is not None:
            names += [name for name, _ in assembler.unpack(before)]
        before = bucket
    return names + [name for name, _ in assembler.unpack(before)], expected


def test_buckets_of_all_stages_may_be_read_until_the_next_but_one_and_what_stages_share_is_sent_once(ranks):
    (names, expected), (none, _) = ranks(2, over_stages)
    assert sorted(names) == sorted(expected)
    assert none == []


# --- a folder as receiver -----------------------------------------------------------------------------


def into_folders(folder, shape):
    """A folder of a stream beside an export's, in several files, and one in bf16; what differs."""
    engine, first = engine_on(shape), None
    if engine.mesh.rank == 0:
        first = {name: FolderSender(folder / name) for name in ("streamed", "bf16")}
    with patch("zero3d.checkpoint.export.FILE_BYTES", 20_000):
        engine.export(folder / "hf")
        engine.send_weights(first and first["streamed"], bucket_bytes=SMALL)
    sent = engine.send_weights(first and first["bf16"], "bf16", bucket_bytes=SMALL)
    with pytest.raises(CheckpointError) as refused:
        engine.send_weights(first and first["bf16"], bucket_bytes=SMALL)
    losses = step(engine, 0)
    return sent.tensors, str(refused.value).replace(str(folder), "FOLDER"), losses


def tensors_in(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("shape", [(2, 1, 1), pytest.param((1, 1, 2), marks=pytest.mark.long)], ids=str)
def test_a_folder_as_receiver_has_the_files_of_an_export_and_is_written_once(ranks, tmp_path, shape):
    import transformers

    (tensors, said, losses), (_, other, others) = ranks(2, into_folders, tmp_path, shape)
    exported, streamed = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("hf", "streamed"))
    whole = tensors_in(tmp_path / "hf")
    if shape == (2, 1, 1):
        assert len(exported) > 3
        assert exported == streamed
        assert filecmp.cmpfiles(tmp_path / "hf", tmp_path / "streamed", exported, shallow=False) == (exported, [], [])
    assert all(same(tensor, whole.pop(name)) for name, tensor in tensors_in(tmp_path / "streamed").items())
    assert whole == {}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert tensors == len(tensors_in(tmp_path / "bf16")) == TENSORS
    assert said == other
    assert said.startswith("FOLDER/bf16 exists and is not empty: export to a new directory")
    assert not list(tmp_path.glob(".*"))
    assert losses == others


# --- receivers in processes of their own --------------------------------------------------------------


@contextmanager
def receiving(sender, folder, at=None, fault=lambda: None, streams=1):
    """A process that receives streams, and does `fault` before it takes tensor number `at`; yields its id.

    What it has received it writes into the folder.
    """
    address = sender.path if isinstance(sender, LocalSender) else sender.address
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            receive(address, folder, at, fault, streams)
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def receive(address, folder, at, fault, streams):
    tensors = {}
    with connect(address, timeout=20.0) as sender:
        for _ in range(streams):
            for number, (name, tensor) in enumerate(sender.receive()):
                if number == at:
                    fault()
                tensors[name] = tensor.clone()
            torch.save(tensors, folder / f"{os.getpid()}.pt")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def oversleep():
    time.sleep(100)  # until it is killed


def received(folder, pid):
    """What a process has received, once it has ended."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return torch.load(folder / f"{pid}.pt")


TENSORS = 35  # of the model of `engine_on`
CARRIERS = ("memory", "group")
ANYWHERE = "tcp://127.0.0.1:0"


def engine_on(shape=(2, 1, 1), precision="fp32"):
    return engine_of(
        tiny("llama", kv_heads=4), mesh_of(shape), stage=3, precision=precision, optimizer=adamw, accumulate=1
    )


def sender_of(engine, folder, carrier="memory", **options):
    if engine.mesh.rank:
        return None
    return LocalSender(folder / "weights", **options) if carrier == "memory" else GroupSender(ANYWHERE, **options)


def twice_to_two(folder, carrier):
    engine = engine_on()
    sender = sender_of(engine, folder, carrier, receivers=2, timeout=20.0)
    if sender is None:
        for number in range(2):
            step(engine, number)
            assert engine.send_weights(None, bucket_bytes=SMALL)[:3] == (0, 0, 0)
        return exported(engine, folder / "hf") and []
    with sender, receiving(sender, folder, streams=2) as one, receiving(sender, folder, streams=2) as other:
        for number in range(2):
            step(engine, number)
            sent = engine.send_weights(sender, bucket_bytes=SMALL)
        found = [received(folder, pid) for pid in (one, other)]
    expected = exported(engine, folder / "hf")
    assert (sent.tensors, sent.nbytes) == (len(expected), sum(t.nbytes for t in expected.values()))
    assert sent.buckets > 2
    assert not (folder / "weights").exists()
    return [name for tensors in found for name in expected if not same(tensors[name], expected[name])]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_receivers_have_what_the_last_stream_sent(ranks, tmp_path, carrier):
    assert ranks(2, twice_to_two, tmp_path, carrier) == [[], []]


def only_what_changed(folder, shape):
    """Streams of what has changed alone: tensors sent and left out; what receivers have in the end, beside an export."""
    engine, sent, found = engine_on(shape), [], []
    sender = sender_of(engine, folder, timeout=20.0)

    def send():
        now = engine.send_weights(sender, bucket_bytes=SMALL, changed_only=True)
        sent.append((now.tensors, now.unchanged, now.buckets > 0))

    with sender or nullcontext():
        with receiving(sender, folder, streams=4) if sender else nullcontext() as pid:
            send()
            send()
            step(engine, 0)
            send()
            engine.freeze("*.layers.0.*")
            step(engine, 1)
            send()
            found += [received(folder, pid)] if sender else []
        with pytest.raises(StreamError, match="is gone"):
            send()
        with receiving(sender, folder) if sender else nullcontext() as pid:
            send()
            found += [received(folder, pid)] if sender else []
    expected = exported(engine, folder / "hf")
    return sent, [name for tensors in found for name in expected if not same(tensors[name], expected[name])]


@pytest.mark.parametrize("shape", [(2, 1, 1), pytest.param((1, 1, 2), marks=pytest.mark.long)], ids=str)
def test_what_receivers_have_since_the_last_stream_can_be_left_out(ranks, tmp_path, shape):
    (sent, different), (others, _) = ranks(2, only_what_changed, tmp_path, shape)
    block = 16
    everything = (TENSORS, 0, True)
    assert sent == [everything, (0, TENSORS, False), everything, (TENSORS - block, block, True), everything]
    assert different == []
    assert others == [(0, 0, False)] * 5


def in_turns(folder):
    """What two engines send of what has changed, in turns to one receiver; what it has then beside the last one's."""
    engines, sent = [engine_on((1, 1, 1)) for _ in range(2)], []
    step(engines[1], 0)
    with sender_of(engines[0], folder, timeout=20.0) as sender, receiving(sender, folder, streams=4) as pid:
        for number in (0, 1, 0, 0):
            sent.append(engines[number].send_weights(sender, bucket_bytes=SMALL, changed_only=True).tensors)
        tensors = received(folder, pid)
    expected = exported(engines[0], folder / "hf")
    return sent, [name for name in expected if not same(tensors[name], expected[name])]


def test_nothing_is_left_out_where_another_engine_has_sent_to_the_receivers_since(ranks, tmp_path):
    assert ranks(1, in_turns, tmp_path) == [([TENSORS, TENSORS, TENSORS, 0], [])]


def faulty(folder, fault, places, carrier, timeout):
    """Streams that fail at these tensors, then one that does not; the losses of steps after each."""
    engine = engine_on()
    sender = sender_of(engine, folder, carrier, timeout=timeout)
    step(engine, 0)
    before, told = engine.fingerprint(), []
    for at in places:
        with receiving(sender, folder, at, fault) if sender else nullcontext() as pid:
            with pytest.raises(StreamError) as failed:
                engine.send_weights(sender, bucket_bytes=SMALL)
        told.append(str(failed.value).replace(str(pid), "PID") if sender else str(failed.value))
        assert engine.fingerprint() == before
    with receiving(sender, folder) if sender else nullcontext() as pid:
        engine.send_weights(sender, bucket_bytes=SMALL)
        if sender:
            assert len(received(folder, pid)) == TENSORS
    if sender:
        sender.close()
    return told, [step(engine, number) for number in (1, 2)]


def undisturbed():
    engine = engine_on()
    step(engine, 0)
    return [step(engine, number) for number in (1, 2)]


PLACES = (0, TENSORS // 2, TENSORS - 1)  # in the first bucket, in the middle, and in the last one


@pytest.mark.parametrize(("fault", "places", "said"), [
    (die, PLACES, r"the receiver \(process PID\) is gone: it has ended, or was killed"),
    (stop, PLACES, r"the receiver \(process PID\) has not acknowledged .* in 0\.4 s: it is stopped \(SIGSTOP\)"),
    (oversleep, PLACES[1:2], r"the receiver \(process PID\) has not acknowledged .* in 0\.4 s: it sleeps"),
])  # fmt: skip
def test_a_receiver_that_fails_at_any_bucket_is_named_on_all_ranks_and_training_goes_on(
    ranks, tmp_path, fault, places, said
):
    (told, losses), (others, _) = ranks(2, faulty, tmp_path, fault, places, "memory", 0.4)
    assert [re.match(said, text) is not None for text in told] == [True] * len(told), told
    assert [re.sub(r"process \d+", "process PID", text) for text in others] == told
    assert losses == ranks(2, undisturbed)[0]


@pytest.mark.parametrize(("fault", "places", "timeout"), [
    (die, PLACES[1:2], 10.0),
    pytest.param(die, PLACES, 10.0, marks=pytest.mark.long),
    pytest.param(stop, PLACES, 1.0, marks=pytest.mark.long),
])  # fmt: skip
def test_a_receiver_of_another_job_that_fails_is_named_on_all_ranks_and_training_goes_on(
    ranks, tmp_path, fault, places, timeout
):
    (told, losses), (others, _) = ranks(2, faulty, tmp_path, fault, places, "group", timeout)
    for said in told:
        assert "receiver (process PID of " in said
        assert "is stopped, slow, gone, or the network between is cut" in said
    assert [re.sub(r"process \d+", "process PID", text) for text in others] == told
    assert losses == ranks(2, undisturbed)[0]


def whole_before(folder):
    """Whether parameters that `unshard` has made whole are so again, after a stream that fails and one that is left."""
    engine, found = engine_on(), []
    sender = sender_of(engine, folder, timeout=20.0)
    engine.unshard()
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    def are_whole():
        try:
            return [torch.equal(p, before[name]) for name, p in engine.module.named_parameters()] == [True] * TENSORS
        except ReleasedParameterError:
            return False

    with sender or nullcontext(), receiving(sender, folder, TENSORS // 2, die) if sender else nullcontext():
        with pytest.raises(StreamError):
            engine.send_weights(sender, bucket_bytes=SMALL)
        found.append(are_whole())
    stream = engine.stream_weights(bucket_bytes=SMALL)
    next(stream)
    found.append(are_whole())
    stream.close()
    return [*found, are_whole()]


def test_parameters_that_were_whole_are_whole_again_after_a_stream_that_fails_or_is_left(ranks, tmp_path):
    assert ranks(2, whole_before, tmp_path) == [[True, False, True]] * 2


def stopped_and_watched(folder):
    """What the watchdog reads on rank 0 while a receiver of another job is stopped, and the error in the end."""
    engine, seen = engine_on(), set()
    sender = sender_of(engine, folder, "group", timeout=1.0)
    with sender or nullcontext(), receiving(sender, folder, TENSORS // 2, stop) if sender else nullcontext() as pid:
        if sender:
            look = sender._watch

            def watch():
                beat = read_beat(engine.mesh.heartbeat._memory)
                seen.add((beat.phase, beat.axis, beat.op, beat.unit.replace(str(pid), "PID")))
                look()

            sender._watch = watch
        with pytest.raises(StreamError):
            engine.send_weights(sender, bucket_bytes=SMALL)
    return seen, read_beat(engine.mesh.heartbeat._memory).depth


@pytest.mark.long
def test_a_watchdog_is_told_of_a_receiver_of_another_job_that_is_stopped(ranks, tmp_path):
    (seen, depth), (none, _) = ranks(2, stopped_and_watched, tmp_path)
    named = [unit for phase, axis, op, unit in seen if (phase, axis, op) == ("stream", "receivers", "wait")]
    assert len(named) == len(seen)
    assert any(re.match(r"receiver \(process PID of .*\) to acknowledge bucket \d+", unit) for unit in named), seen
    assert (depth, none) == (0, set())


def doze():
    time.sleep(0.5)


def patient(folder):
    """A receiver that sleeps for less than the timeout, and what the watchdog reads meanwhile."""
    engine = engine_on()
    sender, seen = sender_of(engine, folder, timeout=20.0), []
    if sender is None:
        engine.send_weights(None, bucket_bytes=SMALL)
        return seen
    with sender, receiving(sender, folder, TENSORS - 1, doze) as pid:
        acknowledged = sender._hear

        def hear(*args):
            beat = read_beat(engine.mesh.heartbeat._memory)
            seen.append((beat.phase, beat.axis, beat.op, beat.unit.replace(str(pid), "PID")))
            acknowledged(*args)

        sender._hear = hear
        sent = engine.send_weights(sender, bucket_bytes=SMALL)
        assert sent.seconds > 0.5
        assert sent.tensors == TENSORS
    assert not read_beat(engine.mesh.heartbeat._memory).depth
    return seen


def test_one_that_sleeps_is_waited_for_and_a_watchdog_is_told_so(ranks, tmp_path):
    seen, _ = ranks(2, patient, tmp_path)
    assert seen[0] == ("stream", "receivers", "wait", "receiver (process PID) to acknowledge bucket 0")
    assert {phase for phase, *_ in seen} == {"stream"}


def nobody_comes(folder):
    engine = engine_on()
    sender = sender_of(engine, folder, timeout=0.2)
    with pytest.raises(StreamError) as failed:
        engine.send_weights(sender)
    if sender:
        sender.close()
    return str(failed.value).replace(str(folder), "FOLDER"), step(engine, 0)


def test_a_receiver_that_does_not_come_is_missed_by_all_ranks(ranks, tmp_path):
    (said, losses), (other, others) = ranks(2, nobody_comes, tmp_path)
    assert said == other
    assert said.startswith("no receiver has connected to FOLDER/weights in 0.2 s (0 of 1 have): start it")
    assert losses == others


# --- a sampler in a process of its own ------------------------------------------------------------------

PROMPTS, NEW = 4, 5


def chosen(logits, tokens):
    """Log-probabilities of tokens [batch, n] by the logits of the places before them."""
    return logits.float().log_softmax(-1).gather(2, tokens[:, :, None])[..., 0]


@torch.no_grad()
def sample(model, number):
    """Tokens that a model samples with its cache, their log-probabilities then, and its logits of all of them at once."""
    torch.manual_seed(number)
    ids = given = torch.randint(3, 64, (PROMPTS, 4))
    cache, found = None, []
    for _ in range(NEW):
        output = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache, probabilities = output.past_key_values, output.logits[:, -1].float().softmax(-1)
        given = torch.multinomial(probabilities, 1)
        found.append(chosen(output.logits[:, -1:], given))
        ids = torch.cat([ids, given], 1)
    return ids, torch.cat(found, 1), model(input_ids=ids, use_cache=False).logits


def serve(folder, streams, precision):
    """Receive weights and sample with them, once for each stream."""
    model = tiny("llama", kv_heads=4)
    for p in model.parameters():  # and no buffer, which the engine leaves as it is
        p.data = torch.zeros_like(p, dtype=DTYPES[precision])
    parameters = dict(model.named_parameters())
    with connect(folder / "weights", timeout=20.0) as sender:
        for number in range(streams):
            for name, tensor in sender.receive():
                parameters[name].data.copy_(tensor)
            torch.save(sample(model, number), folder / "writing")
            (folder / "writing").rename(folder / f"samples-{number}")


@contextmanager
def serving(folder, streams, precision):
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            serve(folder, streams, precision)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def sampled(folder, number):
    path, end = folder / f"samples-{number}", time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    return torch.load(path)


def ratios(folder, steps, precision):
    """Largest |ratio - 1| of what was sampled after each step, and one update later; whether logits have equal bits."""
    engine, found = engine_on(precision=precision), []
    sender = sender_of(engine, folder, timeout=20.0)
    with serving(folder, steps, precision) if sender else nullcontext():
        for number in range(steps):
            step(engine, number)
            engine.send_weights(sender, bucket_bytes=SMALL)
            ids, recorded, logits = sampled(folder, number)
            for late in range(2):
                with torch.no_grad():
                    here = engine(input_ids=ids).logits
                ratio = (chosen(here[:, 3:-1], ids[:, 4:]) - recorded).exp()
                found.append((float((ratio - 1).abs().max()), torch.equal(here.float(), logits.float())))
                if not late:
                    step(engine, 100 + number)
    if sender:
        sender.close()
    return found


@pytest.mark.parametrize("steps", [1, pytest.param(50, marks=pytest.mark.long)])
def test_a_sampler_has_the_trainers_log_probabilities_and_one_that_is_an_update_behind_has_not(ranks, tmp_path, steps):
    for found in ranks(2, ratios, tmp_path, steps, "fp32"):
        assert all(ratio <= 1e-5 and equal for ratio, equal in found[::2])
        assert all(ratio > 1e-4 and not equal for ratio, equal in found[1::2])


def test_in_bf16_logits_have_equal_bits_and_a_cache_moves_log_probabilities_by_little(ranks, tmp_path):
    for found in ranks(2, ratios, tmp_path, 2, "bf16"):
        assert all(ratio <= 0.1 and equal for ratio, equal in found[::2]), found
        assert not any(equal for _, equal in found[1::2])


# --- what is refused ----------------------------------------------------------------------------------


def meanwhile(folder):
    """Calls while a stream is under way, and between a backward and its step; then a stream as ever."""
    engine, said = engine_on(), []
    sender = sender_of(engine, folder)
    stream = engine.stream_weights(bucket_bytes=SMALL)
    next(stream)
    calls = (
        lambda: engine.stream_weights(),
        lambda: engine.send_weights(sender),
        lambda: step(engine, 0),
        lambda: engine.step(),
        lambda: engine.freeze("*norm*"),
        lambda: engine.save(folder),
        lambda: engine.load(folder),
    )
    for call in calls:
        with pytest.raises(ConfigError) as refused:
            call()
        said.append(str(refused.value))
    stream.close()
    (given,) = share_of(engine, 0)[:1]
    engine.backward(engine(**given).loss, last=True)
    for call in (engine.stream_weights, lambda: engine.send_weights(None)):
        with pytest.raises(ConfigError) as refused:
            call()
        said.append(str(refused.value))
    engine.step()
    tensors, _ = streamed(engine.stream_weights(bucket_bytes=SMALL))
    return said, len(tensors)


def test_what_would_change_weights_is_refused_in_a_stream_and_a_stream_between_backward_and_step(ranks, tmp_path):
    for said, tensors in ranks(2, meanwhile, tmp_path):
        calls = [text.split(" ")[0] for text in said]
        expected = ["stream_weights()", "send_weights()", "train_batch()", "step()", "freeze()", "save()", "load()"]
        assert calls == [*expected, "stream_weights()", "send_weights()"]
        assert all(" while weights are streamed: take the stream to its end first" in text for text in said[:7])
        assert all(" after 1 micro-batches of a step that is not applied yet" in text for text in said[7:])
        assert tensors in (0, TENSORS)


def left_by_one(rank):
    engine = engine_on()
    before = engine.fingerprint()
    stream = engine.stream_weights(bucket_bytes=SMALL)
    next(stream)
    if engine.mesh.rank == rank:
        stream.close()
        said = ""
    else:
        with pytest.raises(StreamError) as failed:
            list(stream)
        said = str(failed.value)
    assert engine.fingerprint() == before
    return said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_a_stream_ends_it_on_all(ranks, rank):
    assert ranks(2, left_by_one, rank)[1 - rank] == f"rank {rank} left the stream of weights at bucket 0."


def without_a_number():
    engine = engine_on()
    with engine.full_params(), torch.no_grad():
        engine.module.model.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteError) as failed:
        list(engine.stream_weights(bucket_bytes=SMALL))
    return str(failed.value)


def test_weights_that_are_not_finite_are_not_streamed(ranks):
    for said in ranks(2, without_a_number):
        assert said.startswith("model.norm.weight has values that are NaN or infinite: such weights are neither")


@pytest.mark.parametrize(("options", "message"), [
    ({"dtype": "int8"}, "dtype='int8': pass 'fp32', 'bf16', 'fp16', 'fp64', or None for that of training"),
    ({"adapters": "both"}, "adapters='both': pass one of 'merged', 'alone', 'none'"),
    ({"bucket_bytes": "1kB"}, "bucket_bytes=1,000 is less than a bucket has: type 4,096 or more"),
    ({"bucket_bytes": "many"}, "bucket_bytes 'many' is not a size"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options, message):
    engine = zero3d.Engine(build("net"), precision="fp32")
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine.stream_weights(**options)


def test_rank_0_alone_gives_a_sender():
    engine = zero3d.Engine(build("net"), precision="fp32")
    with pytest.raises(ConfigError, match="rank 0 gives a sender, and the others None"):
        engine.send_weights(None)
    assert len(list(engine.stream_weights())) == 1


def test_a_path_at_which_something_else_is_is_refused_and_a_dead_socket_replaced(tmp_path):
    LocalSender(tmp_path / "dead")._socket.close()  # as of a process that was killed
    LocalSender(tmp_path / "dead").close()
    (tmp_path / "file").write_text("of somebody")
    with pytest.raises(ConfigError, match=r"no socket can be at .*file"):
        LocalSender(tmp_path / "file")
    with LocalSender(tmp_path / "live"), pytest.raises(ConfigError, match=r"no socket can be at .*live"):
        LocalSender(tmp_path / "live")
    with pytest.raises(StreamError, match=r"no sender listens at .*gone \(No such file or directory\) in 0 s"):
        connect(tmp_path / "gone", timeout=0)


# --- what senders leave behind --------------------------------------------------------------------------


def buckets_open():
    """The memory files of buckets that this process has open."""
    names = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{file}"))
    return [name for name in names if "zero3d-bucket" in name]


def test_memory_files_are_closed_with_their_sender_and_where_buckets_of_another_size_take_their_place(tmp_path):
    with LocalSender(tmp_path / "weights") as sender:
        sender.memory(SMALL)
        one_size = len(buckets_open())
        sender.memory(2 * SMALL)
        assert len(buckets_open()) == one_size > 0
    assert buckets_open() == []


def keys_of_a_store(folder):
    """How many keys a sender's store has after each of ten streams."""
    engine, counts = engine_on((1, 1, 1)), []
    with sender_of(engine, folder, "group", timeout=20.0) as sender, receiving(sender, folder, streams=10):
        for _ in range(10):
            engine.send_weights(sender, bucket_bytes=SMALL)
            counts.append(sender._store.num_keys())
    return counts


def test_no_message_of_a_stream_stays_in_the_store(ranks, tmp_path):
    (counts,) = ranks(1, keys_of_a_store, tmp_path)
    assert counts == counts[:1] * 10


# --- memory -------------------------------------------------------------------------------------------


def measured(shape):
    """What this rank holds of a stream, as found and by the formula: buckets in it and before it; gathered at most."""
    engine = engine_of(
        tiny("llama", kv_heads=4), mesh_of(shape), stage=3, precision="fp32", optimizer=adamw, accumulate=1
    )
    place, largest = engine.mesh.place, max(unit.layout.total * unit.dtype.itemsize for unit in engine.units)
    entries = [entry for entry in engine.memory if entry.category == "stream"]
    engine.arena.reset_peaks()
    held = set()
    for _ in engine.stream_weights(bucket_bytes=SMALL):
        held |= {entry.measured for entry in engine.memory if entry.category == "stream"}
    entries += [entry for entry in engine.memory if entry.category == "stream"]
    packs = (place.dp, place.tp) == (0, 0)
    buckets = SMALL * (0 if not packs else 1 if place.pp else 2)
    found = held, [tuple(entry[2:5]) for entry in entries], int(engine.arena.peak("gathered"))
    formula = ({buckets}, [(buckets, 0, buckets)]) if packs else (set(), [])
    return found, (*formula, 0 if place.dp else largest), int(engine.arena.live("gathered"))


@pytest.mark.parametrize("shape", [
    (2, 1, 1), *(pytest.param(shape, marks=pytest.mark.long) for shape in ((2, 2, 1), (2, 1, 2), (2, 2, 2)))
], ids=str)  # fmt: skip
def test_a_stream_holds_one_unit_and_two_buckets(ranks, shape):
    for found, formula, left in ranks(world_of(shape), measured, shape):
        assert found == formula
        assert left == 0


def moved(stage, far):
    """What a stream moves between ranks, beside agreements; the bytes of shards that others than rank 0 have."""
    engine = engine_of(tiny("llama", kv_heads=4), mesh_of((2, 1, 1)), stage=stage, precision="bf16", accumulate=1)
    engine.traffic.reset()
    with patch("zero3d.distributed.collectives.attach", return_value=None) if far else nullcontext():
        tensors, _ = streamed(engine.stream_weights(bucket_bytes=SMALL))
    sent = {}
    for entry in engine.traffic:
        if entry.op != "exchange":
            sent[entry.op] = sent.get(entry.op, 0) + entry.bytes
    weights = engine.whole_state_dict()
    assert all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in tensors.items())
    return sent, sum(unit.layout.shard * unit.dtype.itemsize for unit in engine.units)


@pytest.mark.parametrize(("stage", "far"), [(2, False), (3, False), (3, True)])
def test_the_ledger_has_the_shards_that_rank_0_is_given_and_nothing_that_is_sent_to_others(ranks, stage, far):
    (first, _), (other, shards) = ranks(2, moved, stage, far)
    assert first == ({"gather": 0} if stage == 3 else {})
    assert other == ({"gather": shards} if stage == 3 else {})


def exported_inside(folder, everywhere):
    """Tensors of a stream, between two of whose buckets there is an export; that export's; the weights.

    everywhere  all ranks gather a unit that is exported or streamed, as on NCCL
    """
    engine, exports, tensors = engine_on(), {}, {}
    step(engine, 0)
    assembler = Assembler()
    with ExitStack() as patches:
        for module in ("zero3d.zero.gathers", "zero3d.engine.whole_parameters") if everywhere else ():
            patches.enter_context(patch(f"{module}.goes_to_first", return_value=False))
        for bucket in engine.stream_weights(bucket_bytes=SMALL):
            tensors |= {name: tensor.clone() for name, tensor in assembler.unpack(bucket)}
            if bucket.number == 2:
                exports = exported(engine, folder / "hf")
    weights, held = engine.whole_state_dict(), engine.arena.live("gathered")
    return [name for name in weights if not torch.equal(exports[name], weights[name])], tensors, weights, int(held)


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_export_between_two_buckets_has_the_bits_of_the_stream(ranks, tmp_path, everywhere):
    (different, tensors, weights, held), (others, *_, none) = ranks(2, exported_inside, tmp_path, everywhere)
    assert different == others == []
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    assert (held, none) == (0, 0)


def no_room(nbytes, device):
    if nbytes:
        raise MemoryError("no room")
    return SharedBuffer(nbytes, device)


def without_room(folder, shape, rank):
    """What a stream and an export raise where a rank has no memory to receive units in; tensors of a stream after it."""
    engine, said = engine_on(shape), []
    fails = patch("zero3d.engine.whole_parameters.SharedBuffer", no_room) if engine.mesh.rank == rank else nullcontext()
    for call in (lambda: list(engine.stream_weights(bucket_bytes=SMALL)), lambda: engine.export(folder / "hf")):
        with fails, pytest.raises((MemoryError, RankError)) as failed:
            call()
        said.append(str(failed.value))
    tensors, _ = streamed(engine.stream_weights(bucket_bytes=SMALL))
    return said, len(tensors)


@pytest.mark.parametrize(("shape", "rank"), [
    ((2, 1, 1), 0), *(pytest.param(*case, marks=pytest.mark.long) for case in (((2, 2, 1), 1), ((2, 1, 2), 2)))
], ids=str)  # fmt: skip
def test_a_rank_that_has_no_memory_to_receive_units_in_ends_a_stream_and_an_export_on_all(ranks, tmp_path, shape, rank):
    found = ranks(world_of(shape), without_room, tmp_path, shape, rank)
    for each, (said, _) in enumerate(found):
        told = f"rank {rank} failed: MemoryError: no room"
        assert said[0] == ("no room" if each == rank else told)
        assert said[1] in (told, said[0])
    assert [tensors for _, tensors in found] == [TENSORS] + [0] * (len(found) - 1)


def between_buckets(wire):
    """The loss of a batch before a stream, inside of it, where rank 0 has a unit whole, and after it."""
    model = tiny("llama", kv_heads=4)
    engine = engine_of(model, mesh_of((2, 1, 1)), stage=3, precision="fp32", accumulate=1, gather_wire=wire)
    before, inside, tensors = evaluated(engine, 0), [], {}
    for bucket in engine.stream_weights(bucket_bytes=SMALL):
        tensors |= {part.name: part.tensor.clone() for part in bucket.parts if part.whole}
        if bucket.number % 4 == 1:
            inside.append(evaluated(engine, 0))
    return before, inside, evaluated(engine, 0), tensors, engine.whole_state_dict()


@pytest.mark.parametrize("wire", ["same", "int8"])
def test_a_forward_between_two_buckets_computes_with_all_units_on_all_ranks(ranks, wire):
    for before, inside, after, tensors, weights in ranks(2, between_buckets, wire):
        assert len(inside) > 2
        assert before == after
        assert inside == pytest.approx([before] * len(inside), abs=0 if wire == "same" else 0.01)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in tensors.items())
