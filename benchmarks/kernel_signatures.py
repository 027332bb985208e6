"""Parameters of kernels that mix tokens, and how transformers calls them, read in released sources.

    pip download --no-deps --dest DIR fla-core causal-conv1d mamba-ssm transformers==5.16.0     wheels or archives
    python benchmarks/kernel_signatures.py DIR --json benchmarks/published/kernels.json

Nothing is installed or imported: sources are parsed. A kernel is recorded by package and version, function and
parameters, with what its package asserts of `seq_idx`. Of transformers these are the functions of modeling files that
stand before kernels: the kernel's name, the function's own parameters, and its calls in files of models: values by
position, keywords, and the functions around.

zero3d tells kernels by these names where packed documents end (src/zero3d/models/mixing.py). Tests compare.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KERNELS = {
    "fla-core": ("chunk_gated_delta_rule", "chunk_kda"),
    "mamba-ssm": (
        "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined",
        "selective_scan_fn",
        "mamba_inner_fn",
    ),
    "causal-conv1d": ("causal_conv1d_fn",),
}
BEFORE = "use_kernel_func_from_hub_with_fallback"  # transformers' decorator of a function that stands before a kernel
WANTED = {name for names in KERNELS.values() for name in names}
TOLD = "seq_idx"
NOT_WITH = re.compile(r"not (\w+)$|(\w+) is None$")


def sources(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of the sources in a wheel or an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                if name.endswith(".py"):
                    yield name, opened.read(name).decode()
        return
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            if member.isfile() and member.name.endswith((".py", ".cpp")):
                held = opened.extractfile(member)
                assert held is not None
                yield member.name.partition("/")[2], held.read().decode()


def named(archive: Path) -> tuple[str, str]:
    """Return the package and the version of an archive's name."""
    package, version = archive.name.removesuffix(".tar.gz").removesuffix(".whl").split("-")[:2]
    return package.replace("_", "-"), version


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return a function's parameters, in order; `**` for others."""
    given = function.args
    assert not given.posonlyargs
    assert given.vararg is None
    return [each.arg for each in (*given.args, *given.kwonlyargs)] + (["**"] if given.kwarg else [])


def kernels(archive: Path) -> Iterator[dict[str, Any]]:
    """Yield the kernels of a package."""
    package, version = named(archive)
    texts = {name: text for name, text in sources(archive) if not name.startswith("tests")}
    for file, text in texts.items():
        if not file.endswith(".py") or not any(f"def {name}(" in text for name in KERNELS[package]):
            continue
        tree = ast.parse(text)
        for function in tree.body:
            if not isinstance(function, ast.FunctionDef) or function.name not in KERNELS[package]:
                continue
            yield {
                "package": package,
                "version": version,
                "file": file,
                "function": function.name,
                "parameters": parameters(function),
                **asserted(tree, "\n".join(texts.values()) if package == "causal-conv1d" else ""),
            }


def asserted(tree: ast.AST, text: str) -> dict[str, Any]:
    """Return what a package of convolutions asserts of seq_idx, and of how far they reach."""
    if not text:
        return {}
    alone: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == f"{TOLD} is not None":
            asserts = (ast.unparse(each.test) for each in ast.walk(node) if isinstance(each, ast.Assert))
            alone |= {name for test in asserts for pair in NOT_WITH.findall(test) for name in pair if name}
    widths = re.search(r"width >= (\d+) && width <= (\d+)", text)
    channel_last = r"TORCH_CHECK\(is_channel_last, \"" + TOLD
    return {
        "of_seq_idx": {
            "dtype": "int32" if re.search(TOLD + r"\.scalar_type\(\) == torch::kInt32", text) else None,
            "channel_last": re.search(channel_last, text) is not None,
            "not_with": sorted(alone),
        },
        "widths": [int(each) for each in widths.groups()] if widths else None,
    }


def called(archive: Path) -> dict[str, Any]:
    """Return transformers' functions before kernels, and their calls."""
    _, version = named(archive)
    found: dict[str, Any] = {}
    calls: dict[str, dict[tuple[Any, ...], list[str]]] = {}
    for file, text in sources(archive):
        if not re.fullmatch(r"transformers/models/\w+/modeling_\w+\.py", file) or BEFORE not in text:
            continue
        kind, tree = file.split("/")[2], ast.parse(text)
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and (before := _stands_before(function)):
                one = {"kernel": before, "parameters": parameters(function)}
                held = found.setdefault(function.name, one | {"files": []})
                assert held | one == held, (file, function.name)
                held["files"].append(kind)
        for around in (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)):
            for call in (each for each in ast.walk(around) if isinstance(each, ast.Call)):
                name = call.func.id if isinstance(call.func, ast.Name) else ""
                if name in found:
                    key = (len(call.args), tuple(word.arg or "**" for word in call.keywords), around.name)
                    calls.setdefault(name, {}).setdefault(key, []).append(kind)
    for name, by_form in calls.items():
        found[name]["calls"] = [
            {"by_position": count, "keywords": list(words), "inside": inside, "files": sorted(set(files))}
            for (count, words, inside), files in sorted(by_form.items())
        ]
    return {"version": version, "functions": {name: found[name] for name in sorted(found)}}


def _stands_before(function: ast.FunctionDef) -> str | None:
    """Return the kernel of those wanted that a function stands before."""
    for each in function.decorator_list:
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == BEFORE:
            kernel = ast.literal_eval(each.args[0])
            return kernel if kernel in WANTED else None
    return None


def read(folder: Path) -> Mapping[str, Any]:
    """Return what archives in a folder say."""
    archives = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    return {
        "kernels": [one for archive in archives if named(archive)[0] in KERNELS for one in kernels(archive)],
        "transformers": [called(archive) for archive in archives if named(archive)[0] == "transformers"],
    }


def as_text(found: Mapping[str, Any]) -> str:
    """Return JSON with a line for a kernel, a function, a call."""

    def lines(values: Iterator[Any] | list[Any], indent: int) -> str:
        return ",\n".join(" " * indent + json.dumps(each) for each in values)

    versions = []
    for version in found["transformers"]:
        of = version["functions"]
        each = ",\n".join(
            f"   {json.dumps(name)}: "
            + json.dumps({key: value for key, value in one.items() if key != "calls"})[:-1]
            + f',\n    "calls": [\n{lines(one["calls"], 5)}]}}'
            for name, one in of.items()
        )
        versions.append(f'  {{"version": {json.dumps(version["version"])}, "functions": {{\n{each}}}}}')
    return f'{{"kernels": [\n{lines(found["kernels"], 2)}],\n "transformers": [\n' + ",\n".join(versions) + "]}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of wheels and archives")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    found = read(arguments.folder)
    arguments.json.write_text(as_text(found))
    print(f"{len(found['kernels'])} kernels, {len(found['transformers'])} versions of transformers: {arguments.json}")


if __name__ == "__main__":
    main()
