"""The architecture as tests: import directions, size of the core, one reduce-scatter call site, true tables."""

import ast
import re
import subprocess
import sys

import yaml
from drawing import PAGE, arrows as arrows_of_parts, written
from source_facts import PARTS, ROOT, SRC, core, facts, imported, imports, is_module, modules, package_of, part_of

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
        "weights",
        "stores",
    ),
    "core": ("blueprint", "zero", "account"),
    "parallel": (
        "models",
        "activations",
        "data",
        "tensor_parallel",
        "expert_parallel",
        "sequence",
        "pipeline",
        "checkpoint",
        "optim",
        "offload",
    ),
    "engine": ("engine",),
    "runs": ("train",),
    "ways": (
        "ways",
        "ways.checkpoints",
        "ways.deepspeed",
        "ways.huggingface",
        "ways.lightning",
        "ways.axolotl",
        "ways.everywhere",
        "ways.verl",
        "ways.vllm",
    ),
    "tools": (
        "tools",
        "tools.plan",
        "tools.sim",
        "tools.advice",
        "tools.page",
        "tools.doctor",
        "tools.vision",
        "tools.cli",
    ),
}
LEVEL = {name: level for level, names in enumerate(LAYERS.values()) for name in names}


def arrows():
    """(package, package it imports from, the module that does): between packages."""
    for name, path in modules():
        for target in imports(path):
            if name and target and package_of(name) != package_of(target):
                yield package_of(name), package_of(target), name


def test_every_package_has_a_layer_and_imports_from_its_own_and_those_below():
    assert {"zero", "engine", "tools.cli"} <= {package for package, *_ in arrows()}
    for package, target, name in arrows():
        assert package in LEVEL, f"{package} is in no layer: add it to LAYERS and to ARCHITECTURE.md"
        assert LEVEL[target] <= LEVEL[package], f"{name} imports from {target}, which lies above it"


def test_the_library_imports_neither_tools_nor_ways_and_ways_import_no_tool():
    """At the top of a file, inside functions and for types."""
    assert {part_of(name) for name, _ in modules()} == set(PARTS)
    for name, path in modules():
        mine = part_of(name)
        for target in imports(path):
            assert part_of(target) in (mine, *PARTS[mine]), f"{name} imports {target}: a {mine} imports no such part"


def test_the_drawing_of_imports_is_that_of_the_source():
    assert arrows_of_parts() == {(part, target) for part in PARTS for target in PARTS[part]}
    assert written(PAGE.read_text()) == PAGE.read_text(), "type: make drawing"


def test_no_text_below_tools_and_ways_names_a_module_of_theirs():
    """A name in a string is an import, too: of import_module, of `python -m`."""
    above = {mine: [part for part in PARTS if part not in (mine, *PARTS[mine])] for mine in PARTS}
    for name, path in modules():
        named = re.findall(r"\bzero3d\.(\w+)", path.read_text())
        assert not {*named} & {*above[part_of(name)]}, f"{name} names what is above it"


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
    "errors", "reading", "config", "shards.boxes", "distributed.degrees", "distributed.ledger", "blueprint",
    "zero.tokens", "account", "activations.policy", "tensor_parallel.traffic", "pipeline.schedules", "pipeline.actions",
    "pipeline.balance", "pipeline.traffic", "pipeline.acknowledgements", "checkpoint.folders", "checkpoint.copies", "checkpoint.files", "stores",
    "checkpoint.fields", "checkpoint.manifest", "checkpoint.manifest_parser", "checkpoint.tiling", "checkpoint.frozen_base",
    "checkpoint.integrity", "checkpoint.inventory", "checkpoint.resume_contract", "models.presets",
    "models.foreign_code", "models.places", "tools.cli.kept_specs", "tools.cli.unbuilt_types", "tensor_parallel.shipped", "tools.plan", "tools.page", "tools.doctor", "watchdog", "ways", "tools.advice.planner", "tools.cli.ckpt", "tools.cli.ckpt_text",
    "tools.cli.report", "tools.cli.report_text", "tools.cli.report_page", "tools.cli.run_folder", "engine.report_view", "train.tables", "train.curve", "train.series", "spec.palette",
)  # fmt: skip
WITH_TORCH = {
    "tools.plan.calibrate", "ways.deepspeed.batches", "ways.deepspeed.checkpoints", "ways.deepspeed.client_state",
    "ways.deepspeed.drop_in", "ways.deepspeed.engine", "ways.deepspeed.engine_options",
    "ways.deepspeed.lion", "ways.deepspeed.optimizers", "ways.deepspeed.owners", "ways.deepspeed.questions", "ways.deepspeed.utils",
    "ways.deepspeed.zero", "ways.deepspeed.accelerator", "ways.deepspeed.adam", "ways.deepspeed.memory_usage", "ways.deepspeed.ops",
    "ways.lightning", "ways.lightning.averaging", "ways.lightning.checkpoints",
    "ways.lightning.strategy", "ways.axolotl", "ways.axolotl.plugin",
    "ways.huggingface.accelerate", "ways.huggingface.accelerate.accelerator", "ways.huggingface.accelerate.keywords", "ways.huggingface.accelerate.optimizer",
    "ways.huggingface.accelerate.compiled", "ways.huggingface.accelerate.meeting",
    "ways.huggingface.accelerate.world", "ways.huggingface.accelerate.gradient_reads", "ways.huggingface.accelerate.prompts", "ways.huggingface.transformers.callbacks",
    "ways.checkpoints.dcp", "ways.checkpoints.deepspeed", "ways.checkpoints.foreign",
    "ways.checkpoints.archives", "ways.checkpoints.restricted", "ways.checkpoints.plain",
    "ways.huggingface.accelerate.others", "ways.huggingface.transformers",
    "ways.huggingface.transformers.arguments", "ways.huggingface.transformers.seams", "ways.huggingface.transformers.trainer", "ways.everywhere", "ways.verl", "ways.vllm",
}  # fmt: skip


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


