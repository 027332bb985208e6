"""How micro-batches go through the model: directly, where this rank has all of it, or through pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.engine.generation import check_options, check_supported, generate_as_whole, next_logits
from zero3d.engine.losses import Losses, check_loss, checked_weight
from zero3d.engine.replay.recordings import Again, InStep
from zero3d.engine.runtime import Runtime
from zero3d.errors import ConfigError
from zero3d.pipeline.chunks import SumAndWeight
from zero3d.precision import at_least_fp32
from zero3d.rng import set_torch_rng, share_torch_rng, torch_rng
from zero3d.zero.accumulation import Contribution
from zero3d.zero.gathers import STEP, Gathers
from zero3d.zero.hooks import Hooks
from zero3d.zero.step_parts import BACKWARD, FORWARD

if TYPE_CHECKING:
    from zero3d.pipeline.runner import Pipeline

Run = Callable[[Tensor], object]  # back-propagates a loss, which is scaled already


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

    def backward_sum(self, total: Tensor, weight: float | Tensor, last: bool | None, run: Run | None = None) -> None:
        """Back-propagate a sum of losses over `weight` targets. Raises ConfigError like `backward`."""

    def forward(self, batch: Any) -> Any:
        """Return the model's output for a micro-batch. Raises ConfigError where this rank has a part of the model."""

    def loss(self, output: Any, batch: Any) -> SumAndWeight:
        """Return the sum of a micro-batch's losses, and its weight."""

    def apart(self, again: Again) -> None:
        """Run a micro-batch that belongs to no step."""

    def evaluate(self, micro_batches: Iterable[Any]) -> list[SumAndWeight]:
        """Run forwards only; (sum, weight) of each micro-batch, on ranks that have the output."""

    def next_logits(self, ids: Tensor) -> Tensor | None:
        """Return [batch, vocabulary] of the token after `ids`, on ranks that have the output."""

    def check(self) -> None:
        """Raise Zero3dError where ranks no longer agree since an earlier failure."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context for work that ranks do together: where one rank fails, none goes on."""


class Direct:
    """Runs micro-batches through the whole model, one after another.

    forget   is called after a backward that died
    only     the option that has a forward make logits of the last position alone
    """

    vocabulary = None

    def __init__(self, parts: Runtime, losses: Losses, forget: Callable[[], None], only: Mapping[str, int]) -> None:
        self._module, self._heartbeat = parts.partition.module, parts.mesh.heartbeat
        self._accumulation, self._loss_scale = parts.accumulation, parts.loss_scale
        self._hooks, self._clocks = parts.hooks[0], parts.clocks
        self._losses, self._only = losses, only
        self._forget = forget

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def backward(self, loss: Tensor, weight: float | Tensor | None, last: bool | None) -> None:
        check_loss("engine.backward", loss)
        weight = 1.0 if weight is None else checked_weight(weight)
        if isinstance(weight, Tensor) or weight != 1.0:
            loss = at_least_fp32(loss) * weight
        self._backward(loss, weight, last)

    def backward_sum(self, total: Tensor, weight: float | Tensor, last: bool | None, run: Run | None = None) -> None:
        check_loss("engine.backward_sum", total)
        self._backward(total, checked_weight(weight), last, run)

    def _backward(self, total: Tensor, weight: float | Tensor, last: bool | None, run: Run | None = None) -> None:
        self._heartbeat.work(b"a backward")
        total = self._scaled(total)
        nan = self._accumulation.note_loss(total, weight)
        try:
            on_host = total.device.type == "cpu" and not isinstance(total, FakeTensor)  # else to look would be to wait
            if on_host and nan.tolist():
                self._hooks.refuse_released(total)
            with self._accumulation.counting(Contribution(weight, last)):
                total.backward() if run is None else run(total)  # type: ignore[no-untyped-call]
        except BaseException as error:
            self._forget()
            self._hooks.refuse_unsaved(total, error)
            raise

    def _scaled(self, total: Tensor) -> Tensor:
        return total if self._loss_scale.value == 1.0 else at_least_fp32(total) * self._loss_scale.value

    def forward(self, batch: Any) -> Any:
        return self._losses.forward(self._module, batch)

    def loss(self, output: Any, batch: Any) -> SumAndWeight:
        return self._losses.sum_and_weight(output, batch)

    def apart(self, again: Again) -> None:
        batch = again.batch
        again.enters(0, batch, ())
        with self._clocks.of(FORWARD):
            total, _ = self.loss(self.forward(batch), batch)
        with self._clocks.of(BACKWARD):
            self._scaled(total).backward()  # type: ignore[no-untyped-call]

    def evaluate(self, micro_batches: Iterable[Any]) -> list[SumAndWeight]:
        return [self.loss(self.forward(batch), batch) for batch in micro_batches]

    def next_logits(self, ids: Tensor) -> Tensor | None:
        return next_logits(self._module(ids, **self._only))

    def check(self) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


