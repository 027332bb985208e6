"""LoRA over frozen matrices that tp ranks cut and pipeline stages share out: like one process, and the same bits in
every stage of ZeRO."""

import pytest
from meshes import CLIP, STEPS, engine_of, mesh_of, model_of, oracle, step, world_of
from models import LiftCasts, bits
from pipelines import weights_of

LOSS = "model's"


def trained(family, shape, stages, options):
    """For every stage of ZeRO: (losses and norms, a hash of this rank's weights)."""
    found = []
    with LiftCasts():
        for stage in stages:
            model = model_of(family, shape, lora=True)
            engine = engine_of(model, mesh_of(shape), stage=stage, release="every_use", **options)
            before = weights_of(engine)
            steps = [step(engine, number) for number in range(STEPS)]
            after = weights_of(engine)
            changed = {name for name, weight in after.items() if not weight.equal(before[name])}
            assert changed == {name for name in after if "lora_" in name}
            found.append((steps, bits(after.values())))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("family", "shape", "stages", "options"), [
    ("llama", (1, 2, 2), (3,), {"schedule": "1f1b"}),
    pytest.param("llama", (1, 2, 2), (0, 3), {"schedule": "1f1b"}, marks=pytest.mark.long),
    pytest.param("llama", (1, 2, 2), (0, 3), {"schedule": "zbv", "sequence_parallel": True}, marks=pytest.mark.long),
    pytest.param("gpt2", (1, 2, 2), (0, 1, 2, 3), {"schedule": "interleaved"}, marks=pytest.mark.long),
    pytest.param("qwen3", (2, 2, 2), (1, 2, 3), {"schedule": "zero-bubble"}, marks=pytest.mark.long),
])  # fmt: skip
def test_lora_on_all_axes_equals_one_process_and_stages_are_bitwise_equal(ranks, family, shape, stages, options):
    wanted = oracle(family, shape, LOSS, lora=True)
    assert wanted[0][1] > CLIP
    everywhere = ranks(world_of(shape), trained, family, shape, stages, options)
    for found in everywhere:
        assert all(each == found[0] for each in found)
        for here, there in zip(found[0][0], wanted, strict=True):
            assert here == pytest.approx(there, rel=1e-10)
