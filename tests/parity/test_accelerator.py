"""A loop that is written for Accelerate, with its Accelerator on one process and with ours on two ranks."""

import copy
import pickle
from functools import partial

import pytest
import torch
from models import batch as token_ids, hf, waves
from pool import RankFailure
from tensors import assert_near
from trainers import Rows, Seen, launched

import zero3d

CLOSE = {"rel": 1e-5, "abs": 1e-7}
RATE = 1e-2


def parts(kind, stage, **options):
    """Accelerator, model, optimizer, loader and schedule, prepared. Windows of 2 micro-batches of 8 over all ranks."""
    import accelerate

    from zero3d.ways.huggingface.accelerate import Accelerator

    if kind == "plain":
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    else:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, stage=stage, **options)
    model = hf("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=8)
    loader = torch.utils.data.DataLoader(Rows(40), batch_size=8 // accelerator.num_processes, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def fresh():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)


def loop(kind, stage=None, folder=None, resume=False, options=None):
    """Mean loss, norm and rate of every window of two epochs; a save after the first, or a resume there."""
    with launched():
        fresh()
        accelerator, model, optimizer, loader, schedule = parts(kind, stage, **(options or {}))
        assert kind == "plain" or accelerator.engine.stage == stage
        logs = []
        if resume:
            accelerator.load_state(str(folder))
        for epoch in range(2):
            if resume and epoch == 0:
                continue
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
                logs.append((mean, float(norm) if accelerator.sync_gradients else 0.0, optimizer.param_groups[0]["lr"]))
            if folder is not None and not resume and epoch == 0:
                accelerator.save_state(str(folder))
        weights = accelerator.get_state_dict(model)
        return logs, {name: tensor.clone() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory):
    """Two ranks, since Accelerate steps a schedule once per rank; and what it does after a resume."""
    folder = tmp_path_factory.mktemp("plain")
    logs, weights = ranks(2, loop, "plain", None, folder)[0]
    return logs, weights, ranks(2, loop, "plain", None, folder, True)[0][0]


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2)), 3])
def test_a_loop_of_accelerates_has_the_same_curve(ranks, tmp_path, plain, stage):
    (found, weights), (other, nothing) = ranks(2, loop, "ours", stage, tmp_path)
    assert nothing == {}
    assert [log[1:] for log in found] == [log[1:] for log in other]
    for ours, wanted in zip(found, plain[0], strict=True):
        assert ours == pytest.approx(wanted, **CLOSE)
    assert_near(weights, plain[1], 1e-4, rate=RATE)
    again = ranks(2, loop, "ours", 1, tmp_path, True)[0][0]
    for ours, wanted in zip(again, plain[2], strict=True):
        assert ours == pytest.approx(wanted, **CLOSE)


def compiled(kind):
    """Losses and notes of two windows of a loop whose Accelerator compiles."""
    with launched():
        fresh()
        options = {"dynamo_backend": "eager"} if kind == "compiled" else {}
        try:
            accelerator, model, optimizer, loader, _ = parts("ours", 3, **options)
            losses = []
            for _, batch in zip(range(4), loader, strict=False):
                with accelerator.accumulate(model):
                    losses.append(model(**batch).loss.item())
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
            return losses, accelerator.engine.notes
        finally:
            fresh()
            torch._dynamo.reset()


@pytest.mark.long
def test_dynamo_backend_compiles_blocks_and_changes_no_bit_where_the_backend_changes_none(ranks):
    plain, none = ranks(2, compiled, "plain")[0]
    found, (said,) = ranks(2, compiled, "compiled")[0]
    assert found == plain
    assert none == ()
    assert said.startswith("compiled: 2 x LlamaDecoderLayer, one graph a kind")