class Pipelined:
    """Runs micro-batches through this rank's model chunks and those of the other pipeline stages."""

    def __init__(self, pipeline: Pipeline, parts: Runtime, losses: Losses, only: Mapping[str, int]) -> None:
        self._pipeline, self._stages = pipeline, parts.axes.pp.size
        self._losses = losses
        self._with_length: Callable[[Any], Any] = _same if parts.sequence is None else parts.sequence.with_length
        self._loss_scale = parts.loss_scale
        self._only = only

    @property
    def vocabulary(self) -> int | None:
        return self._pipeline.vocabulary

    def call(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("engine(...)")

    def backward(self, loss: Tensor, weight: float | Tensor | None, last: bool | None) -> NoReturn:
        self._refuse("engine.backward")

    def backward_sum(
        self, total: Tensor, weight: float | Tensor, last: bool | None, run: Run | None = None
    ) -> NoReturn:
        self._refuse("engine.backward_sum")

    def forward(self, batch: Any) -> NoReturn:
        self._refuse("a forward")

    def loss(self, output: Any, batch: Any) -> NoReturn:
        self._refuse("a loss")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"{what} needs the whole model, and with pp={self._stages} this rank has a part of it: call "
            "engine.train_batch(micro_batches), engine.evaluate(micro_batches) or engine.generate(input_ids)."
        )

    def run(self, micro_batches: Sequence[Any], recording: InStep | None) -> list[SumAndWeight]:
        """Run forwards and backwards of a step; (sum, weight) of each micro-batch, on ranks that have the output.

        recording  looks at one of them on its way
        """
        return self._pipeline.run([self._told(batch) for batch in micro_batches], self._loss_scale.value, recording)

    def apart(self, again: Again) -> None:
        self._pipeline.run_apart(again.batch, self._loss_scale.value, again)

    def evaluate(self, micro_batches: Iterable[Any]) -> list[SumAndWeight]:
        return self._pipeline.evaluate(map(self._told, micro_batches))

    def next_logits(self, ids: Tensor) -> Tensor | None:
        output = self._pipeline.output({"input_ids": ids, **self._only})
        return None if output is None else next_logits(output)

    def generate(self, model: Any, ids: Tensor, max_new_tokens: int, options: dict[str, Any]) -> Tensor:
        """Continue `ids` by the generate of a Hugging Face model that is cut, on all ranks alike. Raises ConfigError.

        Sends the logits of a token to each other rank, in fp32, beside the hidden states of its prefix.
        """
        options = {"do_sample": False} | options
        check_supported(model, options)
        check_options(options, self.vocabulary)

        def logits_of(batch: dict[str, Any]) -> Tensor:
            output = self._pipeline.output({**batch, **self._only})
            return self._pipeline.logits(None if output is None else next_logits(output), len(batch["input_ids"]))

        if not options["do_sample"]:
            return generate_as_whole(model, logits_of, ids, max_new_tokens, **options)
        own = torch_rng(ids.device)
        share_torch_rng(ids.device, self._pipeline.spread)
        try:
            return generate_as_whole(model, logits_of, ids, max_new_tokens, **options)
        finally:
            if not self._pipeline.has_output:
                set_torch_rng(ids.device, own)

    def _told(self, batch: Any) -> Any:
        return self._with_length(self._losses.checked(batch))

    def check(self) -> None:
        self._pipeline.failures.check()

    def together(self) -> AbstractContextManager[None]:
        return self._pipeline.failures.guard()


def _same(batch: Any) -> Any:
    return batch


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