# What a trainer does not need: nothing but itself imports it, so that it stays outside of the engine's imports.
BESIDE_THE_ENGINE = (
    "__main__",
    "tools",
    "ways",
    "train.callstack",
    "train.comparison",
    "train.comparison_plot",
    "train.comparison_table",
    "train.host_memory",
    "train.live_tensors",
    "train.post_mortem",
)
IMPORTED_ALL_THE_SAME = {  # (what, who imports it): why
    ("train.post_mortem", "train.run"): "a run has it around itself: what it needs when memory is out is there before"
}


def is_in(name, package):
    return name == package or name.startswith(f"{package}.")


def is_beside_the_engine(name):
    return any(is_in(name, each) for each in BESIDE_THE_ENGINE)


def test_nothing_but_itself_imports_what_a_trainer_does_not_need():
    found = {
        (target, name)
        for name, path in modules()
        if not is_beside_the_engine(name)
        for target in imports(path)
        if is_beside_the_engine(target)
    }
    used = {(what, who) for what, who in IMPORTED_ALL_THE_SAME for t, n in found if is_in(t, what) and is_in(n, who)}
    excused = {(t, n) for t, n in found for what, who in used if is_in(t, what) and is_in(n, who)}
    assert found == excused
    assert used == IMPORTED_ALL_THE_SAME.keys(), "an exception that nobody needs any more"


