"""Has a row for each optimizer that a file may ask for: optimizer.name. No torch.

The row says all that is asked of an optimizer before there is one: how a file's section builds it, which options and
states it has, what a step costs, what cannot be together with it. Outside optim/ nobody compares names: an optimizer
is added by its file there, its row and its test; options of its own need a key in config/sections.py, too.

Programs pass torch's optimizers, too: `TEMPORARIES` says what memory a step of these takes beside states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from zero3d.spec.dtypes import FP32, Dtype, master_of

ALL, MATRICES, REST = "all", "matrices", "rest"  # which parameters have a state
ADJUSTMENTS = ("match_rms_adamw", "original")
NO_ITEMS: Mapping[str, Any] = MappingProxyType({})
MOMENTS = ("exp_avg", "exp_avg_sq")
ADAMS = ("Adam", "AdamW")  # torch's classes whose states are these, and one more with amsgrad
OF_ADAMS = " and ".join(ADAMS)
UPDATED_ON_HOST = FP32  # states that the host can update


def host_can_update(kind: str, fused: bool, states: Iterable[Dtype]) -> bool:
    """Return whether the host makes an optimizer's update with the same bits (offload/host_adam.py).

    kind    the name of its class, if that is torch's; else ""
    fused   it uses torch's fused kernels
    states  the dtype of each state that it keeps of an element
    """
    return fused and kind in ADAMS and list(states) == [UPDATED_ON_HOST] * len(MOMENTS)


FUSED_ALONE = f"the host can update only torch's fused {OF_ADAMS} without amsgrad"


def refused_on_host(found: str) -> str:
    """Return the refusal of offload.executor=host with another optimizer. found: its class and states in words."""
    return (
        f"offload.executor=host works with torch's fused {OF_ADAMS} and fp32 moments, and the optimizer is {found}: "
        "pass one of them with fused=True, without amsgrad and not in fp64, or offload.executor=device."
    )


class Option(NamedTuple):
    """Describes an option under an optimizer's own key: its type, which values fit, and the same in words."""

    kind: type[Any]
    fits: Callable[[Any], bool]
    wants: str


@dataclass(frozen=True)
class OptimizerRow:
    """Says what is known of an optimizer before there is one.

    name     as in optimizer.name
    title    in sentences
    call     MODULE:FUNCTION that takes what `takes` and `options` name, and returns what builds it over pieces
    takes    the function's parameters, each with the key of the section that it gets
    kind     its torch class, as checkpoints name it
    states   which parameters have each state, by the state's name
    touched  bytes of memory per parameter that an update reads and writes, its master in fp32
    text     what the configuration says of it
    options  of its own key (optimizer.NAME), where it has one
    rules    what optimizer.groups may say under `name`
    codes    the optimizer whose states it has in 8 bits: a checkpoint of one is loaded by the other
    """

    name: str
    title: str
    call: str
    takes: Mapping[str, str]
    kind: str
    states: Mapping[str, str]
    touched: int
    text: str = ""
    options: Mapping[str, Option] = field(default_factory=lambda: NO_ITEMS)
    group_names: tuple[str, ...] = ()
    codes: str | None = None

    @property
    def coded(self) -> bool:
        """Return whether its states are codes of 8 bits in whole blocks: on the device, of fp32 masters alone."""
        return self.codes is not None

    @property
    def on_host(self) -> bool:
        """Return whether the host can update it, too, in a precision that lets it."""
        return host_can_update(self.kind, True, [UPDATED_ON_HOST] * len(self.states))

    @property
    def orthogonal(self) -> bool:
        """Return whether it makes matrices orthogonal, which travel whole to an owner and back."""
        return MATRICES in self.states.values()


OF_ADAMW = MappingProxyType({key: key for key in ("lr", "betas", "eps", "weight_decay")})
ADAMW = "adamw"

