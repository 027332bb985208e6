"""Say what no published run has of a plan: its card, what is off the device, its kinds of layers. No torch.

`benchmarks/planner_accuracy.py` compares plans with published runs. A plan of something that no row of its tables has
may be as good as others, and nobody knows: so its first lines say it. CARDS and JUDGED are what that script's rows
have; its result file says the same, and a test compares both.
"""

from __future__ import annotations

from zero3d.tools.plan.margin import kind_of
from zero3d.tools.plan.spec import AS_KERNELS, IN_TORCH, ClusterSpec, ModelSpec, ParallelPlan

CARDS = ("a100-40", "a100-80", "a6000", "b200", "h100", "h100-96", "h200", "rtx-3090", "rtx-4090", "v100-32")
JUDGED = ("full", "lora", "qlora")
WORDS = {"offload": "states or inputs off the GPU", "lora": "LoRA", "qlora": "adapters on a quantised base"}
HYBRIDS = "recurrences or convolutions"
IMAGES = "images"


def not_judged(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> tuple[str, ...]:
    """Return what of a plan no published run was compared with, in words: a card's name, a kind of run, of layers."""
    kind = kind_of(model, plan)
    found = [] if cluster.gpu.name in CARDS else [cluster.gpu.name]
    found += [] if kind in JUDGED else [WORDS[kind]]
    found += [HYBRIDS] if any(mixers in model.provenance for mixers in (AS_KERNELS, IN_TORCH)) else []
    found += [IMAGES] if model.patches else []
    return tuple(found)


def judged(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> str | None:
    """Return the sentence that says so, None where rows have all of it."""
    missing = not_judged(model, cluster, plan)
    return f"no published run of {' or '.join(missing)} was compared with its plan" if missing else None