def clipped_once(kind):
    """Weights after two windows of which the first is clipped, and its norm."""
    with launched():
        fresh()
        accelerator, model, optimizer, loader, _ = parts(kind, 0)
        norms = []
        for _, batch in zip(range(4), loader, strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients and not norms:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e-3))
                optimizer.step()
                optimizer.zero_grad()
        return float(norms[0]), {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


def test_a_loop_that_clips_one_step_clips_no_other():
    (wanted, plain_weights), (norm, weights) = clipped_once("plain"), clipped_once("ours")
    assert norm == pytest.approx(wanted, **CLOSE)
    assert norm > 0.01
    assert all(torch.equal(tensor, plain_weights[name]) for name, tensor in weights.items())


def clipped_by(kind, limits):
    """Norms that clip_grad_norm_ has returned for these limits in one step, and the weights behind it."""
    import accelerate

    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        accelerator = accelerate.Accelerator(cpu=True) if kind == "plain" else Accelerator(cpu=True, stage=0)
        model = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator.backward(model(torch.ones(2, 4)).square().sum())
        norms = []
        for limit in limits:
            norm = accelerator.clip_grad_norm_(model.parameters(), limit)
            norms.append(float(norm))
            norm.zero_()  # it is the caller's own
        optimizer.step()
        return norms, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("limits", [(0.5, 0.1), (0.1, 0.5), (float("inf"), 0.1), (0.1, float("inf"))])
def test_of_several_limits_the_least_counts_and_each_norm_is_that_of_what_is_left(limits):
    (wanted, plain), (found, weights) = clipped_by("plain", limits), clipped_by("ours", limits)
    assert found == pytest.approx(wanted, rel=1e-4)
    torch.testing.assert_close(weights, plain, rtol=1e-4, atol=1e-6)


def one_epoch(kind, folder):
    """What this rank read of one epoch, and how many processes the program sees. Nobody says that there is no GPU."""
    from transformers import TrainingArguments

    from zero3d.ways.huggingface.accelerate import Accelerator
    from zero3d.ways.huggingface.transformers import Trainer

    rows = Seen(16)
    with launched():
        fresh()
        if kind == "accelerate":
            accelerator, model = Accelerator(stage=3), hf("llama")
            optimizer = torch.optim.AdamW(model.parameters())
            loader = torch.utils.data.DataLoader(rows, batch_size=2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for batch in loader:
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        else:
            args = TrainingArguments(
                str(folder), report_to=[], disable_tqdm=True, num_train_epochs=1, per_device_train_batch_size=2,
                save_strategy="no", dataloader_pin_memory=False,
            )  # fmt: skip
            trainer = Trainer(hf("llama"), args, train_dataset=rows, stage=3)
            trainer.train()
            accelerator = trainer.accelerator
        return rows.seen, accelerator.num_processes, accelerator.engine.dp.size, accelerator.is_main_process


@pytest.mark.parametrize("kind", ["accelerate", pytest.param("trainer", marks=pytest.mark.long)])
def test_ranks_on_cpus_share_the_data(ranks, tmp_path, kind):
    found = ranks(2, one_epoch, kind, tmp_path)
    assert sorted(found[0][0] + found[1][0]) == list(range(16))
    assert [rest for _, *rest in found] == [[2, 2, True], [2, 2, False]]


def made_late():
    """An Accelerator after something else has told Accelerate that there is one process."""
    from accelerate import PartialState

    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        PartialState()
        try:
            Accelerator(stage=3)
        except zero3d.ConfigError as error:
            return str(error)
        finally:
            fresh()


def test_a_state_that_knows_of_one_process_is_refused(ranks):
    for told in ranks(2, made_late):
        assert told.startswith(
            "2 ranks were launched, and here there is 1: each would train on the data of all. Pass cpu=True"
        )


def guarded(kind, stage=None, limit=1.0, precision="no"):
    """Norms and losses of a loop that leaves out steps by their norm: those above a limit, and what is not finite."""
    with launched():
        fresh()
        accelerator, model, optimizer, loader, schedule = parts(kind, stage, mixed_precision=precision)
        logs, taken = [], 0
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss * (float("inf") if number == 3 else 1.0)
                accelerator.backward(loss)
                if not accelerator.sync_gradients:
                    continue
                norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
                assert torch.equal(accelerator.clip_grad_norm_(model.parameters(), 0.5), norm) or not norm.isfinite()
                logs.append((float(norm), loss.item()))
                if norm < limit:
                    optimizer.step()
                    schedule.step()
                    taken += 1
                optimizer.zero_grad()
        assert kind == "plain" or accelerator.engine.steps == taken
        return logs, taken, 1.0 if kind == "plain" else accelerator.engine.loss_scale.value


def test_a_loop_that_leaves_out_steps_by_their_norm_has_accelerates_curve(ranks):
    both = zip(ranks(2, guarded, "ours", 3), ranks(2, guarded, "plain"), strict=True)
    for (found, taken, _), (wanted, steps, _) in both:
        assert taken == steps
        assert 0 < taken < len(wanted)
        for ours, plain in zip(found, wanted, strict=True):
            assert ours == pytest.approx(plain, **CLOSE, nan_ok=True)


def test_what_a_loop_leaves_out_in_fp16_lowers_the_loss_scale():
    _, _, before = guarded("ours", 0, 0.0, "fp16")
    logs, taken, scale = guarded("ours", 0, 10.0, "fp16")
    assert taken
    assert not all(torch.isfinite(torch.tensor(norm)) for norm, _ in logs)
    assert scale < 2.0**16
    assert before <= scale


def clipped_by_one():
    with launched():
        fresh()
        accelerator, model, optimizer, loader, _ = parts("ours", 3)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients and accelerator.is_main_process:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


def test_a_rank_that_alone_clips_is_told(ranks):
    with pytest.raises(RankFailure, match="ranks clip the norm of one step not at all and at 1: every rank must"):
        ranks(2, clipped_by_one)


def unconditional():
    """Whether the norm of each micro-batch is NaN, in a loop that clips in the middle of windows, too."""
    with launched():
        fresh()
        accelerator, model, optimizer, loader, _ = parts("ours", 2)
        norms = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).isnan().item())
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0.0, "no backward came"
        return norms


