"""A model's own generate on an engine: of whole sequences on every rank, at stage 3 with whole weights where they fit.

    gather_for_generation   None   whole weights if every rank has room for them (engine/held_weights.py)
                            True   whole weights
                            False  each unit is gathered for each token; TRL's ds3_gather_for_generation=False

With whole weights ranks generate apart. Else, and where ranks share a token's computation (tp, ep), they stay in step:
one that is done makes forwards until all are (`synced_gpus` of transformers).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from zero3d.errors import ConfigError
from zero3d.spec.sizes import decimal

if TYPE_CHECKING:
    from zero3d.engine.engine import Engine
    from zero3d.engine.held_weights import Held


def generation(engine: Engine, generate: Callable[..., Any], gather: bool | None, says: bool) -> Callable[..., Any]:
    """Return what takes the place of a model's generate.

    gather  as above
    says    print what is decided, once and whenever it changes
    """
    shared, blanks = engine.sequence, engine.blanks
    said: list[bool] = []

    def generate_whole(*args: Any, **options: Any) -> Any:
        together = {}
        if engine.stage == 3:
            held = engine.hold_weights(gather)
            if says and held.needed and said != [held.whole]:
                said[:] = [held.whole]
                print(line(held, gather))
            if not held.whole or not engine.has_whole_model:
                together = {"synced_gpus": True}
        with (
            nullcontext() if shared is None else shared.whole(),
            nullcontext() if blanks is None else blanks.generating(options),
        ):
            return generate(*args, **together | options)

    return generate_whole


def refuse_batch(*_: Any, **__: Any) -> NoReturn:
    """Raise ConfigError in the place of generate_batch at stage 3: ranks would make unlike numbers of forwards."""
    raise ConfigError(
        "generate_batch() at stage 3 is not supported: a rank has a part of the weights, and continuous batches make "
        "other numbers of forwards on each rank. Use generate() (TRL: use_transformers_continuous_batching=False), or "
        "stage 2."
    )


def line(held: Held, gather: bool | None) -> str:
    """Return what was decided, the arithmetic, and what to type for the other way."""
    other = f"gather_for_generation={not held.whole} (of patch, Trainer, Accelerator)"
    if held.whole:
        what = "gathers the whole weights once, before the first token"
        turn = f"{other} or TRL's ds3_gather_for_generation=False gathers each layer for each token."
    else:
        what = "gathers each layer for each token, and ranks stay in step"
        turn = f"{other} gathers the whole weights once."
    why = "" if gather is None else " as asked"
    fits = "has room for" if held.needed <= held.room else "has room for only"
    return (
        f"zero3d: generation at stage 3 {what}{why}: they take {decimal(held.needed)} beside the shards, and rank "
        f"{held.rank}, the tightest, {fits} {decimal(held.room)}. {turn}"
    )
