"""Copies of checkpoints in a store (zero3d/stores), below one URL. No torch.

    URL/step-N/               the files of a checkpoint; it is there once manifest.sha256 is, which is written last
    URL/.step-N.old/          the one that was there while step N is saved again: the only one, where a process died
    URL/best                  the name of the one with the best evaluation

A store has no rename, so an object in a known place says that the rest is there. What a killed upload leaves has no
such object and counts for nothing; it goes with the next pruning. An object is written as a whole or not at all, but
on `file://`, where the last one counts by its size.

    make_way   rank 0       what is at step N now is copied aside, then it is no checkpoint any more
    upload     every rank   its own files
    commit     rank 0       sizes are those of the files here; the manifest, then its checksum; then the old one goes

A process that dies between any two objects leaves the checkpoint that was the newest before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from zero3d.checkpoint.folders import CHECKSUM, INDEX, MANIFEST, WEIGHTS, step_of
from zero3d.checkpoint.model_card import CARD, is_sealed
from zero3d.errors import CheckpointError, ConfigError, CopyError, remedy_of, short
from zero3d.stores.cache import place_of
from zero3d.stores.store import Store, Stored
from zero3d.stores.urls import check_url, is_url

BEST = "best"
CHECKSUM_BYTES = 64 + 2 + len(MANIFEST) + 1  # of the line that sha256sum prints
FIRST_READ = ("config.json", "adapter_config.json", INDEX)  # of an export
Objects = Mapping[str, Stored]


class Look(NamedTuple):
    """Holds what a listing says.

    steps      whole checkpoints: step -> name of their folder
    leftovers  folders of killed uploads and of copies that nobody needs
    objects    of each folder, by their names in it
    """

    steps: Mapping[int, str]
    leftovers: Sequence[str]
    objects: Mapping[str, Objects]


def look_through(objects: Objects) -> Look:
    """Return the checkpoints in a listing, oldest first."""
    folders: dict[str, dict[str, Stored]] = {}
    for name, stored in objects.items():
        folder, _, inner = name.partition("/")
        if inner and step_of(Path(folder)) is not None:
            folders.setdefault(folder, {})[inner] = stored
    whole = sorted(folder for folder in folders if is_whole(folders[folder]))  # step-N after .step-N.old
    steps = {step: folder for folder in whole if (step := step_of(Path(folder))) is not None}
    return Look(dict(sorted(steps.items())), sorted(folders.keys() - set(steps.values())), folders)


def is_whole(objects: Objects) -> bool:
    """Return whether a folder in a store holds a whole checkpoint: its last object is there."""
    return CHECKSUM in objects and objects[CHECKSUM].size == CHECKSUM_BYTES


class Copies:
    """Reads and writes the copies of one run's checkpoints. Its methods raise OSError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store = Store(url)

    def look(self) -> Look:
        """Return what is there."""
        return look_through(self._store.objects())

    def best(self) -> int | None:
        """Return the step of the one with the best evaluation."""
        try:
            return step_of(Path(self._store.read(BEST).decode(errors="replace").strip()))
        except FileNotFoundError:
            return None

    # --- writing --------------------------------------------------------------------------------

    def make_way(self, step: int) -> None:
        """See to it that nothing at this step counts as a checkpoint; one that did is copied aside first."""
        look, name = self.look(), f"step-{step}"
        there = look.objects.get(name, {})
        if is_whole(there):
            aside = f".{name}.old"
            self._remove(aside, look.objects.get(aside, {}))
            for inner in _last(there, CHECKSUM):
                self._store.copy(f"{name}/{inner}", f"{aside}/{inner}")
        self._remove(name, there)

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Write files of a checkpoint on this host."""
        for name in names:
            self._store.upload(folder / name, f"{folder.name}/{name}")

    def commit(self, folder: Path) -> None:
        """Make a checkpoint of what all ranks have uploaded. Raises OSError where a file is not all there."""
        look = self.look()
        there = look.objects.get(folder.name, {})
        for path in sorted(folder.iterdir()):
            found = there[path.name].size if path.name in there else 0
            if path.name not in (MANIFEST, CHECKSUM) and found != path.stat().st_size:
                url = f"{self.url}/{folder.name}/{path.name}"
                raise ConnectionError(f"{url} has {found:,} bytes of {path.stat().st_size:,}")
        self.upload(folder, (MANIFEST, CHECKSUM))
        aside = f".{folder.name}.old"
        self._remove(aside, look.objects.get(aside, {}))

    def prune(self, last: int, keep: int, best: int | None) -> None:
        """Leave `keep` checkpoints up to `last` and the best one, and name that; what killed uploads left goes, too."""
        look = self.look()
        kept = {*[step for step in look.steps if step <= last][-keep:], best}
        if best in look.steps:
            self._store.write(BEST, f"step-{best}\n".encode())
        self.discard([name for step, name in look.steps.items() if step not in kept], look)
        self.discard(look.leftovers, look)

    def clear(self) -> None:
        """Remove all checkpoints."""
        look = self.look()
        self.discard(look.objects, look)

    def discard(self, names: Iterable[str], look: Look) -> None:
        """Remove folders: first the object for which they count."""
        for name in names:
            self._remove(name, look.objects[name])

    def _remove(self, folder: str, objects: Objects) -> None:
        self._store.remove(f"{folder}/{inner}" for inner in reversed(_last(objects, CHECKSUM)))


def _last(names: Iterable[str], last: str) -> list[str]:
    """Return names with one of them at the end."""
    return sorted(names, key=lambda name: (name == last, name))


def copy_export(folder: Path, url: str) -> None:
    """Write an exported folder below a URL, file by file; what a loader opens first goes at once and comes last.

    An export that is there is replaced: those of its weights that are no files of this one go, too. A model card that
    somebody has written or changed stays. Raises CopyError, ConfigError as `refuse_checkpoints` does.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    with told(url, "written", folder):
        store = Store(url)
        there = store.objects()
        _refuse_checkpoints(url, there)
        store.remove(name for name in there if name in FIRST_READ)
        store.remove(name for name in there if WEIGHTS.fullmatch(name) and name not in names)
        if CARD in there and CARD in names and not is_sealed(store.read(CARD)):
            names.remove(CARD)
        for name in sorted(names, key=lambda name: (name in FIRST_READ, name)):
            store.upload(folder / name, name)


