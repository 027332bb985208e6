"""Reads of `p.grad` between two backwards of a step: a log's, or those of adversarial training (FGM, PGD, AWP).

An engine takes gradients as they come, so `p.grad` is None, and an attack along it would be left out in silence: the
backward that follows such a read raises, also where a log has read it, which looks the same from here. Embeddings and
the first trained parameter tell of reads: attacks are on embeddings, or go over all parameters. A read inside a forward
is none of theirs: a compiler looks at all it compiles.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.zero.released_parameters import tell_no_more, tell_of_grad


class GradientReads:
    """Notes reads of `p.grad` from a backward to the next one or the step."""

    def __init__(self, engine: Engine) -> None:
        trained = [p for p in engine.module.parameters() if p.requires_grad]
        weights = [part.weight for part in engine.module.modules() if isinstance(part, nn.Embedding)]
        embeddings = [weight for weight in weights if isinstance(weight, nn.Parameter)]
        self._telling = list(dict.fromkeys([*embeddings, *trained[:1]]))
        self._module = engine.module
        self._hooks: list[Any] = []
        self._read = False

    def begin(self) -> None:
        """Note reads from now on, behind a backward, but for those of forwards."""
        self._tell()
        if not self._hooks:
            self._hooks = [
                self._module.register_forward_pre_hook(lambda *_: tell_no_more(self._telling)),
                self._module.register_forward_hook(lambda *_: self._tell(), always_call=True),
            ]

    def _tell(self) -> None:
        tell_of_grad(self._telling, self._note)

    def _note(self) -> None:
        self._read = True

    def pause(self) -> None:
        """Note no reads, which are the engine's own, until the next backward."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        tell_no_more(self._telling)

    def end(self) -> None:
        """Forget what was read in a step that is over."""
        self.pause()
        self._read = False

    def refuse(self) -> None:
        """Raise ConfigError, before another backward of the same step, where gradients were read after the last one."""
        read = self._read
        self.end()
        if read:
            raise ConfigError(
                "p.grad was read between two backwards of a step: zero3d takes gradients as they come, so p.grad is "
                "None, and what is made of it would be left out. If the read only looks at gradients, as a log does, "
                "remove it; their norm is accelerator.engine.grad_norm(), or what clip_grad_norm_ returns, where the "
                "window of accumulation ends. If it is adversarial training (FGM, PGD, AWP), take the gradient of "
                "what the model is called with instead: make its inputs_embeds a leaf "
                "(embeddings.detach().requires_grad_()), call torch.autograd.grad(loss, inputs_embeds), and "
                "back-propagate a second forward whose inputs_embeds are shifted along it."
            )