def test_an_engine_imports_nothing_of_what_a_trainer_does_not_need_and_a_run_no_tools_or_ways():
    beside = tuple(f"zero3d.{each}" for each in BESIDE_THE_ENGINE)
    script = (
        "import sys, zero3d\nzero3d.Engine\nassert 'zero3d.engine.engine' in sys.modules\n"
        f"found = [name for name in sys.modules if name.startswith({beside!r})]\nassert not found, found\n"
        "import zero3d.train.report, zero3d.train.run\n"  # nor does a run, which trains with any planner or none
        "found = [name for name in sys.modules if name.startswith(('zero3d.tools', 'zero3d.ways'))]\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_few_files_lie_at_the_root():
    found = [path for path in SRC.glob("*.py") if path.name != "__main__.py"]  # `python -m` looks nowhere else
    assert len(found) <= 6


def test_imports_count_at_the_top_inside_functions_and_for_types_alone(tmp_path):
    file = tmp_path / "file.py"
    file.write_text(
        "from zero3d import errors\nif TYPE_CHECKING:\n    from zero3d.zero.unit import Unit\n"
        "def function():\n    import zero3d.engine.engine\n"
    )
    assert imports(file) == {"errors", "zero.unit", "engine.engine"}


def test_a_folder_of_caches_that_is_left_over_is_no_module(tmp_path, monkeypatch):
    for name in ("left", "there"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
    (tmp_path / "there" / "__init__.py").touch()
    monkeypatch.setattr("source_facts.SRC", tmp_path)
    assert [is_module(name) for name in ("left", "there")] == [False, True]


def test_no_files_import_each_other_in_a_circle_not_even_for_types():
    graph = {name: imports(path) - {name} for name, path in modules()}
    state = {}

    def visit(name, trail):
        assert state.get(name) != "open", f"circle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name in state or name not in graph:
            return
        state[name] = "open"
        for target in sorted(graph[name]):
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
                r"import transformers|from transformers|zero3d\.(engine|config|models|train|ways|tools)", text
            ), name


def test_the_core_needs_the_ground_alone():
    """zero/ with exact/, what decides for it, and what both need from the ground."""
    assert (
        {"zero", "memory"}
        <= {package_of(name) for name in core()}
        <= {"zero", "blueprint", *LAYERS["ground"]} - {"config"}
    )


OF_MANY_OPTIONS = {  # by name, each with a default
    ("engine.engine", "__init__"), ("optim.muon_optimizer", "muon"), ("spec.declaring", "key"),
}  # fmt: skip


def test_an_optimizer_has_its_name_in_its_row_and_in_files_of_its_own():
    """What asks for a name elsewhere is to ask the row (spec/optimizer.py). DeepSpeed's Muon is another one."""
    from zero3d.spec.optimizer import ADAMW, NAMES

    others = "|".join(name for name in NAMES if name != ADAMW)
    named = re.compile(rf'^(?! *>>>).*"({others})"', re.MULTILINE)  # but in an example
    found = {name for name, path in modules() if named.search(path.read_text())}
    assert "spec.optimizer" in found
    assert {package_of(name) for name in found - {"spec.optimizer"}} <= {"optim", "ways.deepspeed"}


BY_NAME = {  # (module, what compares with a tier's name or chooses by it): why
    ("tools.cli.doctor", "name in ('disk', 'host_link')"): "fields of a cluster, which the doctor measures anew",
    ("distributed.axis", "self.place == HOST"): "a torch device, which is no tier",
    ("offload.tiers", "row.name != HOST"): "the host's records are in the slab, whose parts are counted already",
    ("tools.plan.emit", "DISK"): "DeepSpeed has two tiers, with names of its own",
    ("tools.plan.emit", "HOST"): "DeepSpeed has two tiers, with names of its own",
    ("tools.plan.memory", "HOST"): "buffers and staging are memory of the host, whichever tier has the records",
    ("tools.plan.search", "tier == HOST"): "the sum of what a host's memory has beside records is shown",
    ("tools.plan.spec", "HOST"): "what a host's memory has beside records counts, too",
    ("tools.plan.tier_time", "HOST"): "an executor, which is no tier",
    ("tools.plan.time", "'host'"): "seconds that the host adds to a step, which is no tier",
    ("train.post_mortem", "row.place == HOST"): "the memory of the host that runs short",
    ("train.post_mortem", "shortage.place == HOST"): "the memory of the host that runs short",
}
OF_MACHINES = {"tools.doctor", "memory", "watchdog"}  # in whose words a host is a machine, and a disk one of its parts


def test_a_tiers_name_is_compared_in_its_row_and_in_files_of_its_own():
    """What asks for a name elsewhere is to ask the row (spec/tiers.py). Executors are named, too: device, host."""
    found = {
        (name, said)
        for name, path in modules()
        if package_of(name) not in OF_MACHINES and not name.startswith(("spec.tiers", "offload.host_", "offload.disk_"))
        for said in chosen_by_tier(ast.parse(path.read_text()))
    }
    assert found == BY_NAME.keys()


def chosen_by_tier(tree):
    """Yield comparisons with a tier's name and keys of tables that are one, as they are written."""

    def is_name(node):
        return (isinstance(node, ast.Name) and node.id in ("HOST", "DISK")) or (
            isinstance(node, ast.Constant) and node.value in ("host", "disk")
        )

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(map(is_name, ast.walk(node))) and "executor" not in ast.unparse(node):
            yield ast.unparse(node)
        elif isinstance(node, ast.Dict):
            yield from (ast.unparse(key) for key in node.keys if key is not None and is_name(key))


def test_functions_take_few_parameters():
    named = {(name, function) for name, path in modules() for function, _ in facts(path).functions}
    assert named >= OF_MANY_OPTIONS
    for name, path in modules():
        for function, taken in facts(path).functions:
            assert len(taken) <= 8 or (name, function) in OF_MANY_OPTIONS, f"{name}.{function}: {taken}"


def test_attributes_are_assigned_one_by_one_or_in_pairs():
    rows = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        and any(
            sum(isinstance(each, ast.Attribute) for each in t.elts) > 2
            for t in node.targets
            if isinstance(t, ast.Tuple)
        )
    ]
    assert not rows, f"{rows}: a line each"


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
            (
                "distributed.mesh",
                "distributed.determinism",
                "distributed.devices",  # NCCL's own variable
                "tools.doctor",
                "tools.cli",
                "ways.huggingface.accelerate.world",
                "ways.huggingface.accelerate.gradient_reads",
                "ways.huggingface.transformers.callbacks",
                "stores.cache",
                "watchdog.flight_recorder",  # torch's own variables
                "memory.segments",  # torch's own, too
                "train.event_commands",  # handed on to a user's own commands
            )
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
            ["config", "schema"], ["compare", "--help"], ["report", "--help"], ["generate", "--help"], ["launch", "k8s", "pyproject.toml"]]  # fmt: skip


def test_help_theory_compare_and_launch_import_no_torch():
    """In one process, one after the other."""
    script = (
        f"import sys\nfrom zero3d.tools.cli.main import main\nfor command in {COMMANDS!r}:\n"
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
    tables = text[text.index("## Where is") :] + (ROOT / "docs" / "where.md").read_text()
    return re.findall(r"^\| (.+?) \| `([\w/.]+\.\w+)(?:::([\w.]+))?` \|$", tables, flags=re.MULTILINE)


def test_architecture_is_two_hundred_lines_at_most_and_no_row_of_it_differs_from_the_page_of_all():
    text, page = (ROOT / "ARCHITECTURE.md").read_text(), (ROOT / "docs" / "where.md").read_text()
    assert len(text.splitlines()) <= 200
    rows = text[text.index("## Where is") :].splitlines()
    assert len(rows) > 20
    assert [row for row in rows if row.startswith("| ") and row not in page.splitlines()] == []


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
    assert len(questions) == 24
    missing = [file for each in questions for file in each["files"] if not (SRC / file).is_file()]
    assert not missing


def assigned(node):
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)]
