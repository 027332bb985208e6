"""Lightning's Trainer with `strategy="zero3d_N"`: the curve of its own DDP, resume included. Needs the extra lightning."""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from models import hf
from pool import RankFailure
from trainers import Rows, launched

import zero3d

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("lightning") is None, reason="needs the extra lightning")]
CLOSE = {"rel": 1e-5, "abs": 1e-7}


def module(optimizers=1):
    """A LightningModule around a causal language model; it notes its losses and learning rates."""
    import lightning

    class Language(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = optimizers == 1
            self.model = hf("llama")
            self.losses, self.held_out = [], []

        def forward(self, batch):
            return self.model(**batch).loss

        def training_step(self, batch, index):
            loss = self(batch)
            self.losses.append((loss.item(), self.optimizers().param_groups[0]["lr"]))
            return loss

        def validation_step(self, batch, index):
            self.held_out.append(self(batch).item())

        def configure_optimizers(self):
            made = [torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1) for _ in range(optimizers)]
            if optimizers > 1:
                return made
            schedule = torch.optim.lr_scheduler.LinearLR(made[0], 0.1, 1.0, total_iters=6)
            return {"optimizer": made[0], "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(0)
    return Language()


def trainer_of(strategy, folder, **options):
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from zero3d.ways.lightning import Zero3dStrategy

    assert Zero3dStrategy, "and its names are registered"
    os.environ.setdefault("GROUP_RANK", "0")
    return lightning.Trainer(**{
        "accelerator": "cpu", "devices": dist.get_world_size(), "strategy": strategy, "plugins": [TorchElasticEnvironment()],
        "max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": str(folder), "num_sanity_val_steps": 0, "barebones": False,
    } | options)  # fmt: skip


def loader(rows, seed, size=4):
    return torch.utils.data.DataLoader(Rows(rows, seed=seed), batch_size=size, shuffle=False)


def fitted(strategy, folder, epochs=3, resume=None, save=False, optimizers=1):
    """Losses and rates of every micro-batch, and of a validation after each epoch."""
    with launched():
        manual = {} if optimizers == 1 else {"gradient_clip_val": None, "accumulate_grad_batches": 1}
        made, trainer = module(optimizers), trainer_of(strategy, folder, max_epochs=epochs, **manual)
        trainer.fit(made, loader(32, 0), loader(8, 1), ckpt_path=resume)
        assert strategy == "ddp" or trainer.strategy.engine.stage == int(strategy[-1])
        if save:
            trainer.save_checkpoint(str(folder / "saved"))
        return made.losses, made.held_out


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_strategy_has_the_curve_of_ddp(ranks, tmp_path, stage):
    for found, wanted in zip(
        ranks(2, fitted, f"zero3d_{stage}", tmp_path), ranks(2, fitted, "ddp", tmp_path), strict=True
    ):
        assert len(found[0]) == 12
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == [pytest.approx(value, **CLOSE) for value in theirs]


def test_a_run_resumes_at_another_stage(ranks, tmp_path):
    wanted = ranks(2, fitted, "ddp", tmp_path)[0]
    ranks(2, fitted, "zero3d_3", tmp_path, 1, None, True)
    found = ranks(2, fitted, "zero3d_1", tmp_path, 3, str(tmp_path / "saved"))[0]
    assert len(wanted[0]) == 12
    for ours, theirs in zip(found[0], wanted[0][4:], strict=True):
        assert ours == pytest.approx(theirs, **CLOSE)


def test_two_optimizers_are_refused(ranks, tmp_path):
    with pytest.raises(RankFailure, match="ConfigError: configure_optimizers gave 2 optimizers: an engine has one"):
        ranks(2, fitted, "zero3d_2", tmp_path, 1, None, False, 2)


@pytest.mark.parametrize(("stage", "options", "words"), [
    (7, {}, "ZeRO stage 7 does not exist"),
    (3, {"ofload": "host"}, r"Zero3dStrategy\(options=\.\.\.\): unknown key 'ofload'.*'offload'"),
])  # fmt: skip
def test_a_wrong_stage_or_option_is_refused_before_there_is_a_model(stage, options, words):
    from zero3d.ways.lightning import Zero3dStrategy

    with pytest.raises(zero3d.ConfigError, match=words):
        Zero3dStrategy(stage=stage, options=options)
