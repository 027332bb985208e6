"""Which torch optimizers may update pieces of parameters: those that treat every element by itself."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.optim import Optimizer

from zero3d.errors import ConfigError
from zero3d.zero.param_groups import OptimizerChoice

WORK = (
    "use AdamW, Adam, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, SGD, Lion or another that treats every element "
    "by itself, or zero3d.optim.muon(...) or zero3d.optim.adamw8bit(...)"
)
WHOLE = {
    "Adafactor", "AdaLomo", "AdamMini", "Adam_mini", "APOLLO", "APOLLOAdamW", "CAME", "Dion", "DistributedMuon",
    "DistributedShampoo", "GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit", "Kron", "LAMB", "Lamb", "LARS", "LBFGS",
    "Lomo", "Muon", "MuonWithAuxAdam", "NorMuon", "Scion", "Shampoo", "SingleDeviceMuon", "SM3", "SOAP",
    "SingleDeviceMuonWithAuxAdam", "SparseAdam", "StableAdamW",
}  # fmt: skip
SCHEDULE_FREE = {"AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "ScheduleFreeWrapper"}


def check_kind(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer, unless it needs more than pieces of parameters. Raises ConfigError."""
    name = type(optimizer).__name__
    if name in WHOLE:
        raise ConfigError(f"{name} looks at whole tensors, and ZeRO updates pieces of parameters: {WORK}.")
    if name in SCHEDULE_FREE:
        raise ConfigError(
            f"{name} trains other weights than it evaluates, and its train() and eval() would change those of which "
            f"ranks have pieces: {WORK}, and train.ema (ema=) for averages of weights."
        )
    return optimizer


def checked(choice: OptimizerChoice) -> OptimizerChoice:
    """Return a choice that refuses what `check_kind` does when it is built."""

    def build(pieces: list[list[Tensor]]) -> Optimizer:
        return check_kind(choice.build(pieces))

    return replace(choice, build=build)
