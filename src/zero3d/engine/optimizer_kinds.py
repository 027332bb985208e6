"""Tells which torch optimizers may update pieces of parameters: the ones that treat every element by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zero3d.errors import ConfigError
from zero3d.zero.param_groups import OptimizerChoice

WORK = (
    "use AdamW, Adam, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, SGD, Lion or another that treats every element "
    "by itself, or zero3d.optim.muon(...) or zero3d.optim.adamw8bit(...)"
)
WHOLE = {
    "Adafactor",
    "AdaLomo",
    "AdamMini",
    "Adam_mini",
    "APOLLO",
    "APOLLOAdamW",
    "CAME",
    "DAdaptAdam",
    "DAdaptSGD",
    "Dion",
    "DistributedMuon",
    "DistributedShampoo",
    "Fromage",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "Kron",
    "LAMB",
    "Lamb",
    "LARS",
    "LBFGS",
    "Lomo",
    "Muon",
    "MuonWithAuxAdam",
    "NorMuon",
    "NovoGrad",
    "Prodigy",
    "PSGD",
    "Scion",
    "Shampoo",
    "SingleDeviceMuon",
    "SM3",
    "SOAP",
    "SingleDeviceMuonWithAuxAdam",
    "SparseAdam",
    "StableAdamW",
}
SCHEDULE_FREE = {"AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "ScheduleFreeWrapper"}


def check_kind(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer, unless it needs more than pieces of parameters. Raises ConfigError."""
    _check_name(type(optimizer))
    return optimizer


def check_builder(optimizer: Any) -> None:
    """Refuse a class that cannot be, before it is called, also where arguments were bound to it. Raises ConfigError."""
    kind = getattr(optimizer, "func", optimizer)
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        _check_name(kind)


def _check_name(kind: type[Optimizer]) -> None:
    names = [each.__name__ for each in kind.__mro__]
    name = next((name for name in names if name in WHOLE or name in SCHEDULE_FREE), "")
    if name in WHOLE:
        raise ConfigError(f"{name} looks at whole tensors, and ZeRO updates pieces of parameters: {WORK}.")
    if name in SCHEDULE_FREE:
        raise ConfigError(
            f"{name} trains other weights than it evaluates, and its train() and eval() would change those of which "
            f"ranks have pieces: {WORK}, and train.ema (ema=) for averages of weights."
        )


def checked(choice: OptimizerChoice) -> OptimizerChoice:
    """Return a choice that, when built, refuses the same optimizers as `check_kind`."""

    def build(pieces: list[list[Tensor]]) -> Optimizer:
        return check_kind(choice.build(pieces))

    return replace(choice, build=build)
