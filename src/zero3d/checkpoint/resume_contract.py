"""Whether a run that goes on from a checkpoint has the bits of one that was never interrupted, and if not, why.

                  plain                                       exact on both sides
    the same      mesh, how experts are computed, precision,  tp, pp, sp, micro-batches per step over all ranks,
                  dtype on the wire, dtype of Adam's moments, precision, dtype on the wire, dtype of Adam's moments,
                  where updates are made (accelerators only), where updates are made (accelerators only), torch,
                  algorithm, torch, kernels, threads, tiles,  kernels, threads, tiles, what is compiled,
                  what is compiled, kernels of attention,     kernels of attention, what sp ranks share, how large
                  what sp ranks share (heads, rows), how      their masks may be (accelerators only), layers in fp8
                  large their masks may be (accelerators
                  only), layers in fp8;
                  with several micro-batches a step the
                  moment of reduction
    may differ    stage, what leaves the device and where to  dp, ep, stage, moment of reduction, algorithm, what leaves
                  master as it is or in halves                the device and where to, master as it is or in halves

On an accelerator all of `distributed.determinism.device_facts` beside them: deterministic algorithms, which must be on,
its libraries, their settings. Where the backend adds what ranks have (native gradients over dp, activations over tp) it
must be the same, and its order known: NCCL of the same version, with a named algorithm, its ranks placed alike; then
the stage must be the same, too.

The batches must be the same ones, in micro-batches of the same size: that is not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero3d.distributed.degrees import FOLDS

BITWISE = "bitwise"
IMPORTED = "imported"  # from whom, of a checkpoint that another trainer wrote
EMA = "ema"  # decay of averages; nothing where there are none
ALWAYS = {
    "tp": "matrix products have other shapes",
    "pp": "a rank sums other terms",
    "precision": "",
    "wire": "gradients are rounded differently on their way",
    "torch": "its kernels may sum in another order",
    "kernels": "they sum in another order",
    "threads": "sums are divided among them",
    "moments": "moments are rounded differently from here on",
    "gradient_dtype": "gradients are rounded differently on the host",
    "updates": "another kernel computes updates",
    "tiled_loss": "its sums are taken in another order",
    "gather_budget": "sums over tiles are taken in another order",
    "gather_wire": "weights are rounded differently on their way",
    "slow_wire": "sums of gradients are rounded differently between copies of shards",
    "slow_rounding": "sums of gradients are rounded differently between copies of shards",
    "compiled": "fused kernels round differently",
    "attention": "its kernels round differently",
    "sp_kind": "gradients of keys and values are summed in another order",
    "sp_masks": "other kernels attend where a mask would be larger",
    "linear": "factors of products are rounded differently",
}
USUAL = {
    "moments": "fp32",
    "gradient_dtype": "fp32",
    "updates": "device",
    "tiled_loss": False,
    "gather_budget": None,
    "gather_wire": "same",
    "slow_wire": "same",
    "slow_rounding": "nearest",
    "compiled": False,
    "attention": "sdpa",
    "sp_kind": "heads",
    "sp_masks": "dense",
    "linear": None,
    "experts": "exact",
    **{fold.name: fold.usual for fold in FOLDS},
}  # where none is said
ALL = {fold.name: "all of dp" for fold in FOLDS if fold.usual is None}
EXACT_WOULD = "; zero.exact=true would be bitwise"
PLAIN = {
    "dp": f"sums over ranks have other terms and differ in their last bits{EXACT_WOULD}",
    **{fold.name: f"{fold.bits}{EXACT_WOULD * fold.exact}" for fold in FOLDS},
    "experts": "one product of all sources sums in another order",
}
EXACT = {
    "leaves": "micro-batches of a step over all ranks",
    **{fold.name: fold.bits for fold in FOLDS if not fold.exact},
}
FREE = ("dp", *(fold.name for fold in FOLDS), "stage", "reduce")  # named where they differ and change no bit
SUMS = "sums may be taken in another order"
BACKEND = "by the backend"  # NCCL, above all
DEVICE = {
    "deterministic": "",
    "dp_sums": "",
    "tp_sums": "",
    "cublas_workspace": SUMS,
    "capability": SUMS,
    "cuda": SUMS,
    "cudnn": SUMS,
    "narrow_sums": SUMS,
    "fp32": "products are rounded differently",
}
NCCL = {
    "backend": SUMS,
    "nccl": SUMS,
    "nccl_algorithm": SUMS,
    "nccl_protocol": SUMS,
    "ranks_per_host": SUMS,
    "stage": SUMS,
}


def resume_guarantee(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """Return one line that begins with "bitwise" or "not bitwise". Both arguments: `state.EngineState.about`."""
    return _guarantee(saved, live) + _of_averages(saved.get(EMA), live.get(EMA))


def _of_averages(saved: str | None, live: str | None) -> str:
    """Say what becomes of averages of the weights, which no training reads, where they do not go on as they were."""
    if saved == live:
        return ""
    if saved is None:
        return "; averages of weights (ema) begin with the weights of this step: the checkpoint has none"
    return "; its averages of weights (ema) are left out" if live is None else f"; ema {saved} -> {live} from here on"


def _guarantee(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    if IMPORTED in saved:
        return f"not bitwise: it was imported from {saved[IMPORTED]}"
    saved, live = USUAL | dict(saved), USUAL | dict(live)
    was, is_ = (about.get("leaves") is not None for about in (saved, live))
    if was != is_:
        return f"not bitwise: exact was {was} when it was saved, and is {is_} now"
    compared = ALWAYS | (EXACT if was else PLAIN | dict(_of_sums(saved, live))) | dict(_of_device(saved, live))
    changed = [_change(name, saved, live, why) for name, why in compared.items() if saved.get(name) != live[name]]
    if reasons := changed or list(_never(live)):
        return f"not bitwise: {'; '.join(reasons)}"
    moved = [_change(name, saved, live) for name in FREE if saved.get(name) != live[name]]
    changes = "".join(f", {change}" for change in moved)
    return f"{BITWISE}: as if it had not been interrupted{changes}, in batches and micro-batches of the same size"


def _of_sums(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what of gradients' sums matters only sometimes, and why.

    algorithm  on as many ranks: on others it follows from their number
    reduce     with several micro-batches a step, else there is one moment; older checkpoints do not say how many
    """
    if saved.get("dp") == live["dp"]:
        yield "algorithm", "ranks' terms are summed in another order"
    counts = saved.get("accumulate"), live["accumulate"]
    if counts != (1, 1):
        yield "reduce", f"{counts[0] or 'several'} micro-batches a step are summed in another order"