def test_a_norm_inside_a_window_is_nan_and_the_loop_is_told_once():
    with pytest.warns(UserWarning, match=r"inside a window of accumulation.*if accelerator\.sync_gradients") as told:
        norms = unconditional()
    assert norms == [True, False] * 2 + [False]  # the last window has one micro-batch
    assert len([warning for warning in told if "window of accumulation" in str(warning.message)]) == 1


def refused(what):
    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        accelerator, model, optimizer, *_ = parts("ours", 3)
        fails = {
            "value": lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
            "some": lambda: accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0),
            "closure": lambda: optimizer.step(lambda: 0.0),
            "apart": lambda: accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0)),
            "two": lambda: accelerator.prepare(hf("llama"), hf("gpt2"), optimizer),
            "plugin": lambda: Accelerator(cpu=True, fsdp_plugin=object()),
            "precision": lambda: Accelerator(cpu=True, mixed_precision="fp8"),
            "stage": lambda: Accelerator(cpu=True, stage=1, options={"stage": 3}),
            "graph": lambda: accelerator.backward(
                model(input_ids=torch.ones(1, 4).long()).logits.sum(), create_graph=True
            ),
            "uneven": lambda: accelerator.join_uneven_inputs([model], even_batches=False).__enter__(),
            "part": lambda: (
                accelerator.backward(model(input_ids=torch.ones(1, 4).long()).logits.sum()),
                model.lm_head.zero_grad(),
            ),
            "crossed": lambda: crossed(Accelerator(cpu=True)),
            "crossed again": lambda: crossed(Accelerator(cpu=True), first_alone=True),
        }
        fails[what]()


def crossed(accelerator, first_alone=False):
    """Two models and their optimizers, each prepared with the other's: steps would be each rank's own."""
    nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    if first_alone:
        accelerator.prepare(nets[1])
    accelerator.prepare(nets[0], optimizers[1])
    accelerator.prepare(nets[1])


