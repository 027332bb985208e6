"""A simulated rank beside a real one on gloo, under the same microscope: every byte at every instant, and the ledger."""

import pytest

from zero3d.config import load, to_dict
from zero3d.sim.request import Request
from zero3d.sim.simulate import in_own_process


def real(tree):
    """One rank: the step that a simulated one makes, with weights, values and peers."""
    from zero3d.config import resolve_batch
    from zero3d.data.masking import forward_options
    from zero3d.hf.open import open_model
    from zero3d.sim.observe import blank_batches, observe
    from zero3d.sim.replay import peak_of, timeline_of
    from zero3d.sim.result import to_json
    from zero3d.train.build import build_engine, open_mesh

    config = load(tree)
    mesh = open_mesh(config)
    batch = resolve_batch(config.train, mesh.dp)
    opened = open_model(config.model, config.seed)
    options = forward_options(opened.module)
    seen = observe(
        lambda: build_engine(config, opened, mesh, batch.accumulate, 5),
        lambda: blank_batches(batch.accumulate, (batch.micro_batch, config.data.length), False, options),
    )
    found = {"states": seen.states, "sent": seen.sent, "did": seen.did, "work": seen.work}
    plain = {name: [to_json(each) for each in rows] for name, rows in found.items()}
    return plain | {"peak": to_json(peak_of(seen.log)), "timeline": to_json(timeline_of(seen.log))}


@pytest.mark.parametrize("overrides", [
    ["zero.stage=3"],
    *(pytest.param(words, marks=pytest.mark.long) for words in (
        ["zero.stage=0"], ["zero.stage=1", "precision=fp32"], ["zero.stage=2", "activations=full"],
        ["zero.stage=1", "mesh.tp=2", "mesh.sequence_parallel=true"], ["zero.stage=0", "mesh.pp=2"],
    )),
])  # fmt: skip
def test_a_simulated_rank_has_every_byte_of_a_real_one(ranks, overrides):
    from zero3d.sim.result import to_json

    tree = to_dict(load(None, ["data.length=32", "train.accumulate=2", "data.packing=false", *overrides]))
    found = ranks(2, real, tree)
    for rank in (0,) if "mesh.pp=2" not in overrides else (0, 1):
        simulated = to_json(in_own_process(Request(tree, rank, 2, "gloo", whole=True)))
        for part, wanted in found[rank].items():
            got = simulated[part]
            if part == "sent" and "mesh.pp=2" in overrides:  # how many norms a peer has, one rank alone cannot know
                got, wanted = ([s for s in rows if s["op"] != "exchange"] for rows in (got, wanted))
            assert list(got) == list(wanted) if isinstance(got, tuple) else got == wanted, part
