"""Runs on which the words of `zero3d models TYPE` rest: what a tiny model of a type does where they say yes.

    trained   stage 3 on two ranks, which have a micro-batch each
    packing   the documents of a row, beside each in a row of its own
    tp, pp, sp, ep   two ranks
    lora      adapters by default targets, stage 3 on two ranks; every adapter has a gradient

Two steps by SGD: their losses and norms, and the loss after them, must be those of one rank. A word "no" has the
reason with which an engine refuses.

    python tests/words.py [TYPE ...]      what differs, of all types by default
"""

import re
import sys
import warnings

import tiny_types
import torch

import zero3d
from zero3d.config import Lora
from zero3d.errors import Zero3dError
from zero3d.models.adapters import add_adapters
from zero3d.models.bases import sees_images
from zero3d.models.open import Opened
from zero3d.models.packing import check_packing, position_rows, with_position_rows
from zero3d.tools.vision import tiny
from zero3d.train.setup.support import Row, support_of

ASKED = ("packing", "tp", "pp", "sp", "ep", "lora")
BESIDE = {"packing": "apart", "lora": "lora alone"}  # runs that are beside another one
MESHES = {"trained": {"dp": 2}, "lora": {"dp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"ep": 2}, "sp": {"sp": 2}}
LENGTHS = (11, 7, 6)  # of a row's documents
RATE, SECONDS = 0.1, 60.0
NEAR = 1e-5  # of a number: models compute some things in fp32
IN_FP32 = ("emu3", "inkling2", "inkling2_text", "xglm")  # which have images' codes, experts or masks in no other dtype
ADAPTERS = "lora_"


def every_type():
    return sorted({*tiny_types.types(), *tiny.types()})


def model_of(kind):
    """A tiny model of a type, of images and text where it takes both."""
    return tiny.tiny_model(kind) if kind in tiny.types() else tiny_types.model(kind)


def batches(model, kind):
    """Two steps of two micro-batches, with images where the type takes some."""
    generator = torch.Generator().manual_seed(5)
    if kind in tiny.types() and sees_images(model):
        return [[tiny.micro_batch(model, generator) for _ in range(2)] for _ in range(2)]
    return [[_ids(generator, (2, 13)) for _ in range(2)] for _ in range(2)]


def _ids(generator, shape):
    ids = torch.randint(tiny.FIRST, tiny.FIRST + tiny.TEXTS, shape, generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def documents(model):
    """Two steps of documents of text, with what tells images' tokens from others where a forward wants that."""
    generator = torch.Generator().manual_seed(6)
    steps = [[_ids(generator, (1, length)) for length in LENGTHS] for _ in range(2)]
    return [[document | tiny._kinds_of_tokens(model, document["input_ids"]) for document in step] for step in steps]


def in_a_row(model, each):
    """A micro-batch of one row with all documents, as a run packs them."""
    row = {name: torch.cat([document[name] for document in each], 1) for name in each[0]}
    row["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    row["labels"] = row["labels"].where(row["position_ids"] > 0, -100)
    return with_position_rows(row, position_rows(model))


def sgd(params):
    return torch.optim.SGD(params, lr=RATE)


def run(kind, word):
    """On this rank: (losses and norms, what has no gradient), or the engine's error."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(7)
    model = model_of(kind)
    try:
        return _trained(model, kind, word)
    except Zero3dError as error:
        return str(error)


def _trained(model, kind, word):
    steps = documents(model) if word in ("packing", "apart") else batches(model, kind)
    if word == "packing":
        check_packing(model)
        steps = [[in_a_row(model, step)] for step in steps]
    if word.startswith("lora"):
        _adapt(model)
    for module in model.modules():
        if hasattr(module, "running_mean"):  # of BatchNorm, which are of rank 0's rows (Emu3)
            module.momentum = 0.0
    mesh = zero3d.Mesh(**MESHES.get(word, {}))
    stage, rows = 3 if mesh.dp > 1 else 2, mesh.dp // mesh.sp  # ranks that share sequences have the same ones
    engine = zero3d.Engine(
        model,
        mesh=mesh,
        stage=stage,
        precision="fp32" if kind in IN_FP32 else "fp64",
        optimizer=sgd,
        accumulate=len(steps[0]) // rows,
    )
    mine = slice(mesh.row, None, rows)
    before, found = weights(engine), []
    for step in steps:
        found += [float(engine.train_batch(step[mine])), float(engine.last_step.grad_norm)]
    found.append(float(engine.evaluate(steps[0][mine])))
    idle = [name for name, p in weights(engine).items() if torch.equal(p, before[name])]
    engine.close()
    return found, idle


def _adapt(model):
    add_adapters(Opened(model, None), Lora(rank=2), 0)
    generator = torch.Generator().manual_seed(8)
    for name, p in model.named_parameters():
        if ADAPTERS in name:  # zeros of B would keep A from having a gradient
            p.data += 0.05 * torch.randn(p.shape, generator=generator)


def weights(engine):
    with engine.full_params():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def words_of(kind):
    """The rows of `zero3d models` that a run can try, of a tiny model, by what is run; that it trains is said of any."""
    rows = {row.name: row for row in support_of(model_of(kind)).rows if row.supported is not None}
    found = {"trained": Row("trained", True, "")} | {word: rows[word] for word in ASKED if word in rows}
    if "of text alone: " in found["packing"].what:  # which is refused, and runs pack text here
        del found["packing"]
    return found


def differences(kind, words, run_on):
    """What is not as the words say. A rank that does not come back in time has failed.

    run_on  as `ranks` of the tests: (world, case, *args, timeout=, group_timeout=)
    """
    [alone] = run_on(1, run, kind, "alone", timeout=SECONDS)
    if isinstance(alone, str):
        return [f"one rank: {alone}"]
    return [said for word, row in words.items() for said in _differences(kind, word, row, alone, run_on)]


def _differences(kind, word, row, alone, run_on):
    wanted, world = alone[0], 1 if word == "packing" else 2
    try:
        if word in BESIDE and row.supported:
            [(wanted, _)] = run_on(1, run, kind, BESIDE[word], timeout=SECONDS)
        found = run_on(world, run, kind, word, timeout=SECONDS, group_timeout=SECONDS / 2)
    except AssertionError as error:  # of the pool: a rank raised, or died, or gave no answer
        return [f"{word} {_said(row)}: {str(error)[-800:]}"]
    if errors := sorted({each for each in found if isinstance(each, str)}):
        found = [" And: ".join(errors)]  # one rank's may be that another one has left
    return [said for each in found for said in _difference(word, row, each, wanted, alone[1])][:1]


def _difference(word, row, found, wanted, idle):
    if isinstance(found, str):
        if row.supported:
            yield f"{word} yes, and refused: {found}"
        elif _plain(found) != _plain(row.refusal):
            yield f"{word} no: {row.refusal} But an engine says: {found}"
    elif not row.supported:
        yield f"{word} no: {row.refusal} But it ran"
    elif far := [
        f"{a:.8g} for {b:.8g}" for a, b in zip(found[0], wanted, strict=True) if not abs(a - b) <= NEAR * abs(b)
    ]:
        yield f"{word} yes, and it computes {', '.join(far)}"
    elif lost := [name for name in found[1] if ADAPTERS in name and _base(name) not in idle]:
        yield f"{word} yes, and nothing moves {lost[0]}"


def _base(name):
    """The matrix that an adapter is beside: what has no gradient in itself needs none there."""
    return f"{name.partition(f'.{ADAPTERS}')[0]}.weight"


def _said(row):
    return "yes" if row.supported else "no"


def _plain(words):
    """Without how far documents are off, which depends on the dtype of a trial."""
    return re.sub(r"\(of two, .*?\)", "", words)


def main():
    """Print what differs of types, all by default."""
    from pool import RankPool

    wrong = 0
    with RankPool() as pool:
        for kind in sys.argv[1:] or every_type():
            try:
                words = words_of(kind)
                found = differences(kind, words, pool.run)
            except Exception as error:  # of a type that is not tiny, or that plain PyTorch does not train
                print(f"{kind}: not tried ({type(error).__name__}: {' '.join(str(error).split())[-300:]})", flush=True)
                continue
            wrong += bool(found)
            print(f"{kind}: {' '.join(f'{word} {_said(row)}' for word, row in words.items())}", flush=True)
            for said in found:
                print(f"    {' '.join(said.split())}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    import words  # by this name processes of the pool find what they run

    sys.exit(words.main())