@pytest.mark.parametrize(("what", "words"), [
    ("value", "clip the norm, with accelerator.clip_grad_norm_"),
    ("some", r"clip_grad_norm_ with 1 of \d+ trained parameters"),
    ("closure", r"optimizer\.step\(closure\) is not supported"),
    ("apart", r"prepared with its model, in one call: accelerator\.prepare\(model, optimizer\)"),
    ("two", r"2 models and 1 optimizers.*each has an Accelerator of its own"),
    ("plugin", r"Accelerator\(fsdp_plugin=\.\.\.\) would shard the model a second time"),
    ("precision", r"mixed_precision='fp8': one of no, bf16, fp16"),
    ("stage", r"Accelerator takes the stage by itself: pass stage=3, not in options"),
    ("graph", r"accelerator\.backward\(create_graph=\.\.\.\) is not supported"),
    ("uneven", r"join_uneven_inputs\(even_batches=False\).*Leave even_batches out"),
    ("part", r"zero_grad\(\) of a part of the model.*Call zero_grad\(\) of the model"),
    ("crossed", r"prepared with its model, in one call"),
    ("crossed again", r"prepared with its model, in one call"),
])  # fmt: skip
def test_what_cannot_be_is_refused(ranks, what, words):
    with pytest.raises(zero3d.ConfigError, match=words):
        refused(what)


@pytest.mark.parametrize(("stage", "options", "words"), [
    (7, {}, "ZeRO stage 7 does not exist: pass stage=0, 1, 2 or 3"),
    ("3", {}, "ZeRO stage '3' does not exist"),
    (3, {"ofload": {"optimizer": "host"}}, r"unknown key 'ofload' of zero3d\.Engine\. Did you mean 'offload'\?"),
    (3, {"clip": 1}, r"unknown key 'clip' of zero3d\.Engine\. Its clip_norm comes from Accelerate's clip_grad_norm_"),
    (3, {"stages": 1}, r"unknown key 'stages' of zero3d\.Engine\. The stage is not among them: .*\(stage=3\)"),
    (3, {"xyzzy": 1}, r"unknown key 'xyzzy' of zero3d\.Engine\. docs/api\.md has all"),
    (3, {"clip_norm": 1.0}, "has 'clip_norm', which comes from Accelerate's clip_grad_norm_"),
    (3, {"offload": {"optimizr": "host"}}, "offload has no key 'optimizr'"),
    (3, "offload", "options='offload'.*: pass a mapping"),
])  # fmt: skip
def test_a_wrong_stage_or_option_is_refused_before_there_is_a_model(stage, options, words):
    from zero3d.ways.huggingface.accelerate import Accelerator
    from zero3d.ways.huggingface.transformers import Trainer, patch

    for build in (partial(Accelerator, cpu=True), Trainer, patch):
        with pytest.raises(zero3d.ConfigError, match=words):
            build(stage=stage, options=options)


def stepped(model, optimizer, accelerator):
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(3, 4)).square().sum())
    optimizer.step()


def precision_of(*dtypes):
    """What a model computes in whose frozen and trained layer have been loaded in these dtypes."""
    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, dtype=dtype) for dtype in dtypes))
        model[0].requires_grad_(False)
        accelerator = Accelerator(cpu=True, stage=0)
        accelerator.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
        return accelerator.engine.precision.name


def test_a_model_stays_in_bf16_that_is_loaded_so_and_one_whose_adapters_alone_are_does_not():
    assert precision_of(torch.bfloat16, torch.bfloat16) == "bf16"
    assert precision_of(torch.float32, torch.bfloat16) == "fp32"


