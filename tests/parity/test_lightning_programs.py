"""What programs do with Lightning around training, with our strategies as with its own DDP: hooks, and all after fit."""

import copy
import random
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure
from test_lightning import trainer_of
from trainers import launched

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("lightning") is None, reason="needs the extra lightning")]
CLOSE = {"rel": 1e-5, "abs": 1e-7}
HOOKS = (
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "optimizer_step",
    "optimizer_zero_grad", "configure_gradient_clipping", "on_train_batch_start", "on_train_batch_end",
)  # fmt: skip


def net(*mixins, seed=0, rate=1e-2):
    """A LightningModule with a frozen layer, a buffer, and weights under two names, which notes its losses."""
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
            self.first, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)
            self.second = torch.nn.Linear(16, 1)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("table", torch.ones(3), persistent=False)  # as those of rotary embeddings
            self.again = self.second
            self.seen = []

        def forward(self, x):
            self.count += self.training
            return self.again(torch.relu(self.norm(self.first(self.frozen(x)))))

        def loss(self, x):
            return (self(x) - x.sum(-1, keepdim=True)).pow(2).mean()

        def training_step(self, x, index):
            loss = self.loss(x)
            self.seen.append(loss.item())
            return loss

        def validation_step(self, x, index):
            self.log("val", self.loss(x), sync_dist=True)

        def test_step(self, x, index):
            self.log("test", self.loss(x), sync_dist=True)

        def predict_step(self, x, index):
            return self(x)

        def configure_optimizers(self):
            return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=rate)

    return type("Program", (*mixins, Net), {})


def data(seed=0, rows=24):
    values = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(list(values), batch_size=2, shuffle=False)


def trainer(strategy, folder, **options):
    plain = {"max_epochs": 2, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    return trainer_of(strategy, folder, **plain | options)


def weights(module):
    return {name: float(tensor.double().abs().sum()) for name, tensor in module.state_dict().items()}


def same(found, wanted):
    """Whether nested values are alike, up to rounding."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == pytest.approx(wanted, rel=2e-4, abs=2e-5) if isinstance(wanted, float) else found == wanted


def compare(ranks, case, strategies, folder, *given):
    wanted = ranks(2, case, "ddp", folder / "ddp", *given)
    for strategy in strategies:
        found = ranks(2, case, strategy, folder / strategy, *given)
        for ours, plain in zip(found, wanted, strict=True):
            assert same(ours, plain), f"{strategy}: {ours} for {plain}"
    return wanted


# --- hooks ----------------------------------------------------------------------------------------


def hooked(strategy, folder, seed):
    """The sequence of hooks' calls, and what they were given, of a run with options that are drawn."""
    import lightning

    drawn, calls = random.Random(seed), []
    options = {
        "accumulate_grad_batches": drawn.choice((1, 2, 5)), "gradient_clip_val": drawn.choice((None, 0.1)),
        "limit_train_batches": drawn.choice((3, 6)), "limit_val_batches": drawn.choice((0, 2)),
        "precision": drawn.choice(("32-true", "bf16-mixed")),
    }  # fmt: skip

    def noting(owner):
        def hook_of(name):
            def hook(self, *given, **named):
                given_values = (each for each in (*given, *named.values()) if isinstance(each, float | torch.Tensor))
                values = [float(each) for each in given_values if isinstance(each, float) or each.numel() == 1]
                calls.append((owner, name, *([] if options["precision"] != "32-true" else values)))
                return getattr(super(made, self), name)(*given, **named)

            return hook

        names = [name for name in HOOKS if owner == "module" or hasattr(lightning.Callback, name)]
        base = lightning.LightningModule if owner == "module" else lightning.Callback
        made = type("Noting", (object if owner == "module" else base,), {name: hook_of(name) for name in names})
        return made

    with launched():
        module = net(noting("module"))()
        one = trainer(strategy, folder, callbacks=[noting("callback")()], **options)
        one.fit(module, data(), data(1))
        return calls, module.seen if options["precision"] == "32-true" else len(module.seen)


@pytest.mark.parametrize("seed", range(4))
def test_hooks_are_called_as_with_ddp(ranks, tmp_path, seed):
    (calls, _), _ = compare(ranks, hooked, [f"zero3d_{seed % 3 + 1}"], tmp_path, seed)
    assert {name for _, name, *_ in calls} == set(HOOKS)


class OwnBackward:
    def backward(self, loss, *given, **named):
        (loss * 2).backward(*given, **named)


class OwnClipping:
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class EverySecondStep:
    """Leaves out every other step: its gradients are forgotten by the next zero_grad."""

    def optimizer_step(self, epoch, index, optimizer, closure=None):
        optimizer.step(closure=closure) if index % 2 == 0 else closure()


class ClosureFirst:
    def optimizer_step(self, epoch, index, optimizer, closure=None):
        closure()
        optimizer.step()


class Manual:
    """Back-propagates twice before a step, clips, and steps every other batch."""

    automatic_optimization = property(lambda self: False, lambda self, value: None)

    def training_step(self, x, index):
        optimizer = self.optimizers()
        if index % 2 == 0:
            optimizer.zero_grad()
        loss = self.loss(x)
        self.seen.append(loss.item())
        self.manual_backward(loss)
        self.manual_backward(self.loss(x * 0.5))
        if index % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()


class ManualClosure:
    automatic_optimization = property(lambda self: False, lambda self, value: None)

    def training_step(self, x, index):
        optimizer = self.optimizers()

        def closure():
            loss = self.loss(x)
            self.seen.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)

        with optimizer.toggle_model(sync_grad=True):
            optimizer.step(closure=closure)


