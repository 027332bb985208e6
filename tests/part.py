"""A part of the long tests, chosen by a commit's hash: another one for every commit, the same one for the same.

The hash puts all cases into an order; those that still fit are taken until the part is full: a limit by
numbers does not depend on what else the machine does. What a case takes is the mean of its file, measured
on two busy cores. To measure all:

    python -m pytest -m long --junitxml=long.xml && python tests/part.py long.xml
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256
from statistics import mean
from xml.etree import ElementTree

BUDGET = 120.0  # seconds; with collection and imports a part should stay below four minutes
UNMEASURED = 20.0
# of a case; less for test_benchmark_optimizers, test_exact, test_figures_again, test_gpu_check and test_llava_demo, so
# that they get a turn
SECONDS = {
    "tests/parity/test_averages.py": 6.0,
    "tests/parity/test_axolotl.py": 5.0,
    "tests/parity/test_benchmark_mesh.py": 5.0,
    "tests/parity/test_blank_images.py": 2.0,
    "tests/parity/test_checkpoint.py": 0.7,
    "tests/parity/test_checkpoint_damage.py": 1.8,
    "tests/parity/test_compare_runs.py": 30.0,
    "tests/parity/test_course.py": 8.0,
    "tests/parity/test_deferred_updates.py": 3.0,
    "tests/parity/test_deepspeed_itself.py": 45.0,
    "tests/parity/test_demo.py": 12.0,
    "tests/parity/test_evaluations.py": 4.0,
    "tests/parity/test_exact.py": 45.0,
    "tests/parity/test_examples.py": 46.0,
    "tests/parity/test_expert_load.py": 5.0,
    "tests/parity/test_experts.py": 20.0,
    "tests/parity/test_experts_native.py": 3.0,
    "tests/parity/test_benchmark_experts.py": 30.0,
    "tests/parity/test_benchmark_optimizers.py": 40.0,
    "tests/parity/test_figures_again.py": 30.0,
    "tests/parity/test_kept_inputs.py": 10.0,
    "tests/parity/test_llava_demo_run.py": 45.0,
    "tests/parity/test_lightning.py": 6.0,
    "tests/parity/test_lora.py": 0.7,
    "tests/parity/test_mesh_checkpoint.py": 5.0,
    "tests/parity/test_mesh_contract.py": 45.0,
    "tests/parity/test_mesh_lora.py": 9.0,
    "tests/parity/test_mesh_refusals.py": 1.0,
    "tests/parity/test_muon.py": 3.0,
    "tests/parity/test_offload.py": 20.0,
    "tests/parity/test_offload_bytes.py": 10.0,
    "tests/parity/test_offload_checkpoint.py": 10.0,
    "tests/parity/test_offload_moments.py": 10.0,
    "tests/parity/test_offload_refused.py": 1.0,
    "tests/parity/test_one_rank.py": 0.3,
    "tests/parity/test_pipeline.py": 10.0,
    "tests/parity/test_pipeline_far.py": 20.0,
    "tests/parity/test_pipeline_oracle.py": 35.0,
    "tests/parity/test_plan_against_simulation.py": 12.0,
    "tests/parity/test_plan_experts.py": 6.0,
    "tests/parity/test_plan_memory.py": 3.0,
    "tests/parity/test_post_mortem.py": 25.0,
    "tests/parity/test_replay.py": 2.0,
    "tests/parity/test_replay_pipeline.py": 2.0,
    "tests/parity/test_resume.py": 7.5,
    "tests/parity/test_saves_behind.py": 3.0,
    "tests/parity/test_slots.py": 25.0,
    "tests/parity/test_split_masters.py": 5.0,
    "tests/parity/test_stages.py": 2.4,
    "tests/parity/test_stalled_runs.py": 25.0,
    "tests/parity/test_stalls.py": 12.0,
    "tests/parity/test_states_exactly.py": 0.9,
    "tests/parity/test_stopping.py": 5.7,
    "tests/parity/test_tensor_parallel.py": 0.5,
    "tests/parity/test_tensor_traffic.py": 0.6,
    "tests/parity/test_tiled_states.py": 10.0,
    "tests/parity/test_tiling.py": 10.0,
    "tests/parity/test_train.py": 1.0,
    "tests/parity/test_train_health.py": 25.0,
    "tests/parity/test_train_input.py": 9.0,
    "tests/parity/test_train_models.py": 7.3,
    "tests/parity/test_train_outputs.py": 12.0,
    "tests/parity/test_train_sources.py": 3.0,
    "tests/parity/test_vision.py": 3.0,
    "tests/parity/test_vision_pipelines.py": 6.0,
    "tests/ranks/test_constant_buffers.py": 10.0,
    "tests/ranks/test_doctor_hosts.py": 40.0,
    "tests/ranks/test_load.py": 20.0,
    "tests/ranks/test_new_weights.py": 21.0,
    "tests/ranks/test_rendezvous.py": 54.0,
    "tests/ranks/test_restarts.py": 65.0,
    "tests/ranks/test_simulation.py": 5.3,
    "tests/ranks/test_two_hosts.py": 25.0,
    "tests/ranks/test_updates_due.py": 10.0,
    "tests/parity/test_trainer.py": 2.0,
    "tests/parity/test_trl.py": 8.0,
    "tests/unit/test_data_images.py": 0.5,
    "tests/unit/test_72b.py": 44.0,
    "tests/unit/test_checkpoint_benchmark.py": 10.0,
    "tests/unit/test_config_hostile.py": 10.4,
    "tests/unit/test_data_batches.py": 4.5,
    "tests/unit/test_data_own.py": 2.5,
    "tests/unit/test_data_tokenize.py": 12.0,
    "tests/unit/test_disk_slab.py": 1.0,
    "tests/unit/test_doctor.py": 4.0,
    "tests/unit/test_doctor_rules.py": 5.0,
    "tests/unit/test_faults.py": 40.0,
    "tests/unit/test_gpu_check.py": 45.0,
    "tests/unit/test_host_races.py": 2.5,
    "tests/unit/test_host_slots.py": 10.0,
    "tests/unit/test_odd_json.py": 3.7,
    "tests/unit/test_rounding.py": 8.0,
    "tests/unit/test_simulate.py": 9.5,
}


def part_of(names: Iterable[str], commit: str) -> set[str]:
    """The cases, as pytest names them, that a commit's hash chooses."""
    left, chosen = BUDGET, set()
    for name in sorted(names, key=lambda name: sha256(f"{commit} {name}".encode()).digest()):
        cost = SECONDS.get(name.partition("::")[0], UNMEASURED)
        if cost <= left:
            left -= cost
            chosen.add(name)
    return chosen


def measured(report: str) -> dict[str, float]:
    """Mean seconds of a file's cases, from pytest's JUnit report."""
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        found[case.get("classname", "").replace(".", "/") + ".py"].append(float(case.get("time", 0)))
    return {name: round(mean(times), 1) for name, times in sorted(found.items())}


if __name__ == "__main__":
    for name, seconds in measured(sys.argv[1]).items():
        print(f'    "{name}": {seconds},')
