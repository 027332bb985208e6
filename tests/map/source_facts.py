"""The source as data: which files there are, what each imports and defines, and how many lines of code it has."""

import ast
import io
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "zero3d"


OLD_NAMES = yaml.safe_load(
    (Path(__file__).parent / "old_names.yaml").read_text()
)  # file: the module that it stands for


def modules():
    """Name and path of each file, but of those that stand for another."""
    for path in sorted(SRC.rglob("*.py")):
        if path.relative_to(SRC).as_posix() not in OLD_NAMES:
            yield name_of(path), path


def name_of(path):
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__")


# The three parts, and what each may import beside itself.
PARTS = {"library": (), "ways": ("library",), "tools": ("library", "ways")}


def part_of(name):
    first = name.partition(".")[0]
    return "tools" if name == "__main__" else first if first in PARTS else "library"


def package_of(name):
    """zero.unit -> zero; tools.plan.spec -> tools.plan; ways.verl -> ways.verl."""
    if name == "__main__":  # stands for the command
        return "tools.cli"
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if rest and part_of(first) != "library" else first


class Facts(NamedTuple):
    """What a file has; its tree is not kept, for every collection of garbage would go through it."""

    imports: list  # statements, wherever they are: inside functions and TYPE_CHECKING blocks, too
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
    return Facts(
        [node for node in walked if isinstance(node, (ast.Import, ast.ImportFrom))],
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
    """zero3d modules that a file imports, for types alone or inside functions, too."""
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
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()  # a folder of caches is none


def imported_at_once(tree):
    """Modules that importing a file imports: what stands in no function and in no TYPE_CHECKING block."""
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With)) and "TYPE_CHECKING" not in ast.unparse(node)[:60]:
            yield from imported_at_once(node)


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