def second():
    """A model, and a second one in a prepare of its own, which trains after free_memory alone."""
    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        accelerator = Accelerator(cpu=True, stage=3)
        first, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        stepped(first, torch.optim.SGD(first.parameters(), lr=0.1), accelerator)
        trained = accelerator.get_state_dict(first)
        with pytest.raises(zero3d.ConfigError, match=r"one model is trained by an Accelerator.*free_memory\(\) before"):
            accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
        assert accelerator.get_state_dict(first).keys() == trained.keys()
        accelerator.free_memory()
        assert not any(p.isnan().any() for p in first.parameters())
        before = other.weight.detach().clone()
        stepped(other, torch.optim.SGD(other.parameters(), lr=0.1), accelerator)
        accelerator.free_memory()
        return bool(other.weight.isfinite().all()) and not torch.equal(other.weight, before)


def test_a_second_model_is_refused_and_trains_after_free_memory(ranks):
    assert ranks(2, second) == [True, True]


def test_an_optimizer_alone_is_pickled_and_steps_with_its_model_only():
    """Accelerate trains a model that is prepared in another call; here several ranks would each go their own way."""
    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(4, 4)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.1
        for wrong in (optimizer.step, lambda: accelerator.prepare(model)):
            with pytest.raises(zero3d.ConfigError, match="prepared with its model, in one call"):
                wrong()
        other = accelerator.prepare(torch.nn.Linear(2, 2))  # for evaluation
        assert other(torch.ones(1, 2)).shape == (1, 2)
        model, optimizer = accelerator.prepare(model, optimizer)
        before = accelerator.get_state_dict(model)["weight"].clone()
        accelerator.backward(model(torch.ones(3, 4)).sum())
        optimizer.step()
        assert not torch.equal(accelerator.get_state_dict(model)["weight"], before)


