"""Convolutions and recurrences over sequences that ranks share out: values and gradients of one process, in fp64."""

from functools import partial

import pytest
import torch
from hybrids import hybrid
from models import LiftCasts

import zero3d
from zero3d.account.traffic import Moved
from zero3d.activations.recomputation import recompute
from zero3d.errors import ConfigError
from zero3d.models.packing import tell
from zero3d.sequence.group import check_sequence
from zero3d.sequence.shares import Cut, Halo, Scanned, States, even_parts, needed

long = partial(pytest.param, marks=pytest.mark.long)
LENGTH = 29  # of no 2, 3 or 4 ranks' equal parts
ONE_GROUP = {"n_groups": 1}
KEYS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}


def documents(sp, length=LENGTH):
    """Lengths of two rows' documents.

    In the first one is on all ranks but for a few tokens; in the second one ends at a cut, and one begins two tokens
    before the last, fewer than a convolution of four taps reaches back.
    """
    first, last = (even_parts(length, sp)[number].start for number in (1, -1))
    ends = sorted({first, last - 2} if sp > 2 else {first - 2, first})
    return (3, length - 5, 2), (ends[0], ends[1] - ends[0], length - ends[1])


def batch(number, sp, packed=True, length=LENGTH, masked=False):
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(number))
    if not packed:
        shown = torch.ones_like(ids)
        shown[1, : 7 * masked] = 0
        return {"input_ids": ids, "labels": ids.where(shown > 0, -100)} | ({"attention_mask": shown} if masked else {})
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents(sp, length)])
    return {"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, -100)}


def batches(rows, row, accumulate, sp, **options):
    return [batch(k * rows + row, sp, packed=(k + row) % 2 == 0, **options) for k in range(accumulate)]


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def of_a_step(name, degrees, sp, sizes=None, accumulate=1, activations="none", given=None, **options):
    """Loss and gradients of a step by an engine, and its traffic over sp: as measured, and by formula."""
    model = hybrid(name, **sizes or {})
    freeze = options.pop("freeze", None)
    for parameter, p in model.named_parameters():
        p.data = p.data.double()
        p.requires_grad_(freeze is None or freeze not in parameter)
    recompute(model, activations)
    before = {parameter: p.detach().clone() for parameter, p in model.named_parameters()}
    made = {"precision": "fp64", "clip_norm": None, "optimizer": sgd, "stage": 2} | options
    engine = zero3d.Engine(model, mesh=zero3d.Mesh(**degrees), accumulate=accumulate, **made)
    with LiftCasts():
        engine.traffic.reset()
        calls = engine.sequence.calls
        loss = engine.train_batch(batches(engine.mesh.degrees.rows, engine.mesh.row, accumulate, sp, **given or {}))
        sent = {}
        for row in engine.sequence.traffic(engine.sequence.calls.less(calls)):
            sent[row.op, row.unit] = Moved.total([sent.get((row.op, row.unit), Moved()), row.moved])
        measured = {(e.op, e.unit): Moved(e.calls, e.elements, e.bytes) for e in engine.traffic if e.axis == "sp"}
        engine.close()
    return float(loss), {name: before[name] - p.detach() for name, p in model.named_parameters()}, sent, measured


def of_one_process(name, rows, sp, sizes=None, accumulate=1, freeze=None, given=None, **_):
    """The same of a plain model, that is told where documents are."""
    model = hybrid(name, **sizes or {})
    for parameter, p in model.named_parameters():
        p.data = p.data.double()  # buffers keep their dtype, as in an engine
        p.requires_grad_(freeze is None or freeze not in parameter)
    mixing, total, weight = tell(model), 0.0, 0
    with LiftCasts():
        for row in range(rows):
            for micro_batch in batches(rows, row, accumulate, sp, **given or {}):
                count = int((micro_batch["labels"][:, 1:] != -100).sum())
                total, weight = total + model(**micro_batch).loss * count, weight + count
        (total / weight).backward()
    mixing.close()
    zeros = {parameter: torch.zeros_like(p) for parameter, p in model.named_parameters()}
    grads = zeros | {parameter: p.grad for parameter, p in model.named_parameters() if p.grad is not None}
    return float(total.detach() / weight), grads


def far(made, wanted):
    return max(float((made[name] - t).abs().max()) / max(1e-3, float(t.abs().max())) for name, t in wanted.items())


CASES = (
    ("qwen3_5_text", 2, {}),
    ("lfm2", 2, {}),
    *(long(name, sp, {"sizes": sizes}) for sp in (3, 4) for name, sizes in (
        ("qwen3_5_text", KEYS), ("mamba2", ONE_GROUP), ("mamba2", {}), ("jamba", {}), ("lfm2", {}), ("kimi_linear", {}),
    )),
    ("mamba2", 2, {"sizes": ONE_GROUP}),
    *(long(name, 2, {}) for name in (
        "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "mamba", "falcon_mamba", "mamba2",
        "bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba2", "lfm2_moe", "lfm3",
    )),
    long("mamba2", 3, {"sizes": {"num_heads": 8, "n_groups": 4}}),
    long("qwen3_5_text", 4, {"given": {"length": 7}}),  # a halo from several ranks
    long("lfm2", 4, {"given": {"length": 6}}),
    long("qwen3_5_text", 2, {"accumulate": 2, "activations": "full"}),
    long("mamba2", 2, {"accumulate": 2, "activations": "full", "stage": 3}),
    long("jamba", 2, {"accumulate": 2, "activations": "every:2"}),
    long("qwen3_5_text", 2, {"accumulate": 2, "dp": 4, "stage": 3}),
    long("bamba", 2, {"accumulate": 2, "given": {"masked": True}}),
    long("mamba2", 2, {"accumulate": 2, "given": {"masked": True}}),
    ("qwen3_5_text", 2, {"sp_mixers": "prefix"}),
    *(long(name, sp, {"sp_mixers": "prefix"}) for sp in (2, 3, 4) for name in ("mamba2", "kimi_linear", "qwen3_next", "jamba")),
    long("qwen3_5_text", 3, {"sp_mixers": "prefix", "accumulate": 2, "activations": "full"}),
    long("mamba2", 3, {"sp_mixers": "prefix", "sizes": ONE_GROUP, "accumulate": 2, "activations": "full"}),
    long("qwen3_5_text", 2, {"freeze": "conv1d"}),
    long("bamba", 2, {"freeze": "A_log"}),
    long("lfm2", 2, {"freeze": "layers.0"}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "sp", "options"), CASES, ids=str)
def test_losses_and_gradients_are_those_of_one_process(ranks, name, sp, options):
    options = dict(options)
    dp = options.pop("dp", sp)
    loss, grads = of_one_process(name, dp // sp, sp, **options)
    for made, of_group, sent, measured in ranks(dp, partial(of_a_step, **options), name, {"sp": sp, "dp": dp}, sp):
        assert made == pytest.approx(loss, rel=1e-13)
        assert far(of_group, grads) < 1e-11
        assert sent == measured


def adapted(name, degrees, rank=2):
    """Losses of two steps with adapters on in_proj alone and of an evaluation, and the last gradient norm."""
    from peft import LoraConfig, get_peft_model

    model = hybrid(name)
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=rank, target_modules=["in_proj"], init_lora_weights=False))
    for p in model.parameters():
        p.data = p.data.double()
    engine = zero3d.Engine(model, mesh=zero3d.Mesh(**degrees), precision="fp64", clip_norm=None, optimizer=sgd)
    with LiftCasts():
        found = [float(engine.train_batch([batch(number, 2)])) for number in range(2)]
        return [*found, float(engine.evaluate([batch(5, 2, packed=False)])), float(engine.last_step.grad_norm)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_adapters_and_evaluations_are_those_of_one_process(ranks, name):
    (one,) = ranks(1, adapted, name, {})
    for found in ranks(2, adapted, name, {"sp": 2}):
        assert found == pytest.approx(one, rel=1e-11)


def in_stages(name, degrees, accumulate=4, activations="none", **options):
    """Losses and gradient norms of two steps of packed micro-batches of two kinds."""
    model = hybrid(name, **options.pop("sizes", {}))
    for p in model.parameters():
        p.data = p.data.double()
    recompute(model, activations)
    made = {"precision": "fp64", "clip_norm": 1e9, "optimizer": sgd, "stage": 1} | options
    engine, found = zero3d.Engine(model, mesh=zero3d.Mesh(**degrees), accumulate=accumulate, **made), []
    with LiftCasts():
        for step in range(2):
            given = [batch(10 * step + k, 2 + k % 2, packed=k != 1) for k in range(accumulate)]
            found += [float(engine.train_batch(given)), float(engine.last_step.grad_norm)]
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "mamba2"])
def test_mixers_that_tp_cuts_share_sequences_too(ranks, name):
    (one,) = ranks(1, in_stages, name, {})
    for found in ranks(4, in_stages, name, {"sp": 2, "tp": 2}):
        assert found == pytest.approx(one, rel=1e-11)


