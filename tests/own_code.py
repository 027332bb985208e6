"""What a user would give a run: functions for evaluate.function, classes for callbacks. Runs name them own_code:NAME."""

import json
import os
import sys
from pathlib import Path

import torch


def rank_and_step(engine, step):
    """A value that differs between ranks, and random numbers that training must not miss."""
    torch.rand(3)
    return {"rank": engine.world.rank, "quality": torch.tensor(step / 4)}


def turns(engine, step):
    """Improves up to step 3, then never again."""
    return {"quality": float(min(step, 3)), "ready": step >= 3}


def with_collectives(engine, step):
    """The sum over ranks of what each one has."""
    rows = engine.world.exchange(torch.tensor([float(engine.world.rank + 1)]))
    generated = engine.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
    return {"sum": rows.sum(), "length": generated.shape[1]}


def raises(engine, step):
    raise LookupError("no answers\nfor these questions")


def returns_none(engine, step):
    return None


def returns_text(engine, step):
    return {"accuracy": "0.5"}


def returns_loss(engine, step):
    return {"loss": 1.0}


def other_names(engine, step):
    return {f"of_rank_{engine.world.rank}": 1.0}


def without_step(engine):
    return {}


class Recorder:
    """Writes every event of its rank, with what it was given, into the folder that OWN_CODE_LOG names."""

    def _write(self, engine, event, what):
        with (Path(os.environ["OWN_CODE_LOG"]) / f"rank-{engine.world.rank}").open("a") as file:
            file.write(json.dumps([event, what]) + "\n")

    def on_start(self, engine, config, step):
        torch.rand(1)
        self._write(engine, "on_start", [config.train.steps, step])

    def on_step(self, engine, record):
        record["loss"] = 0.0
        self._write(engine, "on_step", record["step"])

    def on_evaluate(self, engine, record):
        self._write(engine, "on_evaluate", [record["step"], sorted(record.keys() & {"validation_loss", "quality"})])

    def on_save(self, engine, folder):
        assert (folder / "manifest.json").is_file()
        self._write(engine, "on_save", folder.name)

    def on_end(self, engine, record):
        self._write(engine, "on_end", record.get("step"))


class Stumbles:
    def on_step(self, engine, record):
        raise KeyError(record["step"])


class Leaves:
    """Ends its process on rank 1, as a program does that has seen enough."""

    def on_step(self, engine, record):
        if engine.world.rank == 1:
            sys.exit("seen enough")


class Interrupts:
    def on_step(self, engine, record):
        raise KeyboardInterrupt


class Misspelled:
    def on_evaluat(self, engine, record):
        pass


class OfAnotherTrainer:
    def on_train_begin(self, args, state, control):
        pass


class CamelCase:
    def onStep(self, engine, record):
        pass


class Silent:
    def finish(self):
        pass


class TakesTooFew:
    def on_save(self, engine):
        pass


class NeedsArguments:
    def __init__(self, path):
        self.path = path

    def on_step(self, engine, record):
        pass
