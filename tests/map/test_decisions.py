"""A decision has one author: settings are read in spec/ and blueprint/, which decide, and elsewhere only as decisions.yaml
says, with a reason; and what decides is asked, not written again. By the syntax tree.
"""

import ast
from pathlib import Path

import pytest
import yaml
from source_facts import SRC

LISTED = yaml.safe_load((Path(__file__).parent / "decisions.yaml").read_text())
SECTIONS = ("zero", "offload")
DEGREES = ("dp", "tp", "pp", "ep", "sp", "shard", "replicate")
DECIDED = ("spec/", "blueprint/", "config/")  # where settings are declared, read from files, and decided
CORE = ("zero/", "account/", "offload/", "optim/", "engine/")  # where a degree is not to be asked for again


def files():
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(SRC).as_posix()
        if not name.startswith(DECIDED):
            yield name, ast.parse(path.read_text())


def reads_in(tree, name):
    """The keys of `zero` and `offload` that are read as attributes of a section; in the core degrees of a mesh, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            of = getattr(node.value, "attr", getattr(node.value, "id", None))
            is_section = of in SECTIONS and node.attr in KEYS[of]
            is_degree = of in ("mesh", "degrees") and node.attr in DEGREES and name.startswith(CORE)
            if is_section or is_degree:
                yield f"{of}.{node.attr}"


def keys_of(section):
    """Names of a section's keys, and of what its record makes of them."""
    return {name for name in (*section.__dataclass_fields__, *vars(section)) if not name.startswith("_")}


@pytest.fixture(scope="module")
def found():
    return {name: sorted(set(reads)) for name, tree in files() if (reads := list(reads_in(tree, name)))}


def test_settings_are_read_for_no_decision_outside_of_the_blueprint(found):
    listed = {name: sorted(entry["reads"]) for name, entry in LISTED["reads"].items()}
    assert found == listed, "ask the blueprint (Policy, UnitPlan), or give a reason in decisions.yaml"
    assert all(len(entry["why"]) > 20 for entry in LISTED["reads"].values())


def test_a_section_of_any_name_is_seen():
    tree = ast.parse("zero = plan.zero\nif zero.stage == 3 or self._options.offload.states or mesh.pp: pass")
    assert set(reads_in(tree, "engine/x.py")) == {"zero.stage", "offload.states", "mesh.pp"}
    assert set(reads_in(tree, "train/x.py")) == {"zero.stage", "offload.states"}


@pytest.mark.parametrize("decision", LISTED["authors"], ids=lambda entry: entry["decision"])
def test_a_decision_has_one_author(decision):
    """What decides is defined once; and what it is made of is called by it alone, or by those that are listed."""
    path, _, name = decision["author"].partition("::")
    defined = [node.name for node in ast.walk(ast.parse((SRC / path).read_text())) if hasattr(node, "name")]
    assert name in defined, f"{decision['author']} is not there"
    for made_of, others in decision["made of"].items():
        callers = {
            name
            for name in [each.relative_to(SRC).as_posix() for each in sorted(SRC.rglob("*.py"))]
            if made_of in calls_in(name)
        }
        assert callers == {path, *others}, f"{made_of} is called by others than {path}"


def calls_in(name):
    """Names of what a file calls, the last part of each."""
    tree = ast.parse((SRC / name).read_text())
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {getattr(each, "attr", getattr(each, "id", "")) for each in called}


def _keys():
    from zero3d.spec import Offload, Zero

    return {"zero": keys_of(Zero), "offload": keys_of(Offload)}


KEYS = _keys()