@pytest.mark.long
@pytest.mark.parametrize("activations", ["none", "full"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_pipelines_of_ranks_that_share_sequences_are_one_process(ranks, name, activations):
    (one,) = ranks(1, in_stages, name, {})
    for found in ranks(4, partial(in_stages, activations=activations), name, {"sp": 2, "pp": 2}):
        assert found == pytest.approx(one, rel=1e-11)


def goes_on(name, folder, steps, **options):
    """Losses, norms and fingerprint of steps in fp32 behind those in a folder, and what is said of their bits."""
    engine = zero3d.Engine(hybrid(name), mesh=zero3d.Mesh(sp=2), precision="fp32", **options)
    if steps.start:
        engine.load(folder)
    found = []
    for step in steps:
        found.append((float(engine.train_batch([batch(step, 2)])), float(engine.last_step.grad_norm)))
        if step == 0:
            engine.save(folder)
    return found, engine.fingerprint(), engine.resumed


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_did_not_stop(ranks, tmp_path, name):
    whole, states, _ = ranks(2, goes_on, name, tmp_path, range(2))[0]
    again, fingerprint, told = ranks(2, goes_on, name, tmp_path, range(1, 2))[0]
    assert (again, fingerprint) == (whole[1:], states)
    assert told.startswith("bitwise")


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_a_run_by_states_goes_on_with_its_bits(ranks, tmp_path, name):
    by_states = partial(goes_on, sp_mixers="prefix")
    whole, states, _ = ranks(2, by_states, name, tmp_path, range(2))[0]
    again, fingerprint, told = ranks(2, by_states, name, tmp_path, range(1, 2))[0]
    assert (again, fingerprint) == (whole[1:], states)
    assert told.startswith("bitwise")
    _, _, told = ranks(2, goes_on, name, tmp_path, range(1, 2))[0]
    assert told.startswith("not bitwise: sp_mixers prefix -> heads (recurrences go on from states, ")


def settled(sp_mixers):
    """What two models do of recurrences: one with convolutions alone, and one whose scan has no such states."""
    made = []
    for name in ("lfm2", "jamba"):
        engine = zero3d.Engine(hybrid(name), mesh=zero3d.Mesh(sp=2), precision="fp32", sp_mixers=sp_mixers)
        made.append(engine.sequence.mixers)
        engine.close()
    return made


def test_models_without_states_to_pass_are_by_heads_whatever_was_asked(ranks):
    assert ranks(2, settled, "prefix")[0] == ["heads", "heads"]


def run_of_a_file(folder, output="out", resume=None, **mesh):
    """Losses of a run of zero3d train on two ranks that share sequences, and the lines that it says."""
    from rich.console import Console
    from training import start, tree

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.run import run

    lines = []

    class Noted(Progress):
        def say(self, text):
            lines.append(text)

    kept = {"every": 3, "export": False}
    made = tree(folder, output, mesh={"sp": 2, **mesh}, data={"length": 64}, checkpoint=kept)
    result = run(load(made), start("test", resume, planned=False), Noted(Console(quiet=True)))
    return [record["loss"] for record in result.history], lines


@pytest.mark.long
def test_a_run_says_how_it_shares_recurrences_and_goes_on_so(ranks, tmp_path):
    from training import save_rows

    hybrid("mamba2").save_pretrained(tmp_path / "model")
    save_rows(tmp_path / "rows.npy", length=64)
    losses, lines = ranks(2, run_of_a_file, tmp_path)[0]
    assert [line for line in lines if line.startswith("mesh.sp_mixers=auto: prefix: heads send ")]
    assert [line for line in lines if "recurrences by states" in line]
    saved = str(tmp_path / "out" / "checkpoints" / "step-3")
    again, lines = ranks(2, run_of_a_file, tmp_path, "again", saved)[0]
    assert again[-2:] == losses[-2:]
    assert [line for line in lines if line.startswith("bitwise")]
    _, lines = ranks(2, partial(run_of_a_file, sp_mixers="heads"), tmp_path, "by heads", saved)[0]
    assert [line for line in lines if line.startswith("not bitwise: sp_mixers prefix -> heads (")]


def compiled(name, degrees):
    from zero3d.activations.compilation import compile_blocks

    model = hybrid(name)
    compile_blocks(model, backend="eager")
    engine = zero3d.Engine(model, mesh=zero3d.Mesh(**degrees), precision="fp32", clip_norm=None, optimizer=sgd)
    return [float(engine.train_batch([batch(number, 2, packed=number < 2)])) for number in range(3)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_compiled_blocks_call_them_between_graphs(ranks, name):
    (one,) = ranks(1, compiled, name, {})
    for found in ranks(2, compiled, name, {"sp": 2}):
        assert found == pytest.approx(one, rel=1e-5)


def test_more_ranks_than_a_recurrence_has_heads_are_refused():
    with pytest.raises(ConfigError, match=r"mesh\.sp=8 shares out the 4 heads of the recurrences of"):
        check_sequence(hybrid("qwen3_5_text", num_attention_heads=8), 8, 1, "auto")


def test_groups_go_to_the_ranks_whose_heads_need_them():
    assert needed(even_parts(8, 3), 2) == [range(1), range(2), range(1, 2)]
    assert needed(even_parts(8, 2), 1) == [range(1), range(1)]
    assert needed(even_parts(4, 4), 2) == [range(1), range(1), range(1, 2), range(1, 2)]


def test_what_is_sent_of_a_layer_by_formula():
    """Worked by hand: 8 tokens of one sequence in bf16, two ranks, a convolution of 4 taps over 10 channels; four value
    heads of 3 and two key heads of 2, g in fp32."""
    halo = Halo(1, 8, 10, 3, 2, True)
    assert halo.sent(0, 2, backward=False) == Moved(1, 30, 60)
    assert halo.sent(1, 2, backward=False) == Moved(1, 0, 0)
    assert halo.sent(1, 2, backward=True) == Moved(1, 30, 60)
    assert Halo(1, 8, 10, 3, 2, False).sent(1, 2, backward=True) == Moved()
    cuts = (Cut(4, 3, 2, True), Cut(4, 1, 4, True), Cut(4, 1, 2, True), Cut(2, 2, 2, True), Cut(2, 2, 2, True))
    scan = Scanned(1, 8, 4, cuts, Cut(4, 3, 2, True))
    states = States(2, 4, 10, 4, True)
    assert [states.sent(rank, 3, backward=False).elements for rank in range(3)] == [160, 80, 0]
    assert [states.sent(rank, 3, backward=True).bytes for rank in range(3)] == [0, 320, 640]
    narrow, wide, made = 4 * (2 * 3 + 2 + 2 + 2), 4 * 2, 4 * 2 * 3
    assert scan.sent(0, 2, backward=False) == Moved(3, narrow + wide + made, 2 * narrow + 4 * wide + 2 * made)
    assert scan.sent(1, 2, backward=True) == scan.sent(0, 2, backward=False)
