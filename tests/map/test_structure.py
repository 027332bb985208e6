"""The architecture as tests: import directions, size of the core, one reduce-scatter call site, true tables."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "zero3d"

# Packages from the ground up; one may import its own layer and those below it. The rule of ARCHITECTURE.md.
LAYERS = {
    "ground": (
        "errors",
        "reading",
        "nested",
        "rng",
        "precision",
        "memory",
        "distributed",
        "shards",
        "spec",
        "config",
        "watchdog",
    ),
    "core": ("zero", "account"),
    "parallel": (
        "models",
        "activations",
        "data",
        "tensor_parallel",
        "expert_parallel",
        "pipeline",
        "checkpoint",
        "optim",
    ),
    "engine": ("engine", "setup"),
    "tools": ("plan", "sim", "train", "page", "doctor", "integrations", "cli"),
}
LEVEL = {name: level for level, names in enumerate(LAYERS.values()) for name in names}


def modules():
    for path in sorted(SRC.rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__")
        yield name, path


def package_of(name):
    return name.split(".")[0]


class Facts(NamedTuple):
    """What a file has; its tree is not kept, for every collection of garbage would go through it."""

    imports: list  # statements at run time: TYPE_CHECKING blocks do not count
    at_once: list  # of these, those that importing the file runs
    functions: list  # (name, parameters)
    reductions: list  # lines of calls
    containers: list  # (target, statement) of lists, dicts and sets assigned at the top


@cache
def facts(path):
    """Those of a file: it is read, parsed and walked once."""
    text = path.read_text()
    tree = ast.parse(text)
    walked = list(ast.walk(tree))
    hidden = {
        id(inner)
        for node in walked
        if "TYPE_CHECKING" in text and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    return Facts(
        [node for node in walked if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in hidden],
        list(imported_at_once(tree)),
        [(node.name, parameters(node)) for node in walked if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))],
        [node.lineno for node in walked if "_reduce_scatter" in text and isinstance(node, ast.Call) and reduces(node)],
        [(ast.unparse(node.targets[0]), ast.unparse(node)) for node in tree.body
         if isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.Dict, ast.Set))],
    )  # fmt: skip


def parameters(node):
    taken = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return [a.arg for a in taken if a.arg not in ("self", "cls")]


def reduces(call):
    return "_reduce_scatter" in (ast.unparse(call.func), *map(ast.unparse, call.args))


@cache
def imports(path):
    """zero3d modules imported at run time (TYPE_CHECKING blocks do not count)."""
    return frozenset(imported(facts(path).imports))


def imported(nodes):
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("zero3d"):
            base = node.module.removeprefix("zero3d").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if is_module(inner) else base
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("zero3d.") for a in node.names if a.name.startswith("zero3d."))


@cache
def is_module(name):
    path = SRC / Path(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def arrows():
    """(package, package it imports from, the module that does): between packages, at run time."""
    for name, path in modules():
        for target in imports(path):
            if name and target and package_of(name) != package_of(target):
                yield package_of(name), package_of(target), name


def test_every_package_has_a_layer_and_imports_from_its_own_and_those_below():
    assert {"zero", "engine", "cli"} <= {package for package, *_ in arrows()}
    for package, target, name in arrows():
        assert package in LEVEL, f"{package} is in no layer: add it to LAYERS and to ARCHITECTURE.md"
        assert LEVEL[target] <= LEVEL[package], f"{name} imports from {target}, which lies above it"


def test_packages_import_each_other_in_no_cycle():
    graph = {package: set() for package in LEVEL}
    for package, target, _ in arrows():
        graph[package].add(target)
    order = []
    while graph:
        free = [package for package, targets in graph.items() if not targets & graph.keys()]
        assert free, f"these import each other: {graph}"
        order += free
        graph = {package: targets for package, targets in graph.items() if package not in free}


# Files whose import brings no torch; a name stands for a package with all of its files.
TORCH_FREE = (
    "errors", "reading", "config", "shards.boxes", "distributed.degrees", "distributed.ledger", "zero.stages", "zero.layout",
    "zero.tokens", "account", "activations.policy", "tensor_parallel.traffic", "pipeline.schedules", "pipeline.actions",
    "pipeline.balance", "pipeline.traffic", "pipeline.acknowledgements", "checkpoint.folders", "checkpoint.files",
    "checkpoint.fields", "checkpoint.manifest", "checkpoint.manifest_parser", "checkpoint.manifest_parts", "checkpoint.tiling",
    "checkpoint.sums", "checkpoint.integrity", "checkpoint.inventory", "checkpoint.resume_contract", "models.presets",
    "models.foreign_code", "plan", "page", "doctor", "watchdog", "integrations", "cli.ckpt", "cli.ckpt_prune", "cli.ckpt_text",
)  # fmt: skip
WITH_TORCH = {
    "plan.calibrate", "integrations.deepspeed.batches", "integrations.deepspeed.checkpoints",
    "integrations.deepspeed.drop_in", "integrations.deepspeed.engine", "integrations.deepspeed.engine_options",
    "integrations.deepspeed.lion", "integrations.deepspeed.optimizers", "integrations.deepspeed.owners", "integrations.deepspeed.questions", "integrations.deepspeed.utils",
    "integrations.deepspeed.zero",
    "integrations.lightning", "integrations.lightning.strategy", "integrations.axolotl", "integrations.axolotl.plugin",
    "integrations.accelerate", "integrations.accelerate.accelerator", "integrations.accelerate.optimizer",
    "integrations.accelerate.world",
    "integrations.checkpoints.dcp", "integrations.checkpoints.deepspeed", "integrations.checkpoints.foreign",
    "integrations.checkpoints.archives", "integrations.checkpoints.restricted", "integrations.transformers",
    "integrations.transformers.arguments", "integrations.transformers.seams", "integrations.transformers.trainer",
}  # fmt: skip


def imported_at_once(tree):
    """Modules that importing a file imports: what stands in no function and in no TYPE_CHECKING block."""
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With)) and "TYPE_CHECKING" not in ast.unparse(node)[:60]:
            yield from imported_at_once(node)


def test_files_without_torch_import_files_without_torch():
    brings_torch, needs = set(), {}
    for name, path in modules():
        nodes = facts(path).at_once
        outer = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names} | {
            n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)
        }
        if any(each.split(".")[0] in ("torch", "transformers") or each == "safetensors.torch" for each in outer):
            brings_torch.add(name)
        needs[name] = set(imported(nodes)) - {name}
    grown = True
    while grown:
        more = {name for name, targets in needs.items() if targets & brings_torch} - brings_torch
        brings_torch |= more
        grown = bool(more)
    declared = {
        name for name in needs for free in TORCH_FREE if name == free or name.startswith(f"{free}.")
    } - WITH_TORCH
    assert len(declared) > len(TORCH_FREE)
    assert declared & brings_torch == set()
    assert brings_torch >= WITH_TORCH


def test_few_files_lie_at_the_root():
    assert len(list(SRC.glob("*.py"))) <= 6


def test_there_is_no_import_cycle():
    graph = {name: set(imports(path)) - {name} for name, path in modules()}
    state = {}

    def visit(name, trail):
        assert state.get(name) != "open", f"cycle: {' -> '.join([*trail, name])}"
        if name in state or name not in graph:
            return
        state[name] = "open"
        for target in graph[name]:
            visit(target, [*trail, name])
        state[name] = "done"

    for name in graph:
        visit(name, [])


def test_the_core_knows_no_engine_config_or_transformers():
    assert any(name.startswith("zero.") for name, _ in modules())
    for name, path in modules():
        if name.startswith("zero"):
            text = path.read_text()
            assert not re.search(
                r"import transformers|from transformers|zero3d\.(engine|config|models|setup|train|cli)", text
            ), name


def code_lines(path):
    """Lines that hold code: no blanks, comments or docstrings."""
    text = path.read_text()
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    kept = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            kept -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(kept)


def core():
    """The modules of zero/ and all that they need, directly or not; config, which they do not, is no ground of theirs."""
    graph = {name: imports(path) for name, path in modules()}
    needed, found = [name for name in graph if package_of(name) == "zero"], set()
    while needed:
        name = needed.pop()
        if name in graph and name not in found:
            found.add(name)
            needed += graph[name]
    return found


def test_the_core_needs_the_ground_alone():
    """zero/ with exact/, and what it needs from the ground."""
    assert {"zero", "memory"} <= {package_of(name) for name in core()} <= {"zero", *LAYERS["ground"]} - {"config"}


OF_MANY_OPTIONS = {("engine.engine", "__init__"), ("optim.muon_optimizer", "muon")}  # by name, each with a default


def test_functions_take_few_parameters():
    named = {(name, function) for name, path in modules() for function, _ in facts(path).functions}
    assert named >= OF_MANY_OPTIONS
    for name, path in modules():
        for function, taken in facts(path).functions:
            assert len(taken) <= 8 or (name, function) in OF_MANY_OPTIONS, f"{name}.{function}: {taken}"


def test_no_two_test_files_have_the_same_name():
    """Two of one name cannot be collected in one run: pytest imports them as modules of that name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_there_is_one_reduce_scatter_call_site():
    calls = [f"{name}:{line}" for name, path in modules() for line in facts(path).reductions]
    assert len(calls) == 1, calls
    assert calls[0].startswith("distributed.algorithms")