class GuardedManual:
    """Looks at the norm before the step, where an engine trains, and leaves out large ones."""

    automatic_optimization = property(lambda self: False, lambda self, value: None)

    def training_step(self, x, index):
        optimizer = self.optimizers()
        loss = self.loss(x) * (100.0 if index == 1 else 1.0)
        self.seen.append(loss.item())
        self.manual_backward(loss)
        engine = getattr(self.trainer.strategy, "engine", None)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if engine is None else engine.grad_norm()
        if norm < 50:
            optimizer.step()
        optimizer.zero_grad()


class ForgottenByModule:
    """Leaves out every other step, and forgets its gradients by the module's own zero_grad."""

    automatic_optimization = property(lambda self: False, lambda self, value: None)

    def training_step(self, x, index):
        loss = self.loss(x)
        self.seen.append(loss.item())
        self.manual_backward(loss)
        if index % 2:
            self.optimizers().step()
        self.zero_grad()


PROGRAMS = {each.__name__: each for each in (
    OwnBackward, OwnClipping, EverySecondStep, ClosureFirst, Manual, ManualClosure, GuardedManual,
    ForgottenByModule,
)}  # fmt: skip


def programmed(strategy, folder, name):
    with launched():
        module = net(PROGRAMS[name])()
        one = trainer(strategy, folder)
        one.fit(module, data())
        return module.seen, one.global_step, weights(module)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_step_in_their_own_way_have_the_curve_of_ddp(ranks, tmp_path, name):
    compare(ranks, programmed, ["zero3d_1", "zero3d_3"], tmp_path, name)


# --- after fit ------------------------------------------------------------------------------------


def averaging(kind):
    from lightning.pytorch import callbacks

    if kind == "swa":
        return callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    if kind == "ema":
        return callbacks.EMAWeightAveraging(decay=0.5)
    return callbacks.WeightAveraging()


def averaged(strategy, folder, kind):
    with launched():
        module = net()()
        one = trainer(strategy, folder, max_epochs=3, callbacks=[averaging(kind)])
        one.fit(module, data(), data(1))
        validated = float(one.callback_metrics["val"])
        tested = one.test(module, data(2), verbose=False)[0]["test"]
        return module.seen, validated, tested, weights(module)


@pytest.mark.parametrize("kind", ["swa", "ema", "all"])
def test_callbacks_that_average_weights_find_them(ranks, tmp_path, kind):
    compare(ranks, averaged, ["zero3d_2", "zero3d_3"], tmp_path, kind)


