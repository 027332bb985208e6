"""Signs of files that are too small or too large an idea: `make lint` prints them, and `sizes.yaml` has a reason for each.

one importer     files that a single other file imports: `from package import name` counts as an import of the file in
                 which that package's `__init__.py` finds the name, and neither `__init__.py` itself nor a test counts
long             files of more than LONG lines of code
many attributes  classes, records aside, that keep more than MANY values: names assigned through `self`, and a dataclass's
                 fields
"""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import yaml
from source_facts import PARTS, ROOT, SRC, code_lines, core, facts, imports, is_module, modules, package_of, part_of

REASONS = Path(__file__).with_name("sizes.yaml")
LONG, MANY = 500, 15
SIGNS = ("one importer", "long", "many attributes")
RECORDS = ("NamedTuple", "Protocol", "Enum", "Exception", "Error", "TypedDict")  # how the names of their bases end


@cache
def signs():
    """What is to have a reason: files, or classes as FILE::CLASS, by the name of the sign."""
    importers, texts = file_importers(), {path: path.read_text() for _, path in modules()}
    found = (
        {file for file, found in importers.items() if len(found) == 1},
        {file_of(path) for path, text in texts.items() if text.count("\n") > LONG and code_lines(path) > LONG},
        {
            f"{file_of(path)}::{name}"
            for path, text in texts.items()
            if "class " in text
            for name, kept in classes(path)
            if len(kept) > MANY
        },
    )
    return dict(zip(SIGNS, found, strict=True))


def reasons():
    """The reason of each, by the name of the sign."""
    return yaml.safe_load(REASONS.read_text())


def file_of(path):
    return path.relative_to(SRC).as_posix()


def file_importers():
    """The files that import each file; packages' `__init__.py` are on neither side."""
    paths = dict(modules())
    importers = defaultdict(set)
    for path in paths.values():
        if path.name == "__init__.py":
            continue
        for target in imports(path) | through_packages(path):
            found = paths.get(target)
            if found is not None and found.name != "__init__.py" and found != path:
                importers[file_of(found)].add(file_of(path))
    return importers


def through_packages(path):
    """The modules of names that a file imports from packages."""
    return {
        home
        for node in facts(path).imports
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero3d.")
        for alias in node.names
        if (home := reexports(node.module.removeprefix("zero3d.")).get(alias.name))
    }


@cache
def reexports(package):
    """The modules of the names that a package's `__init__.py` imports; none for what is no package."""
    path = SRC / Path(*package.split(".")) / "__init__.py"
    if not path.exists():
        return {}
    return {
        alias.asname or alias.name: node.module.removeprefix("zero3d.")
        for node in facts(path).imports
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero3d.")
        for alias in node.names
        if is_module(node.module.removeprefix("zero3d."))
    }


def classes(path):
    """(name, names of the values that it keeps) of each class of a file that is no record."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and not is_record(node):
            kept = {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
            yield node.name, kept | (fields(node) if is_dataclass(node) else set())


def is_record(node):
    frozen = is_dataclass(node) and any("frozen=True" in ast.unparse(each) for each in node.decorator_list)
    return frozen or any(ast.unparse(base).partition("[")[0].endswith(RECORDS) for base in node.bases)


def is_dataclass(node):
    return any(ast.unparse(each).partition("(")[0].endswith("dataclass") for each in node.decorator_list)


def fields(node):
    return {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}


def parts():
    """The files of the source, of its core and of the tests, by what they are."""
    files = dict(modules())
    return {
        "`src`": list(files.values()),
        "the core: `zero/` and what it needs": [files[name] for name in core()],
        "`zero/`": [path for name, path in files.items() if package_of(name) == "zero"],
        "`tests`": list((ROOT / "tests").rglob("*.py")),
    }


def counts():
    """(what, number of files, lines of code) of each part."""
    for what, paths in parts().items():
        lines = [code_lines(path) for path in paths]
        yield what, len(lines), sum(lines)


def table():
    """Markdown: `counts`."""
    rows = [f"| {what} | {files:,} | {lines:,} |" for what, files, lines in counts()]
    return "\n".join(["| | files | lines of code |", "|---|---:|---:|", *rows])


# What is added at times, the last one of its kind, and how code names it.
CHANGES = (
    ("a key of `zero`", "`zero.communicators`", r"\bcommunicators\b"),
    ("a mesh axis", "`mesh.sp`", r"\bsp\b"),
    ("a matrix optimizer", "Muon", r"(?i)muon"),
    ("a quantised format", "`model.quantize=nf4`", r"(?i)\bnf4\b"),
    ("a pipeline schedule", "`mesh.schedule=zbv`", r"(?i)zbv"),
    ("a tracker", "`log.to=trackio`", r"(?i)trackio"),
)


def changes():
    """Markdown: in how many files of each part the code names the last one of a kind."""
    codes = [(part_of(name), code_of(path)) for name, path in modules()]
    lines = [f"| a change | the last one | files | {' | '.join(PARTS)} |", "|---|---|---:|" + "---:|" * len(PARTS)]
    for what, last, named in CHANGES:
        found = Counter(part for part, code in codes if re.search(named, code))
        lines.append(f"| {what} | {last} | {found.total()} | {' | '.join(str(found[part]) for part in PARTS)} |")
    return "\n".join(lines)


def code_of(path):
    """A file's code without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def main():
    """Print the counts, and every sign with its reason."""
    for what, files, lines in counts():
        print(f"{what}: {lines:,} lines of code in {files} files")
    known = reasons()
    for sign, found in signs().items():
        print(f"\n{sign}: {len(found)}")
        for each in sorted(found):
            print(f"  {each}: {known[sign].get(each, 'no reason')}")


if __name__ == "__main__":
    main()
