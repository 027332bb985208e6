"""A step of reinforcement learning by formula: what is streamed, by which link, and what the step is split into."""

import json
from dataclasses import replace

import pytest

from zero3d.errors import ConfigError
from zero3d.tools.cli.main import main
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.rollout import ACROSS, INSIDE, SHARED, Rollout, split, synchronisation
from zero3d.tools.plan.shapes import of_params
from zero3d.tools.plan.spec import ParallelPlan

MODEL = of_params(7e9, 2048)


def planned(**options):
    plan = ParallelPlan(dp=8, stage=3, **options)
    return plan, cluster("h100", plan.world)


def test_a_stream_has_all_weights_once_in_the_dtype_of_training():
    for options, width in (({}, 2), ({"precision": "fp32"}, 4), ({"tp": 2}, 2), ({"pp": 2}, 2)):
        assert synchronisation(MODEL, *planned(**options)).nbytes == width * MODEL.params


def test_the_slower_of_gathers_and_link_counts():
    plan, machine = planned()
    seconds = synchronisation(MODEL, plan, machine).seconds
    assert seconds[INSIDE] < seconds[SHARED]
    assert seconds[SHARED] == pytest.approx(2 * MODEL.params / machine.host_link)
    assert seconds[ACROSS] > 2 * MODEL.params / machine.across.bandwidth
    gathered = synchronisation(MODEL, plan.replace(stage=2), machine).seconds
    assert gathered[INSIDE] <= seconds[INSIDE]
    assert gathered[ACROSS] == seconds[ACROSS]


def test_sampling_reads_weights_for_every_token_and_grows_with_completions_once_operations_take_longer():
    plan, machine = planned()
    estimate = evaluate(MODEL, machine, plan)

    def of(prompts, new=100):
        return split(MODEL, plan, machine, estimate, Rollout(prompts, 8, new))

    few, many = of(1), of(10_000)
    assert few.sampling == pytest.approx(100 * 2 * MODEL.params / machine.gpu.bandwidth, rel=0.01)
    assert many.sampling > 10 * few.sampling
    assert few.sampler == 1
    sequences = plan.rows * plan.micro_batch * plan.accumulate
    assert many.steps == -(-80_000 // sequences)
    assert many.training == many.steps * estimate.seconds.mid


def test_a_model_without_attention_samples_without_a_cache():
    plan, machine = planned()
    bare, estimate = replace(MODEL, heads=0, kv_heads=0), evaluate(MODEL, machine, plan)
    rollout = Rollout(1, 8, 100)
    assert (
        split(bare, plan, machine, estimate, rollout).sampling < split(MODEL, plan, machine, estimate, rollout).sampling
    )


@pytest.mark.parametrize("text", ["", "prompts=64", "prompts=64,samples=0,new=3", "prompts=64,samples=16,new=x", "prompts=1,samples=1,new=1,more=1"])  # fmt: skip
def test_what_is_no_rollout_is_refused(text):
    with pytest.raises(ConfigError, match="type whole numbers from 1, as in --rl prompts=64,samples=16,new=1024"):
        Rollout.of(text)


def test_explain_has_it_and_a_search_says_where_it_is(capsys):
    words = ["plan", "explain", "model.path=demo", "mesh.dp=2", "--gpu", "h100", "--gpus", "2", "--rl"]
    assert main([*words, "prompts=8,samples=4,new=16"]) == 0
    said = capsys.readouterr().out
    assert "A step of reinforcement learning: 8 prompts x 4 completions of 16 tokens" in said
    assert "between hosts" in said
    assert main([*words, "prompts=8,samples=4,new=16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rl"]
    assert found["streaming"]["nbytes"] > 0
    assert set(found["streaming"]["seconds"]) == {SHARED, INSIDE, ACROSS}
    assert main(["plan", "demo", "--rl", "prompts=8,samples=4,new=16"]) != 0
    assert "zero3d plan explain train.yaml --gpu h100 --rl" in capsys.readouterr().err
