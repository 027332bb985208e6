"""Folders that `save_to_disk` of the datasets library writes, told by their bookkeeping.

Dataset        state.json  dataset_info.json  data-00000-of-00002.arrow ...   state.json says which files, in order
DatasetDict    dataset_dict.json  train/  test/ ...                           a Dataset in each
"""

from __future__ import annotations

from pathlib import Path

from zero3d.errors import DataError, short
from zero3d.reading import Unreadable, read_object

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Return whether a folder is a saved Dataset."""
    return (folder / STATE).is_file() and (folder / INFO).is_file()


def is_bookkeeping(path: Path) -> bool:
    """Return whether a file tells of a saved Dataset and holds none of its records."""
    return path.name in (STATE, INFO) and is_saved(path.parent)


def split_of(folder: Path, split: str) -> Path:
    """Return the folder of a DatasetDict's split, or any other folder as it is. Raises DataError."""
    if not (folder / SPLITS).is_file():
        return folder
    names = sorted(each.name for each in folder.iterdir() if is_saved(each))
    if split not in names:
        raise DataError(
            f"{folder} is a DatasetDict of the splits {', '.join(names) or '(none)'}, and {split} is wanted: "
            f"name one, such as {folder / names[0] if names else folder / split}."
        )
    return folder / split


def files_of(folder: Path) -> list[Path]:
    """Return the files of a saved Dataset, in its order. Raises DataError."""
    state = folder / STATE
    try:
        entries = read_object(state).get("_data_files")
    except Unreadable as error:
        raise DataError(f"{state} {error}.") from error
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or []]
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{state} names no files, as save_to_disk would: save the Dataset again.")
    files = [folder / str(name) for name in names]
    if missing := [file for file in files if not file.is_file() or file.parent != folder]:
        raise DataError(f"{state} names {short(missing[0].name)}, which is not there: copy the whole folder again.")
    return files