def kept(strategy, folder, average=None):
    """What a program does with checkpoints after fit: the best, the last, one of its own; resumed, and read alone."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    with launched():
        kind, shown = net(), {}
        best = ModelCheckpoint(str(folder), "{epoch}", monitor="val", save_top_k=2, save_last=True)
        extra = [] if average is None else [averaging(average)]
        one = trainer(strategy, folder, enable_checkpointing=True, callbacks=[best, *extra])
        module = kind()
        one.fit(module, data(), data(1))
        shown["best score"] = float(best.best_model_score)
        shown["best"] = one.test(module, data(2), ckpt_path="best", verbose=False)[0]["test"]
        shown["validated"] = one.validate(module, data(2), ckpt_path="last", verbose=False)[0]["val"]
        shown["read"] = weights(kind.load_from_checkpoint(best.best_model_path))
        shown["last"] = weights(kind.load_from_checkpoint(str(folder / "last.ckpt"), map_location="cpu"))
        more = kind()
        again = trainer(strategy, folder, max_epochs=3, callbacks=[] if average is None else [averaging(average)])
        again.fit(more, data(), data(1), ckpt_path=str(folder / "last.ckpt"))
        shown["resumed"] = more.seen, weights(more), again.global_step
        again.save_checkpoint(str(folder / "own.ckpt"))
        shown["own"] = weights(kind.load_from_checkpoint(str(folder / "own.ckpt")))
        predicted = lightning.pytorch.Trainer.predict(again, more, data(2), ckpt_path=str(folder / "own.ckpt"))
        shown["predicted"] = float(torch.cat(predicted).abs().sum())
        return shown


@pytest.mark.parametrize("average", [None, "ema"])
def test_checkpoints_are_read_tested_and_resumed(ranks, tmp_path, average):
    compare(ranks, kept, ["zero3d_3", "zero3d_1"], tmp_path, average)


def in_turn(strategy, folder):
    """Fit, test, fit again by the same and by another Trainer, all of one module."""
    import lightning

    class Reads(lightning.Callback):
        """Reads the module where a program is told that training is over."""

        def on_train_end(self, trainer, module):
            shown.append(weights(module))

        def on_fit_end(self, trainer, module):
            shown.append(weights(module))

    with launched():
        module, shown = net()(), []
        one = trainer(strategy, folder, max_epochs=1, callbacks=[Reads()])
        one.fit(module, data(), data(1))
        shown.append(one.test(module, data(2), verbose=False)[0]["test"])
        one.fit_loop.max_epochs = 2
        one.fit(module, data(), data(1))
        shown.append(weights(module))
        other = trainer(strategy, folder, max_epochs=1)
        shown.append(other.validate(module, data(1), verbose=False)[0]["val"])
        other.fit(module, data(), data(1))
        shown.append(float(torch.cat(other.predict(module, data(3))).abs().sum()))
        module.eval()
        with torch.no_grad():
            shown.append(float(module(torch.ones(1, 8))))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if strategy != "ddp":
            other.strategy.close_engine()
        plain = copy.deepcopy(module)
        plain.loss(torch.ones(2, 8)).backward()
        optimizer.step()
        return module.seen, shown, {name for name, p in plain.named_parameters() if p.grad is not None}


def test_a_module_is_fitted_tested_and_fitted_again(ranks, tmp_path):
    compare(ranks, in_turn, [f"zero3d_{stage}" for stage in range(4)], tmp_path)


def precisely(strategy, folder, precision):
    """A run in another precision, which is tested after it; 16-mixed by its plugin, as on a GPU."""
    from lightning.pytorch.plugins import MixedPrecision

    with launched():
        module = net()()
        one = trainer(strategy, folder, gradient_clip_val=0.5, accumulate_grad_batches=2, precision=precision)
        if precision == "16-mixed":
            one.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu")
        one.fit(module, data(), data(1))
        scale = one.strategy.engine.loss_scale.value if strategy != "ddp" else None
        assert precision != "16-mixed" or scale is None or scale > 1
        return one.test(module, data(2), verbose=False)[0]["test"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_precisions_go_on_after_fit(ranks, tmp_path, precision):
    plain = ranks(2, precisely, "ddp", tmp_path, precision)
    for strategy in ("zero3d_2", "zero3d_3"):
        found = ranks(2, precisely, strategy, tmp_path, precision)
        assert found == pytest.approx(plain, rel=0.1 if "16" in precision else 1e-5)


def taken_over(strategy, folder):
    """A checkpoint of DDP's, resumed by another strategy."""
    with launched():
        one = trainer("ddp", folder, max_epochs=1)
        one.fit(net()(), data())
        one.save_checkpoint(str(folder / "plain.ckpt"))
        trainer(strategy, folder).fit(net()(), data(), ckpt_path=str(folder / "plain.ckpt"))


def test_a_checkpoint_of_another_strategy_is_refused_where_its_states_would_be_lost(ranks, tmp_path):
    with pytest.raises(RankFailure, match=r"another strategy has saved.*load_from_checkpoint\(PATH\)"):
        ranks(2, taken_over, "zero3d_3", tmp_path)


def by_value(strategy, folder):
    with launched():
        trainer(strategy, folder, gradient_clip_val=0.5, gradient_clip_algorithm="value").fit(net()(), data())


def test_clipping_by_value_is_refused(ranks, tmp_path):
    with pytest.raises(RankFailure, match="gradients are clipped by their norm"):
        ranks(2, by_value, "zero3d_2", tmp_path)


def died(strategy, folder):
    """One rank's step fails: no rank waits for the module to be made whole."""

    class Dies:
        def training_step(self, x, index):
            if index == 1 and dist.get_rank() == 1:
                raise RuntimeError("a bad row")
            return super().training_step(x, index)

    with launched():
        trainer(strategy, folder).fit(net(Dies)(), data())


def test_a_fit_that_fails_on_one_rank_ends_there(ranks, tmp_path):
    with pytest.raises(RankFailure, match="a bad row"):
        ranks(2, died, "zero3d_3", tmp_path)