def test_only_few_modules_read_the_environment():
    assert {"distributed.mesh", "distributed.determinism", "zero.unit"} <= {name for name, _ in modules()}
    for name, path in modules():
        if not name.startswith(
            ("distributed.mesh", "distributed.determinism", "doctor", "cli", "integrations.accelerate.world")
        ):
            assert "os.environ" not in path.read_text(), name


def test_no_module_level_mutable_state_in_the_core():
    assert any(name.startswith("zero.") for name, _ in modules())
    for name, path in modules():
        if name.startswith("zero"):
            for target, statement in facts(path).containers:
                assert target.isupper(), f"{name}: {statement[:60]}"


def test_no_python_file_is_empty():
    assert all(path.read_text().strip() for _, path in modules())


COMMANDS = [["--help"], ["plan", "--theory", "--params", "7.5e9", "--gpus", "64"],
            ["config", "schema"], ["compare", "--help"], ["launch", "k8s", "pyproject.toml"]]  # fmt: skip


def test_help_theory_compare_and_launch_import_no_torch():
    """In one process, one after the other."""
    script = (
        f"import sys\nfrom zero3d.cli.main import main\nfor command in {COMMANDS!r}:\n"
        "    sys.argv = ['zero3d', *command]\n"
        "    try:\n        main()\n    except SystemExit as end:\n        assert not end.code, (command, end.code)\n"
        "    assert 'torch' not in sys.modules, command"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_public_names_are_few_and_resolve():
    import zero3d

    assert len(zero3d.__all__) <= 16
    assert all(getattr(zero3d, name) for name in zero3d.__all__)


def where_is_rows():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## Where is") :]
    return re.findall(r"^\| (.+?) \| `([\w/.]+\.\w+)(?:::([\w.]+))?` \|$", table, flags=re.MULTILINE)


def test_every_where_is_row_resolves():
    rows = where_is_rows()
    assert len(rows) >= 15
    for question, file, symbol in rows:
        path = ROOT / file
        assert path.exists(), f"{question}: {file} does not exist"
        if symbol:
            tree = ast.parse(path.read_text())
            scope = tree.body
            for part in symbol.split("."):
                found = [n for n in scope if getattr(n, "name", None) == part or part in assigned(n)]
                assert found, f"{question}: {symbol} is not in {file}"
                scope = getattr(found[0], "body", [])


def test_the_files_that_answer_a_readers_questions_are_there():
    questions = yaml.safe_load((ROOT / "tests" / "map" / "questions.yaml").read_text())
    assert len(questions) == 20
    missing = [file for each in questions for file in each["files"] if not (SRC / file).is_file()]
    assert not missing


def assigned(node):
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)]


if __name__ == "__main__":
    for name, files in {"src": [path for _, path in modules()], "core": [path for name, path in modules() if name in core()],
                        "tests": list((ROOT / "tests").rglob("*.py"))}.items():  # fmt: skip
        print(f"{name}: {sum(map(code_lines, files)):,} lines of code in {len(files)} files")
