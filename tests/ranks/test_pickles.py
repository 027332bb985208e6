"""No message of ours is a pickle, and none is read: in the source, and in a pipeline while it is built and steps."""

import ast
import pickle
import re
import traceback
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.distributed_c10d as c10d

import zero3d

SRC = Path(__file__).parents[2] / "src" / "zero3d"
MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
CALLS = {"load", "save"}  # of torch
RESTRICTED = SRC / "ways" / "checkpoints" / "restricted.py"  # reads those of other trainers
COLLECTIVES = ("all_gather_object", "gather_object", "_object_list")
MENTIONED = re.compile(rf"\b({'|'.join(MODULES | CALLS)})\b|({'|'.join(COLLECTIVES)})\b")  # in all that is looked for


def users_of_pickles(path):
    """Lines of a file that import a pickling module, or call what pickles."""
    text = path.read_text()
    if not MENTIONED.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if any(str(name).split(".")[0] in MODULES for name in names):
                yield f"{path.name}:{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and MENTIONED.search(getattr(node.func, "attr", getattr(node.func, "id", ""))):
            called = ast.unparse(node.func)
            numpys = called in ("numpy.load", "np.load") and "allow_pickle=False" not in ast.unparse(node)
            safe = called == "torch.load" and "weights_only=True" in ast.unparse(node)
            torchs = called.startswith("torch.") and called.removeprefix("torch.") in CALLS and not safe
            if torchs or called.endswith(COLLECTIVES) or numpys:
                yield f"{path.name}:{node.lineno} {called}"


def test_the_source_uses_no_pickle():
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 100
    assert [line for path in files if path != RESTRICTED for line in users_of_pickles(path)] == []
    assert len(list(users_of_pickles(RESTRICTED))) == 1


def step_without_pickles(schedule):
    """Who read or wrote a pickle while a pipeline was built, took a step and told its order."""
    from pipelines import build, engine_of, micro_batches

    assert zero3d.Engine, "imported: classes that torch derives from what is watched are made"

    found = []
    doors = [(pickle, "loads"), (pickle, "load"), (pickle, "dumps"), (pickle, "dump"), (pickle, "Unpickler"),
             (pickle, "Pickler"), (torch, "load"), (torch, "save"), (c10d, "_object_to_tensor"),
             (c10d, "_tensor_to_object")]  # fmt: skip

    def watch(name, door):
        def watched(*args, **kwargs):
            found.append(f"{name}\n{''.join(traceback.format_stack(limit=8))}")
            return door(*args, **kwargs)

        return watched

    with ExitStack() as stack:
        for module, name in doors:
            stack.enter_context(mock.patch.object(module, name, watch(name, getattr(module, name))))
        engine = engine_of(build("net", 4), zero3d.Mesh(pp=2), schedule=schedule)
        losses = [float(engine.train_batch(micro_batches(step, 0))) for step in range(2)]
        order = engine.pipeline.recorded_order()
    return found, losses, [len(order[rank]) for rank in order]


def test_a_pipeline_is_built_and_steps_without_a_pickle(ranks):
    for schedule in ("1f1b", "zbv"):
        for found, losses, actions in ranks(2, step_without_pickles, schedule):
            assert found == []
            assert losses[0] > 0
            assert min(actions) > 0
