"""Chooses how a run trains over slow links between hosts, where its file leaves that to the planner (plan.links).

hosts      of a launcher's LOCAL_WORLD_SIZE; of workers that zero3d starts, of per_node in plan.cluster
ways       tools/plan/links.py: those that fit, by the seconds of a step; a simpler one where another is worth little
"""

from __future__ import annotations

from zero3d.config import Config
from zero3d.config.keys import KEYS, value_of
from zero3d.config.sections import GIVEN, NARROW
from zero3d.errors import ConfigError
from zero3d.spec.declaring import in_file
from zero3d.tools.cli.planned_batch import cluster_of_these, model_of
from zero3d.tools.page.plan_text import links_lines
from zero3d.tools.plan.emit import plan_of
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import read_file
from zero3d.tools.plan.links import SETTINGS, as_words, crosses, fastest, ways
from zero3d.tools.plan.margin import margin_for, usable
from zero3d.tools.plan.network import CPU


def planned_links(config: Config, ranks: int, local: int | None) -> tuple[list[str], list[str]]:
    """Return settings for so many ranks as words of a command line, and why, in lines. Raises ConfigError.

    local  ranks of a host, where a launcher says so
    """
    asked = f"plan.links={config.plan.links}"
    given = {key: value_of(config, key) for key in SETTINGS}
    said = [in_file(key, value) for key, value in given.items() if value != KEYS[key].default]
    if said:
        raise ConfigError(
            f"{asked} chooses {said[0].partition('=')[0]}, and the run has {said[0]}: give only one of them."
        )
    assert config.plan.cluster is not None  # config/problems.py
    inside = local or int(read_file(config.plan.cluster).get("per_node", ranks))
    words = [f"plan.links={GIVEN}"]
    if ranks <= inside or ranks % inside:
        return words, [
            f"{asked}: {ranks} ranks are on one host, or hosts have unequal numbers of ranks; nothing is changed"
        ]
    hardware, plan = (
        cluster_of_these(config, ranks, ranks // inside, asked, f"plan.links={GIVEN}"),
        plan_of(config, ranks),
    )
    if not crosses(plan, hardware):
        return words, [f"{asked}: no data-parallel axis has several ranks on several hosts; nothing is changed"]
    model = model_of(config, hardware.gpu.name != CPU)
    found = ways(model, plan, hardware, evaluate)
    limit = usable(hardware.gpu.memory, margin_for(None, model, plan).share)
    chosen = fastest(found, hardware, limit, config.plan.links == NARROW)
    settings = as_words(chosen.settings)
    took = f"{asked}: {chosen.name}: {' '.join(settings) or 'nothing is changed'}"
    return words + settings, [*links_lines(found, hardware, limit), took]
