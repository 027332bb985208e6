"""A decision has one author: settings are read in spec/ and blueprint/, which decide, and elsewhere only as decisions.yaml
says, with a reason; and what decides is asked, not written again. By the syntax tree.
"""

import ast
from functools import cache
from pathlib import Path

import pytest
import yaml
from source_facts import SRC

LISTED = yaml.safe_load((Path(__file__).parent / "decisions.yaml").read_text())
SECTIONS = ("zero", "offload")
DEGREES = ("dp", "tp", "pp", "ep", "sp", "shard", "replicate")
DECIDED = ("spec/", "blueprint/", "config/")  # where settings are declared, read from files, and decided
READERS = ("getattr", "vars", "asdict", "astuple")  # which give a key by its name, or all of them
AXES = tuple(LISTED["axes"])  # packages that a degree is for


@cache
def trees():
    """The syntax tree of each file."""
    return {path.relative_to(SRC).as_posix(): ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}


def files():
    return ((name, tree) for name, tree in trees().items() if not name.startswith(DECIDED))


def name_of(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def sections_of(node, others):
    """The sections that an expression may be, by its last name, of an underscore too, or by `others` names."""
    if isinstance(node, ast.NamedExpr):
        return sections_of(node.value, others)
    if isinstance(node, ast.IfExp):
        return sections_of(node.body, others) | sections_of(node.orelse, others)
    if isinstance(node, ast.BoolOp):
        return set().union(*(sections_of(each, others) for each in node.values))
    if isinstance(node, ast.Call) and name_of(node.func) == "replace" and node.args:
        return sections_of(node.args[0], others)
    name = name_of(node).lstrip("_")
    return {name} if name in SECTIONS else others.get(name, set())


def other_names_in(tree):
    """Other names that a file gives to sections, by assignment or as what is declared to be one: {name: sections}."""
    others = {}
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            declared = {name_of(each).lower() for each in ast.walk(node.annotation)}
            found.append((node.arg if isinstance(node, ast.arg) else name_of(node.target), declared & {*SECTIONS}))
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]
                found += [(name_of(name), sections_of(value, others)) for name, value in pairs]
        for name, sections in found:
            others.setdefault(name.lstrip("_"), set()).update(sections)
    return others


def reads_in(tree, name):
    """The keys of `zero` and `offload` that are read of a section, * for all, and degrees of a mesh."""
    others = other_names_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            of = name_of(node.value)
            if of in ("mesh", "degrees") and node.attr in DEGREES and not name.startswith(AXES):
                yield f"{of}.{node.attr}"
            if node.attr == "__dict__":
                yield from (f"{section}.*" for section in sections_of(node.value, others))
            yield from (f"{of}.{node.attr}" for of in sections_of(node.value, others) if node.attr in KEYS[of])
        if isinstance(node, ast.Call) and name_of(node.func) in READERS and node.args:
            key = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else "*"
            yield from (f"{section}.{key}" for section in sections_of(node.args[0], others))


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


def test_packages_that_a_degree_is_for_read_some():
    reads = {name: set(reads_in(tree, "")) for name, tree in trees().items()}
    for package in AXES:
        of = {read.partition(".")[0] for name, found in reads.items() if name.startswith(package) for read in found}
        assert of & {"mesh", "degrees"}, f"{package} reads no degree of a mesh"


def test_a_section_of_any_name_is_seen():
    tree = ast.parse("zero = plan.zero\nif zero.stage == 3 or self._options.offload.states or mesh.pp: pass")
    assert set(reads_in(tree, "engine/x.py")) == {"zero.stage", "offload.states", "mesh.pp"}
    assert set(reads_in(tree, "distributed/x.py")) == {"zero.stage", "offload.states"}


@pytest.mark.parametrize(("written", "read"), [
    ("settings = plan.zero\nsettings.stage", "zero.stage"),
    ("a, b = plan.zero, plan.offload\nb.params", "offload.params"),
    ("self._settings = options.zero\nself._settings.stage", "zero.stage"),
    ("self._zero = settings\nself._zero.stage", "zero.stage"),
    ("(z := plan.zero).stage\nz.exact", "zero.stage zero.exact"),
    ("def f(settings: Zero | None): settings.stage", "zero.stage"),
    ("away: Offload = placed()\naway.params", "offload.params"),
    ("away = replace(plan.offload, executor='auto')\naway.params", "offload.params"),
    ("away = plan.offload if plan else Offload()\n(away or None).params", "offload.params"),
    ("getattr(plan.zero, 'stage')", "zero.stage"),
    ("getattr(plan.zero, name), vars(plan.offload), plan.zero.__dict__", "zero.* offload.*"),
    ("settings = plan.mesh\nsettings.stage, plan.zero, f(plan.zero), replace(plan.zero, stage=3)", ""),
])  # fmt: skip
def test_a_section_is_seen_under_other_names(written, read):
    assert set(reads_in(ast.parse(written), "tools/plan/x.py")) == set(read.split())


@pytest.mark.parametrize("decision", LISTED["authors"], ids=lambda entry: entry["decision"])
def test_a_decision_has_one_author(decision):
    """What decides is defined once; and what it is made of is called by it alone, or by those that are listed."""
    path, _, name = decision["author"].partition("::")
    defined = [node.name for node in ast.walk(trees()[path]) if hasattr(node, "name")]
    assert name in defined, f"{decision['author']} is not there"
    for made_of, others in decision["made of"].items():
        assert callers_by_name()[made_of] == {path, *others}, f"{made_of} is called by others than {path}"


def calls_in(tree):
    """Names of what a file calls, the last part of each, as it was imported."""
    imports = [each for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for each in node.names]
    names = {each.asname: each.name for each in imports if each.asname}
    called = (name_of(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {names.get(name, name) for name in called}


@cache
def callers_by_name():
    """The files that call each name."""
    callers = {}
    for name, tree in trees().items():
        for called in calls_in(tree):
            callers.setdefault(called, set()).add(name)
    return callers


def test_a_call_under_another_name_is_seen():
    tree = ast.parse("from zero3d.blueprint.unit import decide as of, Kind\nof(Kind(1)).widened(policy.resolve(2))")
    assert calls_in(tree) == {"decide", "Kind", "widened", "resolve"}


def _keys():
    from zero3d.spec import Offload, Zero

    return {"zero": keys_of(Zero), "offload": keys_of(Offload)}


KEYS = _keys()
