"""Files of stores on this host: each is fetched once, whoever asks, and those not used for longest go first.

    CACHE/stores/<digest>/        one listing of one URL: a store whose objects changed has another folder
      .listing.json               the URL, its objects, their sizes and tags; its time is that of the last use
      NAME/...                    the objects below the URL, NAME its last part; each whole since it has its name
      .OBJECT.part                being fetched, by the process that has locked it

`place_of` makes such a folder without fetching anything. `fetch` fetches one file of it: the first process downloads,
others wait for its lock and find the file. A file has the size of the listing, else it is fetched again at once. Its
time is 0, so that tokens made of it are found again after it was fetched again.

What is there beyond the limit is removed before a file is fetched: of other folders, those used longest ago first,
except where a process holds one (`hold`). Their listings stay, so that a file that is missed is fetched again. A file
that is open stays readable when its name is gone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EFBIG, EIO
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from zero3d.reading import MOST, Unreadable, read_object
from zero3d.stores.store import Store, Stored

VARIABLE, DEFAULT = "ZERO3D_CACHE", "~/.cache/zero3d"
STORES, LISTING = "stores", ".listing.json"
LIMIT = 200_000_000_000  # bytes
DIGITS = 32


class Origin(NamedTuple):
    """Says of a file or folder in the cache which URL it is, and what lies below the folder's.

    root  the folder of the cache that has the listing
    name  of the object, relative to the URL of the listing; of a folder, how names below it begin
    """

    root: Path
    url: str
    objects: Mapping[str, Stored]
    name: str

    @property
    def shown(self) -> str:
        """Return the URL of the object itself."""
        return f"{self.url}/{self.name}" if self.name else self.url

    @property
    def stored(self) -> Stored | None:
        """Return the object; None where the store has none of this name."""
        return self.objects.get(self.name)


def cache_root(cache: str | None = None) -> Path:
    """Return the folder of all that is kept between runs: the one given, else that of the environment, else DEFAULT."""
    return Path(cache or os.environ.get(VARIABLE) or DEFAULT).expanduser()


def folder_of(cache: str | None = None) -> Path:
    """Return the folder of what was fetched, below that of `cache_root`."""
    return cache_root(cache) / STORES


def place_of(url: str, objects: Mapping[str, Stored], cache: Path | None = None) -> Path:
    """Return where the objects of a URL will be on this host, and keep their listing. Raises OSError."""
    url = url.rstrip("/")
    listing = {"url": url, "objects": {name: list(stored) for name, stored in sorted(objects.items())}}
    text = json.dumps(listing, sort_keys=True)
    if len(text) > MOST:
        raise OSError(
            EFBIG, f"{len(objects):,} objects are too many: put their contents into fewer and larger ones", url
        )
    root = (cache or folder_of()) / hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
    root.mkdir(parents=True, exist_ok=True)
    if not (root / LISTING).exists():
        fresh = root / f"{LISTING}.{secrets.token_hex(4)}"
        fresh.write_text(text)
        fresh.replace(root / LISTING)
    name = url.rpartition("/")[2]
    return root / (name if name.strip(".") else "objects")


def origin(path: Path) -> Origin | None:
    """Return what a path in the cache is in its store; None for any other path."""
    for root in path.parents:
        if root.parent.name == STORES and len(root.name) == DIGITS:
            return _origin(root, path)
    return None


def _origin(root: Path, path: Path) -> Origin | None:
    try:
        listing = read_object(root / LISTING)
        url, objects = listing["url"], {name: Stored(*each) for name, each in listing["objects"].items()}
    except (Unreadable, KeyError, TypeError, AttributeError):
        return None
    inner = path.relative_to(root).parts[1:]
    return Origin(root, url, objects, "/".join(inner)) if ".." not in inner else None


def shown(path: Path) -> str:
    """Return a path as people know it: the URL of one that is in the cache."""
    known = origin(path)
    return str(path) if known is None else known.shown


def fetch(path: Path, limit: int = LIMIT) -> bool:
    """Fetch a file of the cache that is not there; return whether its store has it. Raises OSError."""
    known = origin(path)
    if known is None or known.stored is None:
        return False
    _fetch(known, {path: known.name}, limit)
    return True


def fetch_all(place: Path, limit: int = LIMIT) -> None:
    """Fetch all objects below a place of the cache. Raises OSError."""
    known = origin(place)
    assert known is not None
    _fetch(known, {place / name if name else place: name for name in known.objects}, limit)


def _fetch(known: Origin, names: Mapping[Path, str], limit: int) -> None:
    """Fetch those of some objects that are not there, for which room is made first."""
    with hold(known.root):
        missing = {path: name for path, name in names.items() if _size(path) != known.objects[name].size}
        if missing:
            make_room(known.root, sum(known.objects[name].size for name in missing.values()), limit)
        for path, name in missing.items():
            _download(known.url, name, path, known.objects[name].size)


def hold(root: Path) -> BufferedReader:
    """Return an open file: while it is open, nothing of this folder of the cache is removed to make room."""
    os.utime(root / LISTING)
    file = (root / LISTING).open("rb")
    with suppress(OSError):  # of a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _download(url: str, name: str, path: Path, size: int) -> None:
    """Download an object, unless another process has while this one waited for its lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("ab") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if _size(path) == size:
            part.unlink(missing_ok=True)
            return
        Store(url).download(name, part)
        if (found := _size(part)) != size:
            raise OSError(EIO, f"it has {found} bytes now, and had {size} when it was listed", f"{url}/{name}")
        os.utime(part, (0, 0))
        part.replace(path)


def make_room(root: Path, nbytes: int, limit: int) -> None:
    """Remove files of folders of the cache until another `nbytes` are within the limit, or nothing else may go."""
    others = [(each, size) for each in root.parent.iterdir() if (size := _bytes(each))]
    total = nbytes + sum(size for _, size in others)
    for each, size in sorted(others, key=lambda other: _used(other[0])):
        if total <= limit:
            return
        if each != root and _clear(each):
            total -= size


def _clear(root: Path) -> bool:
    """Remove all files of a folder but its listing, unless somebody holds it; return whether they are gone."""
    with suppress(OSError), _alone(root) as alone:
        for entry in root.iterdir() if alone else ():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LISTING:
                entry.unlink()
        return alone
    return False


@contextmanager
def _alone(root: Path) -> Iterator[bool]:
    """Keep others from holding a folder inside; False where somebody holds it already."""
    with (root / LISTING).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _bytes(root: Path) -> int:
    """Count the bytes of what was fetched into a folder."""
    return sum(_size(path) or 0 for path in root.rglob("*") if path.name != LISTING)


def _used(root: Path) -> float:
    try:
        return (root / LISTING).stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int | None:
    """Return the bytes of a file; None where there is none."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
