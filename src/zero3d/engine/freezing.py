"""Parameters that are frozen and unfrozen between steps.

    trained at first   freezing switches `requires_grad` off: no gradient comes, and the optimizer leaves the parameter
                       and its states alone, as torch's do. They stay where they are; unfreezing goes on with them
    frozen at first    its unit has no masters, gradients and states. Unfreezing makes them: masters from the weights,
                       states as zeros. Other parameters of that unit stay frozen

The layout stays, so no parameter moves. What decides is `requires_grad` when a step is applied, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from zero3d.blueprint.units import in_order_of_use
from zero3d.engine.feature import Feature
from zero3d.engine.runtime import Runtime
from zero3d.errors import ConfigError
from zero3d.zero.param_groups import is_matched
from zero3d.zero.released_parameters import untold
from zero3d.zero.unit import Unit


class Freezing:
    """Owns what is done to an engine's units when parameters are frozen or unfrozen."""

    def __init__(self, parts: Runtime, features: Sequence[Feature]) -> None:
        self._parts, self._features = parts, features

    def set(self, module: nn.Module, pattern: str, trained: bool) -> None:
        """Freeze or unfreeze the parameters that a pattern matches. Raises ConfigError where there are none."""
        named, full = dict(module.named_parameters(remove_duplicate=False)), self._parts.partition.full_model
        names = [*full.shapes, *full.copies, *named]  # a pipeline's rank has some of them
        if not any(is_matched(name, pattern) for name in names):
            raise ConfigError(
                f"{pattern!r} matches no parameter: pass names or patterns of them, such as {names[0]!r} or "
                "'model.layers.0.*|*norm*'."
            )
        whole = [
            pair for unit in self._parts.units for pair in _named(unit)
        ]  # a stage's modules have names of their own
        chosen = {p for name, p in (*named.items(), *whole) if is_matched(name, pattern)}
        if not trained:
            self._refuse_frozen(next((name for name, p in self._trained() if p in chosen), None))
        else:
            self._make_trainable([unit for unit in self._parts.units if not chosen.isdisjoint(unit.weights.params)])
        for p in chosen:
            p.requires_grad_(trained)

    def adopt_unfrozen(self) -> None:
        """Make units trainable of which a parameter has been unfrozen by `requires_grad_`. Raises ConfigError."""
        self._make_trainable([unit for unit in self._parts.units if unit.trained])

    def _make_trainable(self, units: Sequence[Unit]) -> None:
        """Make masters, gradients and states of units that were frozen when the engine was built."""
        new = [unit for unit in units if unit.grads is None]
        if not new:
            return
        if (packed := next((unit for unit in new if not unit.dtype.is_floating_point), None)) is not None:
            raise ConfigError(
                f"parameter {packed.layout.slots[0].name!r} is {packed.dtype}, which has no gradient: train a matrix "
                "that is not quantised (model.quantize=null), or adapters beside it."
            )
        self._refuse(new[0])
        parts = self._parts
        for unit in new:
            unit.train()
            for hooks in parts.hooks:
                hooks.train(unit)
        in_use = in_order_of_use(parts.units, parts.first_uses)
        parts.reductions.extend(in_use, parts.model_group.untouched(parts.units))
        parts.optimizer.extend(new, parts.units, parts.partition.places, parts.groups.group)

    def check(self) -> None:
        """Raise ConfigError before a step of other parameters or gradients than the caller has chosen.

        It would update a frozen parameter, not update one of a new group, or leave a gradient to the next step.
        """
        self._parts.optimizer.check_groups()
        trained = self._trained()
        with untold():
            left = [name for name, p in trained if p.grad is not None]
            frozen = [name for name, p in trained if not p.requires_grad]
        if self._parts.accumulation.reached and left:
            raise ConfigError(
                f"{left[0]!r} was given a grad after the backward, whose gradients the engine has taken: this step "
                "would not use it, and the next one would add it. Put a gradient of your own there before the "
                "backward, which adds to it, or change gradients by p.register_hook(...); set p.grad = None to go on."
            )
        if not frozen:
            return
        self._refuse_frozen(frozen[0])
        if self._parts.accumulation.reached:
            self._parts.axes.dp.note_frozen(frozen)

    def _refuse_frozen(self, frozen: str | None) -> None:
        if frozen is None:
            return
        hindering = [(each.name, each.instead_of_it) for each in self._features if each.instead_of_it is not None]
        if self._parts.tiers is not None:
            hindering.insert(0, ("states off the device", "offload=None"))
        if hindering:
            what, remedy = hindering[0]
            raise ConfigError(
                f"parameter {frozen!r} was frozen after the engine was built, which does not work with "
                f"{what}: freeze it before the Engine is built, or pass {remedy}."
            )

    def _trained(self) -> Sequence[tuple[str, nn.Parameter]]:
        return [pair for unit in self._parts.units if unit.grads is not None for pair in _named(unit)]

    def _refuse(self, unit: Unit) -> None:
        policy, axes = self._parts.policy, self._parts.axes
        reasons: Mapping[str, bool] = {
            "exact=True": policy.exact,
            f"pp={axes.pp.size}": axes.pp.size > 1,
            f"ep={axes.ep.size}": axes.ep.size > 1,
            "states or weights off the device": self._parts.tiers is not None,
            **{feature.name: True for feature in self._features if not feature.trains_unfrozen},
            "gather_budget": bool(self._parts.partition.full_model.tiles),
        }
        if why := next((reason for reason, there in reasons.items() if there), None):
            name = unit.layout.slots[0].name
            later = f"build it trained, and freeze it with engine.freeze({name!r}) until then."
            anew = "export the model, and build a new Engine on that."
            fixed = self._parts.tiers or any(feature.instead_of_it for feature in self._features)
            raise ConfigError(
                f"parameter {name!r} was frozen when the engine was built, and unfreezing it does not work "
                f"with {why}: {anew if fixed else later}"
            )


def _named(unit: Unit) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a unit by their names in the whole model."""
    return [(slot.name, p) for slot, p in zip(unit.layout.slots, unit.weights.params, strict=True)]