def of_another_model():
    """What an optimizer of another model's parameters, a loop of one step and a save leave of a model."""
    with launched():
        fresh()
        from zero3d.ways.huggingface.accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, another = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        before = copy.deepcopy(model.state_dict())
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(another.parameters(), lr=1.0))
        accelerator.backward(prepared(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert accelerator.engine is None
        return all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def test_an_optimizer_of_another_model_trains_nothing_and_says_so(capsys):
    assert of_another_model()
    assert (
        "zero3d: the optimizer has none of the 2 parameters of Linear: its steps train nothing"
        in capsys.readouterr().out
    )


class Stateful(torch.utils.data.DataLoader):
    """A loader whose state is its rank's, as torchdata's are where rank 0 alone reads data."""

    use_stateful_dataloader = True

    def state_dict(self):
        return {"rank": torch.distributed.get_rank(), "rows": len(self.dataset)}


def saved_loaders(folder, train):
    with launched():
        fresh()
        from zero3d.ways.huggingface.accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(4, 1)
        if train:
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator._dataloaders += [Stateful(Rows(4)), torch.utils.data.DataLoader(Rows(4)), Stateful(Rows(8))]
        accelerator.save_state(str(folder))
        names = sorted(path.name for path in folder.glob("dl_state_dict*"))
        return {name: tuple(torch.load(folder / name).values()) for name in names}


@pytest.mark.parametrize("train", [True, False])
def test_the_states_of_stateful_loaders_are_rank_0s_which_reads_for_all(ranks, tmp_path, train):
    assert (
        ranks(2, partial(saved_loaders, tmp_path, train))
        == [{"dl_state_dict.bin": (0, 4), "dl_state_dict_2.bin": (0, 8)}] * 2
    )


def within_an_epoch(folder, dispatches):
    """Losses behind a save in the middle of an epoch, and those after a load of it."""
    with launched():
        fresh()
        from accelerate.utils import DataLoaderConfiguration

        from zero3d.ways.huggingface.accelerate import Accelerator

        choice = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=dispatches)
        accelerator = Accelerator(cpu=True, stage=3, dataloader_config=choice)
        model = hf("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        loader = torch.utils.data.DataLoader(Rows(32), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

        def losses(save_behind=None):
            for number, batch in enumerate(loader):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if number == save_behind:
                    accelerator.save_state(str(folder))
                yield loss.item()

        first = list(losses(save_behind=2))
        accelerator.load_state(str(folder))
        return first[3:], list(losses())


@pytest.mark.long
@pytest.mark.parametrize("dispatches", [True, False])
def test_a_stateful_loader_goes_on_within_an_epoch(ranks, tmp_path, dispatches):
    pytest.importorskip("torchdata")
    for behind_the_save, behind_the_load in ranks(2, partial(within_an_epoch, tmp_path, dispatches)):
        assert behind_the_save == behind_the_load
        assert len(behind_the_load) == 5


def dropped(kind, stage):
    """A loop that forgets a window by zero_grad, and a model beside it that is only asked."""
    with launched():
        fresh()
        accelerator, model, optimizer, loader, _ = parts(kind, stage)
        teacher = accelerator.prepare(hf("gpt2"))
        teacher.eval()
        losses = []
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                with torch.no_grad():
                    wanted = teacher(**batch).logits
                loss = (model(**batch).logits - wanted).square().mean()
                accelerator.backward(loss)
                if number == 1:
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        return losses


def test_a_window_is_forgotten_and_another_model_only_asked(ranks):
    wanted = ranks(2, dropped, "plain", None)[0]
    assert ranks(2, dropped, "ours", 3)[0] == pytest.approx(wanted, rel=1e-5)


def one_window(accelerator, model, optimizer, loader):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            return


def saved_by_hooks(folder):
    """What hooks of a save and a load are given at stage 3, and whether weights that a hook loads are kept."""
    with launched():
        fresh()
        accelerator, model, optimizer, loader, _ = parts("ours", 3)
        teacher, seen = accelerator.prepare(hf("gpt2")), []

        def save(models, weights, where):
            whole = {name: float(p.double().sum()) for name, p in models[0].named_parameters()}
            seen.append(([type(one).__name__ for one in models], len(weights), not any(v != v for v in whole.values())))
            if accelerator.is_main_process:
                assert whole == {name: float(weights[0][name].double().sum()) for name in whole}
                models[0].save_pretrained(f"{where}/mine")
            weights.pop(0)

        def load(models, where):
            mine = models.pop(0)
            mine.load_state_dict(type(mine).from_pretrained(f"{where}/mine").state_dict())
            seen.append(mine is model)

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        one_window(accelerator, model, optimizer, loader)
        before = accelerator.engine.fingerprint()
        accelerator.save_state(str(folder))
        one_window(accelerator, model, optimizer, loader)
        assert accelerator.engine.fingerprint() != before
        accelerator.load_state(str(folder))
        assert accelerator.engine.fingerprint() == before
        assert teacher is accelerator._models[1]
        return seen


def test_hooks_of_saves_and_loads_have_the_model_whole(ranks, tmp_path):
    for seen in ranks(2, saved_by_hooks, tmp_path):
        assert seen == [(["LlamaForCausalLM", "GPT2LMHeadModel"], 2, True), True]


def loaded_after_prepare():
    with launched():
        fresh()
        accelerator, model, optimizer, loader, _ = parts("ours", 3)
        other = {name: value + 1 for name, value in hf("llama").state_dict().items()}
        model.load_state_dict(other)
        there = accelerator.get_state_dict(model)
        one_window(accelerator, model, optimizer, loader)
        for duplicate in (pickle.dumps, copy.deepcopy):
            with pytest.raises(
                zero3d.ConfigError, match=r"cannot be copied or pickled.*accelerator\.save_state\(FOLDER\)"
            ):
                duplicate(optimizer)
        groups = optimizer.state_dict()["param_groups"]
        with pytest.raises(zero3d.ConfigError, match=r"save all with accelerator\.save_state"):
            dict(optimizer.state_dict()["state"])
        return all(torch.equal(other[name], value) for name, value in there.items()), len(there), groups[0]["lr"]


def test_a_prepared_model_loads_weights_and_the_optimizer_shows_its_groups(ranks):
    found = ranks(2, loaded_after_prepare)
    assert [one[0] for one in found] == [True, True]
    assert found[0][1] > 0
    assert [one[2] for one in found] == [pytest.approx(1e-3)] * 2


def freed(precision):
    """A model trained by two Accelerators, one after the other, and read as a plain one between."""
    with launched():
        model, read = hf("llama"), []
        for _ in range(2):
            fresh()
            from zero3d.ways.huggingface.accelerate import Accelerator

            accelerator = Accelerator(cpu=True, stage=3, mixed_precision=precision)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            loader = torch.utils.data.DataLoader(Rows(8), batch_size=4 // accelerator.num_processes)
            one_window(accelerator, *accelerator.prepare(model, optimizer, loader))
            accelerator.free_memory()
            assert accelerator.engine is None
            assert "load_state_dict" not in vars(model)
            read.append(sum(float(p.double().sum()) for p in copy.deepcopy(model).parameters()))
        return read, {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.long), "bf16"])
def test_after_free_memory_a_model_is_plain_and_trains_on(ranks, precision):
    (read, dtypes), other = ranks(2, freed, precision)
    assert (read, dtypes) == other
    assert read[0] != read[1]
    assert dtypes == {torch.float32}


def newest(folder):
    from accelerate.utils import ProjectConfiguration

    with launched():
        fresh()
        naming = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
        accelerator, model, optimizer, loader, _ = parts("ours", 3, project_config=naming)
        with pytest.raises(zero3d.ConfigError, match="there is none yet: name the folder"):
            accelerator.load_state()
        hashes = []
        for _ in range(2):
            one_window(accelerator, model, optimizer, loader)
            accelerator.save_state()
            hashes.append(accelerator.engine.fingerprint())
        one_window(accelerator, model, optimizer, loader)
        accelerator.load_state()
        return accelerator.engine.fingerprint() == hashes[1] != hashes[0]


def test_a_load_without_a_folder_takes_the_last_save(ranks, tmp_path):
    assert ranks(1, newest, tmp_path) == [True]


def mixed(kind, stage=None, handlers=(), **options):
    """Losses of one's own of a model that makes fp32 tensors, and dtypes outside of the model."""
    import accelerate

    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        keywords = {"cpu": True, "mixed_precision": "bf16", "kwargs_handlers": list(handlers)}
        ours = {} if kind == "plain" else {"stage": stage, "options": options}
        accelerator = (accelerate.Accelerator if kind == "plain" else Accelerator)(**keywords, **ours)
        model = waves()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=RATE))
        losses, dtypes, one = [], [], torch.ones(2, 2)
        for step in range(4):
            ids = token_ids(step, accelerator.process_index)
            logits = model(ids)
            with accelerator.autocast():
                product = one @ one
                with accelerator.autocast(accelerate.utils.AutocastKwargs(enabled=False)):
                    dtypes = [logits.dtype, product.dtype, (one @ one).dtype]
                loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, dtypes


def test_mixed_precision_is_accelerates_in_the_model_and_around_it(ranks):
    plain = ranks(2, mixed, "plain")
    for (losses, dtypes), (wanted, of_accelerate) in zip(ranks(2, mixed, "ours", 3), plain, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-2)
        assert dtypes == of_accelerate == [torch.float32, torch.bfloat16, torch.float32]


def without_autocast(chosen):
    import accelerate

    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        handlers = [accelerate.utils.AutocastKwargs(enabled=False)] if chosen is None else []
        accelerator = Accelerator(
            cpu=True, mixed_precision="bf16", stage=2, kwargs_handlers=handlers, options=chosen or {}
        )
        model = hf("llama")
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        with accelerator.autocast():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        return model(input_ids=token_ids(0)).logits.dtype, product.dtype


@pytest.mark.parametrize(("chosen", "dtype"), [
    (None, torch.bfloat16), ({"autocast": False}, torch.bfloat16), ({"precision": "fp32"}, torch.float32),
])  # fmt: skip
def test_autocast_is_off_where_a_handler_or_an_option_says_so(chosen, dtype):
    assert without_autocast(chosen) == (dtype, torch.float32)
