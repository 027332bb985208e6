"""How micro-batches go through the model: directly, where this rank has all of it, or through pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.engine.generation import next_logits
from zero3d.engine.losses import Losses
from zero3d.engine.replay.passages import Again
from zero3d.engine.replay.replay import Replay
from zero3d.errors import ConfigError
from zero3d.pipeline.chunks import SumAndWeight
from zero3d.precision import LossScale, at_least_fp32
from zero3d.zero.accumulation import Accumulation, Contribution
from zero3d.zero.gathers import STEP, Gathers
from zero3d.zero.hooks import Hooks

if TYPE_CHECKING:
    from zero3d.pipeline.runner import Pipeline


class Execution(Protocol):
    """What an engine asks of its way through the model.

    vocabulary  how many tokens there are, where only a pipeline must know
    """

    @property
    def vocabulary(self) -> int | None: ...

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Raises ConfigError where this rank has a part of it."""

    def backward(self, loss: Tensor, weight: float | Tensor | None, last: bool | None) -> None:
        """Back-propagate a mean loss over `weight` targets. Raises ConfigError where this rank has a part of it."""

    def backward_sum(self, total: Tensor, weight: float | Tensor, last: bool | None) -> None:
        """Back-propagate a sum of losses over `weight` targets. Raises ConfigError like `backward`."""

    def train(self, micro_batches: Sequence[Any]) -> list[SumAndWeight]:
        """Run forward and backward of a step; (sum, weight) of each micro-batch, on ranks that have the output."""

    def evaluate(self, micro_batches: Iterable[Any]) -> list[SumAndWeight]:
        """Run forwards only; (sum, weight) of each micro-batch, on ranks that have the output."""

    def next_logits(self, ids: Tensor) -> Tensor | None:
        """Return [batch, vocabulary] of the token after `ids`, on ranks that have the output."""

    def check(self) -> None:
        """Raise Zero3dError where ranks no longer agree since an earlier failure."""

    def together(self) -> AbstractContextManager[None]:
        """Return what is put around all that ranks do together: where one fails, none goes on."""


class Direct:
    """Runs micro-batches through the whole model, one after another.

    abandon   forgets the step after a backward that died
    only      the option that has a forward make logits of the last position alone
    announce  tells the heartbeat what comes next
    replay    computes a micro-batch of some steps once more
    examine   is shown a loss that is NaN, on the CPU: raises where it knows why
    explain   is shown a loss and the error that its backward raised: raises where it knows why
    """

    vocabulary = None
    examine: Callable[[Tensor], None] | None = None
    explain: Callable[[Tensor, BaseException], None] | None = None

    def __init__(
        self, module: nn.Module, losses: Losses, accumulation: Accumulation, loss_scale: LossScale,
        abandon: Callable[[], None], only: Mapping[str, int], announce: Callable[[bytes], None], replay: Replay | None,
    ) -> None:  # fmt: skip
        self._announce = announce
        self._module, self._losses, self._accumulation = module, losses, accumulation
        self._loss_scale, self._abandon, self._only, self._replay = loss_scale, abandon, only, replay

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def backward(self, loss: Tensor, weight: float | Tensor | None, last: bool | None) -> None:
        if loss.numel() != 1:
            raise ConfigError(
                f"engine.backward needs one number, and the loss has shape {tuple(loss.shape)}: pass loss.mean(), or "
                "call out.backward(gradient=...) yourself."
            )
        weight = 1.0 if weight is None else weight
        if isinstance(weight, Tensor) or weight != 1.0:
            loss = at_least_fp32(loss) * weight
        self.backward_sum(loss, weight, last)

    def backward_sum(self, total: Tensor, weight: float | Tensor, last: bool | None) -> None:
        self._announce(b"a backward")
        total = self._scaled(total)
        weight = weight.detach().double().reshape(()) if isinstance(weight, Tensor) else float(weight)
        nan = self._accumulation.note_loss(total, weight)
        try:
            on_host = total.device.type == "cpu" and not isinstance(total, FakeTensor)  # else to look would be to wait
            if self.examine is not None and on_host and nan.tolist():
                self.examine(total)
            with self._accumulation.counting(Contribution(weight, last)):
                total.backward()  # type: ignore[no-untyped-call]
        except BaseException as error:
            self._abandon()
            if self.explain is not None:
                self.explain(total, error)
            raise

    def _scaled(self, total: Tensor) -> Tensor:
        return total if self._loss_scale.value == 1.0 else at_least_fp32(total) * self._loss_scale.value

    def train(self, micro_batches: Sequence[Any]) -> list[SumAndWeight]:
        sums, replay = [], self._replay
        watched = None if replay is None else replay.watched(len(micro_batches))
        for i, batch in enumerate(micro_batches):
            with nullcontext() if replay is None else replay.around(watched, i, batch, self._compute):
                total, weight = self._losses.sum_and_weight(self._losses.forward(self._module, batch), batch)
                sums.append((total.detach(), weight))
                self.backward_sum(total, weight, last=i == len(micro_batches) - 1)
        if replay is not None:
            replay.compare(self._compute)
        return sums

    def _compute(self, again: Again) -> None:
        """Run a micro-batch that belongs to no step."""
        batch = again.batch
        again.enters(0, batch, ())
        total, _ = self._losses.sum_and_weight(self._losses.forward(self._module, batch), batch)
        self._scaled(total).backward()  # type: ignore[no-untyped-call]

    def evaluate(self, micro_batches: Iterable[Any]) -> list[SumAndWeight]:
        losses = self._losses
        return [losses.sum_and_weight(losses.forward(self._module, batch), batch) for batch in micro_batches]

    def next_logits(self, ids: Tensor) -> Tensor | None:
        return next_logits(self._module(ids, **self._only))

    def check(self) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