def _of_device(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what an accelerator's bits depend on, and why; what older checkpoints do not say counts as another value.

    Of another device, which differs by its name, only what was saved.
    """
    same_device = saved.get("kernels") == live["kernels"]
    for name, why in (DEVICE | (NCCL if _backend_adds(live) else {})).items():
        if name in live and (name in saved or same_device):
            yield name, why


def _backend_adds(about: Mapping[str, Any]) -> bool:
    """Say whether an accelerator's backend, and not zero3d, adds what ranks have."""
    return BACKEND in (about.get("dp_sums"), about.get("tp_sums"))


def _never(live: Mapping[str, Any]) -> Iterator[str]:
    """Yield why an accelerator does not repeat its bits even where nothing has changed."""
    if live.get("deterministic", "on") != "on":
        yield f"deterministic algorithms are {live['deterministic']} (pass train.deterministic=true)"
    if _backend_adds(live) and live["backend"] not in ("nccl", "gloo"):
        yield f"{live['backend']} adds the ranks' terms in an unknown order"
    if _backend_adds(live) and live.get("nccl_algorithm") == "chosen by NCCL":
        yield "NCCL chooses how it adds the ranks' terms (set NCCL_ALGO=Ring before the first process group)"


def _change(name: str, saved: Mapping[str, Any], live: Mapping[str, Any], why: str = "") -> str:
    was, is_ = (ALL.get(name, value) if value is None else value for value in (saved.get(name, "unknown"), live[name]))
    return f"{name} {was} -> {is_}{f' ({why})' if why else ''}"
