"""What sections `evaluate`, `schedule` and averages of weights ask for that cannot be, across their keys."""

from __future__ import annotations

from collections.abc import Iterator

from zero3d.config.deepspeed_schedules import OPTIONS, option_problems
from zero3d.config.sections import Config

HELD_OUT = ("validation_loss", "perplexity", "ema_validation_loss")  # how names of values of the held-out data begin


def evaluation_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that this run cannot have, and why."""
    choice = config.evaluate
    if choice.function is None and not choice.best.startswith(HELD_OUT):
        text = f"evaluate.best={choice.best} is a value of evaluate.function, and there is none: type"
        yield "evaluate.best", f"{text} evaluate.function=module:function, or evaluate.best={HELD_OUT[0]}."
    if choice.patience is None:
        return
    if choice.every == 0:
        text = f"evaluate.patience={choice.patience} counts evaluations, and evaluate.every is 0, one at the end:"
        yield "evaluate.patience", f"{text} type evaluate.every=STEPS, too."
    if choice.best.startswith(HELD_OUT) and not config.data.validation:
        text = f"evaluate.patience={choice.patience} waits for a better {choice.best}, and nothing is held out: type"
        yield "evaluate.patience", f"{text} data.validation=0.05, or evaluate.best=NAME of evaluate.function."


def average_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield why averages of weights cannot be evaluated."""
    best = config.evaluate.best
    if config.train.ema is None and best.startswith("ema_"):
        yield "evaluate.best", f"evaluate.best={best} is of averages of the weights: type train.ema=0.999, too."


def schedule_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of the learning rate's schedule that cannot be, and why."""
    choice = config.schedule
    if choice.name in OPTIONS:
        key = "schedule.name" if choice.options is None else "schedule.options"
        yield from ((key, f"schedule.options: {why}") for why in option_problems(choice.name, choice.options or {}))
    elif choice.options is not None:
        text = f"schedule.options are of DeepSpeed's schedules, and schedule.name is {choice.name}: type schedule.name="
        yield "schedule.options", f"{text}{' or '.join(OPTIONS)}, or leave them out."
    if choice.name == "inverse_sqrt" and choice.warmup == 0:
        text = "schedule.name=inverse_sqrt falls with the root of warm-up steps over steps, and schedule.warmup is 0:"
        yield "schedule.name", f"{text} type schedule.warmup=0.01, or a number of steps."
    shares = choice.warmup < 1 and choice.decay < 1
    if choice.name == "wsd" and shares and choice.warmup + choice.decay > 1:
        text = f"schedule.warmup {choice.warmup:g} + schedule.decay {choice.decay:g} of all steps are more than 1:"
        yield "schedule.decay", f"{text} type schedule.decay={1 - choice.warmup:g} or less."
