"""The optimizers that a JSON of DeepSpeed's names, and where each is taken.

Adam, AdamW     everywhere          torch's AdamW; with adam_w_mode=false in a program Adam
Muon            runs and programs   Muon on the matrices of blocks, AdamW on the rest
torch's, Lion   programs            `initialize`, with the options that the class has
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ADAM = ("adam", "adamw")
IN_TRAINER, IN_RUNS = frozenset(ADAM), frozenset((*ADAM, "muon"))
OF_ADAM = ("lr", "betas", "eps", "weight_decay")
MATRICES, REST = 0.02, 3e-4  # rates of DeepSpeed's Muon and of the AdamW beside it
OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(  # by the type's name in lower case
    {
        "adam": (*OF_ADAM, "adam_w_mode"),
        "adamw": (*OF_ADAM, "adam_w_mode"),
        "muon": (*OF_ADAM, "momentum", "muon_lr", "adam_lr", "ns_method"),
        "sgd": ("lr", "weight_decay", "momentum", "dampening", "nesterov"),
        "adagrad": ("lr", "weight_decay", "eps", "lr_decay", "initial_accumulator_value"),
        "lion": ("lr", "betas", "weight_decay"),
        "rmsprop": ("lr", "weight_decay", "eps", "momentum", "alpha", "centered"),
        "nadam": (*OF_ADAM, "momentum_decay"),
        "radam": OF_ADAM,
        "adamax": OF_ADAM,
        "adadelta": ("lr", "weight_decay", "eps", "rho"),
    }
)
IN_PROGRAMS = frozenset(OPTIONS)
RATES = MappingProxyType({"adagrad": 1e-2, "rmsprop": 1e-2, "nadam": 2e-3, "adamax": 2e-3, "adadelta": 1.0})
RATE = 1e-3  # of all others where the JSON has none
EXTRA = tuple(
    dict.fromkeys(name for options in OPTIONS.values() for name in options if name not in (*OF_ADAM, "adam_w_mode"))
)
