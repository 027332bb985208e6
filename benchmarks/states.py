"""Model states of each pipeline stage of a configuration, as JSON: `python benchmarks/states.py CONFIG`.

The planner computes them with the engine's own layout; a test builds and steps examples/72b_128gpu.yaml without memory
and finds the same bytes.
"""

from __future__ import annotations

import json
import sys

from zero3d.config import load
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.states import states
from zero3d.tools.sim.model_spec import open_spec

LENGTH = 2048  # states do not depend on it


def main() -> int:
    """Print bytes by pipeline stage."""
    config = load(sys.argv[1])
    mesh, path = config.mesh, config.model.path
    degrees = {"dp": mesh.dp or 1, "tp": mesh.tp or 1, "pp": mesh.pp or 1}
    plan = ParallelPlan(**degrees, stage=config.zero.stage, accumulate=degrees["pp"], precision=config.precision)
    model = open_spec(path, LENGTH)
    print(json.dumps([[int(value) for value in states(model, plan, stage).states] for stage in range(plan.pp)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
