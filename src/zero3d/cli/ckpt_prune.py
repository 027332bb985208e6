"""`zero3d ckpt prune`: remove checkpoints that nobody needs, never under a run that goes on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from zero3d.checkpoint.folders import discard, remove
from zero3d.checkpoint.inventory import CHECKPOINTS, Listed, directory_of, plan_pruning, size_of
from zero3d.errors import ConfigError
from zero3d.train.lock import LOCK, FolderLock, check_free


def prune(folder: Path, keep: int | None, and_leftovers: bool, yes: bool) -> dict[str, Any]:
    """Choose what goes, and remove it if `yes`; return both as data. Raises ConfigError and CheckpointError."""
    if keep is None and not and_leftovers:
        raise ConfigError("nothing to remove was named: type --keep K, --leftovers, or both.")
    if keep is not None and keep < 1:
        raise ConfigError(f"--keep {keep}: at least 1 stays, the newest whole one.")
    with ExitStack() as stack:
        directory = directory_of(folder).resolve()
        root = directory.parent if directory.name == CHECKPOINTS else None
        if root is not None:
            check_free(root)
            if yes and ((root / "config.yaml").exists() or (root / LOCK).exists()):  # no run starts meanwhile
                stack.enter_context(FolderLock()).acquire(root)
        planned = plan_pruning(folder, keep, and_leftovers)
        sizes = {each: size_of(each) for each in planned.leftovers}
        removed: list[Path] = []
        if yes:
            for each in planned.doomed:
                assert each.step is not None
                discard(planned.directory, each.step)
                removed += [each.folder] if not each.folder.exists() else []
            for left in planned.leftovers:
                remove(left)
                removed += [left] if not left.exists() else []
    return {
        "directory": planned.directory,
        "keep": keep,
        "kept": [_described(each) for each in planned.kept],
        "doomed": [_described(each) for each in planned.doomed],
        "leftovers": [{"name": each.name, "path": each, "bytes": size} for each, size in sizes.items()],
        "removed": removed if yes else None,
    }


def _described(each: Listed) -> dict[str, Any]:
    return {
        "name": each.folder.name, "path": each.folder, "step": each.step, "bytes": each.size, "best": each.best,
        "state": "whole" if each.fault is None else "damaged",
    }  # fmt: skip