class Pipelined:
    """Runs micro-batches through this rank's model chunks and those of the other pipeline stages.

    replay  computes a micro-batch of some steps once more, when all have been through
    """

    def __init__(
        self, pipeline: Pipeline, stages: int, loss_scale: LossScale, only: Mapping[str, int], replay: Replay | None
    ) -> None:
        self._pipeline, self._stages, self._loss_scale, self._only = pipeline, stages, loss_scale, only
        self._replay = replay

    @property
    def vocabulary(self) -> int | None:
        return self._pipeline.vocabulary

    def call(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("engine(...)")

    def backward(self, loss: Tensor, weight: float | Tensor | None, last: bool | None) -> NoReturn:
        self._refuse("engine.backward")

    def backward_sum(self, total: Tensor, weight: float | Tensor, last: bool | None) -> NoReturn:
        self._refuse("engine.backward_sum")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"{what} needs the whole model, and with pp={self._stages} this rank has a part of it: call "
            "engine.train_batch(micro_batches), engine.evaluate(micro_batches) or engine.generate(input_ids)."
        )

    def train(self, micro_batches: Sequence[Any]) -> list[SumAndWeight]:
        scale, replay = self._loss_scale.value, self._replay
        watched = None if replay is None else replay.watched(len(micro_batches))
        sums = self._pipeline.run(micro_batches, scale, watched)
        if replay is not None and watched is not None:
            replay.repeat(watched, self._compute)
            replay.compare(self._compute)
        return sums

    def _compute(self, again: Again) -> None:
        """Run a micro-batch that belongs to no step."""
        self._pipeline.run_apart(again.batch, self._loss_scale.value, again)

    def evaluate(self, micro_batches: Iterable[Any]) -> list[SumAndWeight]:
        return self._pipeline.evaluate(micro_batches)

    def next_logits(self, ids: Tensor) -> Tensor | None:
        output = self._pipeline.output({"input_ids": ids, **self._only})
        return None if output is None else next_logits(output)

    def check(self) -> None:
        self._pipeline.failures.check()

    def together(self) -> AbstractContextManager[None]:
        return self._pipeline.failures.guard()


@contextmanager
def evaluating(module: nn.Module, hooks: Sequence[Hooks], gathers: Gathers, keep_full: bool) -> Iterator[None]:
    """Put a module into eval mode inside; every module's own mode comes back on exit.

    keep_full  units that a forward without grad has gathered stay so
    """
    before, modes = hooks[0].keep_full, {inner: inner.training for inner in module.modules()}
    for of_chunk in hooks:
        of_chunk.keep_full = keep_full
    module.eval()
    try:
        yield
    finally:
        if not keep_full:
            gathers.drop(lambda token: token == STEP)
        for of_chunk in hooks:
            of_chunk.keep_full = before
        for inner, training in modes.items():
            inner.training = training
