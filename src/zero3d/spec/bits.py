"""Declares why the bits of a run change with a setting, or with what several settings come to. No torch.

    key(..., bits="gradients are rounded differently")   the key's own value decides; checkpoints note it
    key(..., bits=FACTS["wire"])                         it decides a fact, as other keys may; checkpoints note the fact
    key(..., bits=None)                                  no bit changes with it

A checkpoint notes facts and values in its manifest, under `about`. `checkpoint/resume_contract.py` compares them with
those of the run that goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

ALWAYS = "always"
PLAIN, EXACT = "plain", "exact"  # outside of exact mode; in it
SAME_DP = "same dp"  # outside of exact mode, on as many data-parallel ranks: on others it follows from their number
SEVERAL = "several"  # outside of exact mode, where a step has several micro-batches
DEVICE, NCCL = "device", "nccl"  # on accelerators; on those of them where the backend adds what ranks have
REFUSED = "refused"  # a checkpoint with another value is refused
ELSEWHERE = "elsewhere"  # always, by means of its own: options of groups, axes that fold dp
UNKNOWN = "not known"  # what a checkpoint notes where it notes nothing, as one of an older version does

SAVED, GIVEN = SETTINGS = ("saved", "given")  # whose settings of the update count in a run that goes on
SUMS = "sums may be taken in another order"
EXACT_WOULD = "; zero.exact=true would be bitwise"


class Bits(NamedTuple):
    """Says why the bits of a run change with a setting or a fact, and when.

    why    one clause, as a run that goes on says it
    when   the runs in which it is compared: one of the words above
    usual  what a checkpoint means that notes nothing; of a key its default
    told   whether a run names it also where no bit changes with it
    fact   its name; "" for the value of a key
    words  what a line calls a fact whose values are hashes, which say nothing
    """

    why: str
    when: str = ALWAYS
    usual: Any = UNKNOWN
    told: bool = False
    fact: str = ""
    words: str = ""


def _named(rows: Mapping[str, Bits]) -> Mapping[str, Bits]:
    return MappingProxyType({name: row._replace(fact=name) for name, row in rows.items()})


FACTS = _named(
    {
        "tp": Bits("matrix products have other shapes"),
        "pp": Bits("each rank adds other terms"),
        "precision": Bits("values are rounded differently"),
        "wire": Bits("gradients are rounded differently on their way"),
        "torch": Bits("its kernels may sum in another order"),
        "kernels": Bits("they sum in another order"),
        "products": Bits("matrix products sum in another order"),
        "threads": Bits("sums are divided among them"),
        "moments": Bits("moments are rounded differently from here on", usual="fp32"),
        "updates": Bits("another kernel computes updates", usual="device"),
        "tiled_loss": Bits("its sums are taken in another order", usual=False),
        "gather_budget": Bits("sums over tiles are taken in another order", usual=None),
        "compiled": Bits("fused kernels round differently", usual=False),
        "attention": Bits("its kernels round differently", usual="sdpa"),
        "sp_kind": Bits("gradients of keys and values are summed in another order", usual="heads"),
        "sp_mixers": Bits("recurrences go on from states, and are summed in another order", usual="heads"),
        "sp_masks": Bits("other kernels attend where a mask would be larger", usual="dense"),
        "chunks": Bits("a rank sums norms of other parameters", usual="one a rank"),
        "units": Bits("a rank sums norms of other pieces of parameters", usual=None),
        "groups": Bits("parameters have other options", words="groups of parameters"),
        "scheduler": Bits("learning rates are others from here on"),
        "factors": Bits("the schedule's functions give others", usual=None, words="learning rates from here on"),
        "schedule_state": Bits("learning rates are others from here on", usual=None, words="state of the scheduler"),
        "modules": Bits("its layers compute otherwise", words="numbers in the model's modules"),
        "library": Bits("its layers may compute otherwise"),
        "loss": Bits("another function computes it", usual=None),
        "loss_scale": Bits("fp16's scale changes at other steps", usual=None),
        "batch": Bits("a step has other sequences"),
        "tokenization": Bits(
            "prompts with their completions, and what chats have beside texts, give other tokens", usual=1
        ),
        "micro_batch": Bits("matrix products have other shapes"),
        "dp": Bits(f"sums over ranks have other terms and differ in their last bits{EXACT_WOULD}", PLAIN, told=True),
        "stage": Bits(SUMS, NCCL, told=True),
        "accumulate": Bits("a step has another number of micro-batches", SAME_DP),
        "algorithm": Bits("ranks' terms are summed in another order", SAME_DP),
        "reduce": Bits("micro-batches a step are summed in another order", SEVERAL, told=True),
        "leaves": Bits("another number of micro-batches is summed", EXACT, usual=None),
        # on accelerators
        "deterministic": Bits("kernels may add in another order", DEVICE),
        "dp_sums": Bits(SUMS, DEVICE),
        "tp_sums": Bits(SUMS, DEVICE),
        "cublas_workspace": Bits(SUMS, DEVICE),
        "capability": Bits(SUMS, DEVICE),
        "cuda": Bits(SUMS, DEVICE),
        "cudnn": Bits(SUMS, DEVICE),
        "narrow_sums": Bits(SUMS, DEVICE),
        "fp32": Bits("products are rounded differently", DEVICE),
        "backend": Bits(SUMS, NCCL),
        "nccl": Bits(SUMS, NCCL),
        "nccl_algorithm": Bits(SUMS, NCCL),
        "nccl_protocol": Bits(SUMS, NCCL),
        "ranks_per_host": Bits(SUMS, NCCL),
        # compared by other means
        "fold": Bits("gradients are summed in other groups; with zero.exact only another sp changes bits", ELSEWHERE),
        "options": Bits("the update uses it", ELSEWHERE),
        # refused
        "model": Bits("refused where it makes another model", REFUSED),
        "optimizer": Bits("states of another optimizer are refused", REFUSED),
        "data": Bits("refused where it makes other data", REFUSED),
    }
)