_ROWS = (
    OptimizerRow(
        ADAMW,
        "AdamW",
        "zero3d.train.setup.optimizer:adamw",
        OF_ADAMW,
        "AdamW",
        dict.fromkeys(MOMENTS, ALL),
        touched=30,  # reads gradient, master, m, v, writes master, m, v, weight
        group_names=(ADAMW,),
    ),
    OptimizerRow(
        "muon",
        "Muon",
        "zero3d.optim:muon",
        {
            "lr": "lr",
            "adamw_lr": "lr",
            "betas": "betas",
            "adamw_eps": "eps",
            "weight_decay": "weight_decay",
            "split": "split",
        },
        "MuonWithAdamW",
        {"momentum_buffer": MATRICES, **dict.fromkeys(MOMENTS, REST)},
        touched=42,  # of matrices: 16 for the momentum, 12 for what travels, 14 for the update
        text="Muon on the matrices of blocks, AdamW on all else",
        options={
            "lr": Option(float, lambda value: value > 0, "a number above 0"),
            "momentum": Option(float, lambda value: 0 <= value < 1, "a number from 0 and below 1"),
            "nesterov": Option(bool, lambda value: True, "true or false"),
            "ns_steps": Option(int, lambda value: 1 <= value < 100, "a whole number from 1 to 99"),
            "adjust_lr": Option(str, lambda value: value in ADJUSTMENTS, " or ".join(ADJUSTMENTS)),
        },
        group_names=(ADAMW, "muon"),
    ),
    OptimizerRow(
        "adamw8bit",
        "AdamW with moments in 8 bits",
        "zero3d.optim:adamw8bit",
        OF_ADAMW,
        "AdamW8bit",
        dict.fromkeys(MOMENTS, ALL),
        touched=130,  # AdamW's, and 50 for each moment, which is read into fp32 and written again
        text="AdamW with moments in 8 bits, 2.03 bytes per parameter for 8",
        group_names=(ADAMW,),
        codes=ADAMW,
    ),
)
OPTIMIZERS: Mapping[str, OptimizerRow] = MappingProxyType({row.name: row for row in _ROWS})
NAMES = tuple(OPTIMIZERS)
GROUP_NAMES = tuple(dict.fromkeys(name for row in _ROWS for name in row.group_names))
ON_HOST = " and ".join(row.title for row in _ROWS if row.on_host)


def why_not_on_host(name: str, precision: str) -> str:
    """Return why the host cannot update an optimizer's states in this precision, or "" where it can."""
    if OPTIMIZERS[name].on_host and master_of(precision) == UPDATED_ON_HOST:
        return ""
    return f"the host updates fp32 states of {ON_HOST} alone, no {precision} {name}"


class Temporaries(NamedTuple):
    """Counts the values that a step makes of an element and drops again, at most, as wide as its states.

    together  by multi-tensor calls: of all tensors that these are given
    alone     from tensor to tensor: of one of them
    """

    together: int
    alone: int


# Of torch's optimizers by their class, with any options; those that are not here may take any number.
TEMPORARIES: Mapping[str, Temporaries] = MappingProxyType(
    {
        "Adadelta": Temporaries(3, 4),
        "Adagrad": Temporaries(2, 3),
        "Adam": Temporaries(1, 4),
        "AdamW": Temporaries(1, 4),
        "Adamax": Temporaries(2, 2),
        "ASGD": Temporaries(2, 2),
        "NAdam": Temporaries(3, 4),
        "RAdam": Temporaries(1, 6),
        "RMSprop": Temporaries(2, 3),
        "Rprop": Temporaries(2, 4),
        "SGD": Temporaries(1, 2),
    }
)


def temporary_elements(kind: str, together: bool, sizes: Sequence[int], room: int) -> int:
    """Return the most values that torch's optimizer `kind` makes and drops at once in a step, without fused kernels.

    together  by multi-tensor calls, which are given a portion of the tensors: `room` elements, or one longer tensor
    sizes     elements of the tensors of one group
    """
    longest, rate = max(sizes, default=0), TEMPORARIES[kind]
    return rate.together * min(sum(sizes), max(room, longest)) if together else rate.alone * longest