def refuse_checkpoints(url: str) -> None:
    """Refuse a URL to export to below which checkpoints lie. Raises ConfigError, CheckpointError."""
    with told(url, "read"):
        _refuse_checkpoints(url, Store(url).objects())


def _refuse_checkpoints(url: str, objects: Objects) -> None:
    if folders := look_through(objects).objects:
        raise ConfigError(
            f"{short(url)} has checkpoints below it ({min(folders)}), and an export has a folder of its own: give "
            f"{url.rstrip('/')}/hf."
        )


# --- reading ------------------------------------------------------------------------------------


def located(directory: str | Path) -> Path:
    """Return a directory of this host as it is, and of a URL where its checkpoint, or its newest one, is in the cache.

    Its files are fetched when they are opened (`files.open_regular`). Raises CheckpointError where there is none.
    """
    if not is_url(directory):
        return Path(directory)
    found = find_places(str(directory))
    if not found:
        raise CheckpointError(
            f"no checkpoint in {short(directory)}: it has no step-N with a {CHECKSUM}. Check the URL."
        )
    return found[max(found)]


def find_places(url: str) -> dict[int, Path]:
    """Return where checkpoints of a URL are in the cache, by step: one that the URL is, or all below it.

    Raises CheckpointError where the store cannot be read, ConfigError for a protocol that nobody knows.
    """
    url = url.rstrip("/")
    check_url(url)
    with told(url, "read"):
        objects = Store(url).objects()
        if is_whole(objects):
            place = place_of(url, objects)
            return {step_of(place) or 0: place}
        look = look_through(objects)
        return {step: place_of(f"{url}/{name}", look.objects[name]) for step, name in look.steps.items()}


@contextmanager
def told(url: str, action: str, kept: Path | None = None) -> Iterator[None]:
    """Turn a store's OSError into a CheckpointError that names the URL, what could not be done and a remedy.

    kept  a checkpoint that is whole on this host all the same: the error is a CopyError
    """
    try:
        yield
    except OSError as error:
        text = f"{short(url)} cannot be {action} ({error.strerror or error}): {_remedy(error)}"
        raised = CheckpointError(f"{text}.") if kept is None else CopyError(f"{text}; {kept} is whole.")
        raise raised from error


def _remedy(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "see to credentials with that right"
    return "check the URL" if isinstance(error, FileNotFoundError) else f"{remedy_of(error)} and try again"
