"""Damages to a checkpoint, drawn from a seed. Each is a function (folder, random) that does one thing to its files.

FLAWS   what disks, kills and clumsy hands do: the checksums are those of before
EDITS   what somebody does who writes all checksums anew; values that could have been saved are not among them,
        for nobody can know those
"""

import hashlib
import json
import os
import shutil
from itertools import combinations
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
DEEP = "[" * 100_000


# --- tools --------------------------------------------------------------------------------------


def seal(folder):
    """Write the checksum over the manifest anew."""
    text = (folder / MANIFEST).read_bytes()
    (folder / SEAL).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


def edit(folder, change):
    """Change the manifest by a function, and its checksum."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    seal(folder)


def edit_part(folder, name, change):
    """Change a rank's part of the manifest by a function, and all checksums over it."""
    part = json.loads((folder / name).read_text())
    change(part)
    (folder / name).write_text(json.dumps(part))
    list_part(folder, name)


def list_part(folder, name):
    """Write the checksums over a part anew."""
    sha256 = sha256_of(folder / name)
    edit(folder, lambda m: m["parts"].update({name: sha256}))


def edit_rows(folder, random, change):
    """Change by a function the part of the manifest of one rank."""
    edit_part(folder, random.choice([path.name for path in parts(folder)]), change)


def edit_any(folder, random, change):
    """Change the manifest or a part of it by a function, and all checksums."""
    name = random.choice([MANIFEST, *(path.name for path in parts(folder))])
    edit(folder, change) if name == MANIFEST else edit_part(folder, name, change)


def rewrite(folder, file, change):
    """Change the tensors of a file by a function, and all checksums."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, folder / file)
    list_file(folder, file)


def list_file(folder, file):
    """Write the checksums over a file of tensors anew."""
    checksum = xxhash.xxh3_128((folder / file).read_bytes()).hexdigest()
    edit_part(folder, part_of(file), lambda part: part.update(xxh3_128=checksum))


def part_of(file):
    return file.replace(".safetensors", ".json")


def parts(folder):
    """The files with the ranks' parts of the manifest, by rank."""
    return sorted(folder.glob("rank-*.json"))


def joined(folder):
    """What all parts say together."""
    manifest, read = (
        json.loads((folder / MANIFEST).read_text()),
        [json.loads(path.read_text()) for path in parts(folder)],
    )
    return {name: value for name, value in manifest.items() if name != "parts"} | {
        "files": {part["file"]: sha256_of(folder / part["file"]) for part in read},
        "tensors": [row | {"file": part["file"]} for part in read for row in part["tensors"]],
        "own": {part["file"]: part["own"] for part in read},
        "python_rng": [part["python_rng"] for part in read],
    }


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def as_retired(folder, number):
    """Give a checkpoint the number of a format that is no longer read; the first one had no checksum."""
    edit(folder, lambda m: m.update(format=number))
    if number == 1:
        (folder / SEAL).unlink()


def files(folder):
    return sorted(path for path in folder.iterdir() if path.is_file())


def data(folder, random):
    return random.choice([path for path in files(folder) if path.suffix == ".safetensors"])


# --- flaws --------------------------------------------------------------------------------------


def flip(folder, random):
    path = random.choice(files(folder))
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def truncate(folder, random):
    path = random.choice(files(folder))
    path.write_bytes(path.read_bytes()[: random.choice([0, 1, random.randrange(path.stat().st_size)])])


def append(folder, random):
    with random.choice(files(folder)).open("ab") as file:
        file.write(random.choice([b"\0", b"\n", b"more"]))


def blank(folder, random):
    path = random.choice(files(folder))
    content = bytearray(path.read_bytes())
    start = random.randrange(len(content))
    content[start : start + 512] = b"\1" * len(content[start : start + 512])
    path.write_bytes(content)


def delete(folder, random):
    random.choice(files(folder)).unlink()


def swap_files(folder, random):
    one, other = random.sample(files(folder), 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def from_another(folder, random):
    """One file of a checkpoint of the same run, one step later."""
    path = random.choice(files(folder))
    shutil.copy(folder.parent / "other" / path.name, path)


def link(folder, random):
    path = random.choice(files(folder))
    path.rename(folder.parent / f"moved-{path.name}")
    path.symlink_to(random.choice([folder.parent / f"moved-{path.name}", Path("nowhere"), Path(path.name)]))


def other_kind(folder, random):
    path = random.choice(files(folder))
    path.unlink()
    random.choice([os.mkfifo, os.mkdir])(path)


def foreign(folder, random):
    (folder / random.choice(["rank-00007.safetensors", ".DS_Store", "notes.txt", "manifest.json.bak"])).write_text("x")


def unsealed_edit(folder, random):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["step"] += 1
    (folder / MANIFEST).write_text(json.dumps(manifest))


FLAWS = [flip, flip, flip, flip, truncate, append, blank, delete, swap_files, from_another, link, other_kind, foreign,
         unsealed_edit]  # fmt: skip

# --- edits of the text --------------------------------------------------------------------------


def text(folder, random):
    """Text that is no manifest, with a checksum that fits."""
    good = (folder / MANIFEST).read_text()
    step = json.loads(good)["step"]
    odd = [
        "", "null", "[]", "{}", "1", '"x"', DEEP, DEEP + good, good + "x", "\ufeff" + good, good[:-1],
        good.replace('"step": ', '"step": 0, "step": ', 1), good.replace(f'"step": {step}', f'"step": 1{"0" * 9000}', 1),
        good.replace(f'"step": {step}', f'"step": {DEEP}', 1), good.replace(f'"step": {step}', '"step": NaN', 1),
        good.replace(f'"step": {step}', '"step": 1e999', 1), good.replace("master", "\\ud800"),
    ]  # fmt: skip
    written = random.choice([value.encode("utf-8", "surrogatepass") for value in odd] + [b"\xff\xfe" + good.encode()])
    (folder / MANIFEST).write_bytes(written)
    seal(folder)


def version(folder, random):
    edit(folder, lambda m: m.update(format=random.choice([0, 1, 3, 5, 10**30, -1, 2.0, "2", True, None, [2]])))


# --- edits of fields ----------------------------------------------------------------------------


def places(value):
    """The children of a value, among which a random walk through the manifest chooses."""
    return value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()


def walk(manifest, random):
    """A random place: (container, key), its path. What the loop gave is its own affair."""
    container, key, path = None, None, []
    value = {name: entry for name, entry in manifest.items() if name != "loop"}
    top = manifest
    while children := list(places(value)):
        if path and random.random() < 0.25:
            break
        key, value = random.choice(children)
        container, top = top, top[key]
        path.append(key)
    return container, key, path


def other_type(folder, random):
    """Something of another type, or a number that is none, anywhere."""

    def change(manifest):
        container, key, _ = walk(manifest, random)
        value = container[key]
        odd = ["x", [], {}, [[[[]]]], float("nan"), "\ud800", "../x"]
        odd += [] if value is None or isinstance(value, bool) else [None, True]
        odd += [] if value is None or isinstance(value, (int, float)) else [1, -1, 10**40, 0.5]
        container[key] = random.choice([item for item in odd if type(item) is not type(value) or item != item])

    edit_any(folder, random, change)


FREE = ("about", "loop")  # of which nothing in a state depends


def lost_entry(folder, random):
    """An entry that was there is not."""

    def change(manifest):
        container, key, path = walk(manifest, random)
        if path[0] not in FREE and key != "initial_lr":
            del container[key]

    edit_any(folder, random, change)


def doubled_entry(folder, random):
    def change(manifest):
        container, key, _ = walk(manifest, random)
        if isinstance(container, list):
            container.insert(key, container[key])

    edit_any(folder, random, change)


def out_of_range(folder, random):
    """Numbers of the right type that cannot be."""
    changes = [
        lambda m: m.update(step=m["step"] + random.choice([1, -1, 10**18, -(10**18)])),
        lambda m: m["mesh"].update({random.choice(["pp", "dp", "tp"]): random.choice([0, -1, 3, 10**12])}),
        lambda m: m["optimizer"]["scalars"].update(step=random.choice([-1.0, 0.5, 1e300, float("inf"), 7.0])),
        lambda m: m["optimizer"]["groups"][0].update(lr=random.choice([-1.0, float("inf"), float("nan")])),
        lambda m: m["loss_scale"].update(random.choice([{"value": 0}, {"value": float("inf")}, {"patience": 0},
                                                        {"steps": -1}, {"last_overflow": 10**6}])),
        lambda m: random.choice(list(m["parameters"].values())).update(shape=[random.choice([-1, 0, 10**30])]),
        lambda m: m["scheduler"].update(last_epoch=random.choice([-2, 0.5])),
    ]  # fmt: skip
    of_parts = [
        lambda p: p["python_rng"]["python"][1].__setitem__(random.randrange(625), random.choice([-1, 2**32])),
        lambda p: p["python_rng"]["numpy"].__setitem__(1, random.choice([-1, 625])),
        lambda p: p["python_rng"].update(numpy=["PCG64", 0, 0, 0.0]),
        lambda p: random.choice(p["tensors"])["box"].append([0, 1]),
        lambda p: p["scalars"].update(step=random.choice([-1.0, 0.5, 1e300, 7.0])),
        lambda p: random.choice(list(p["parameters"].values())).update(shape=[random.choice([-1, 0, 10**30])]),
    ]  # fmt: skip
    if random.random() < 0.5:
        edit_rows(folder, random, random.choice(of_parts))
    else:
        edit(folder, random.choice(changes))


# --- edits of rows ------------------------------------------------------------------------------


def lost_row(folder, random):
    edit_rows(folder, random, lambda m: m["tensors"].pop(random.randrange(len(m["tensors"]))))


def lost_state(folder, random):
    """Every row of one state of one parameter."""

    def change(manifest):
        lost = random.choice(manifest["tensors"])
        same = [row for row in manifest["tensors"] if (row["name"], row["state"]) != (lost["name"], lost["state"])]
        manifest["tensors"] = same

    edit_rows(folder, random, change)


def twice(folder, random):
    edit_rows(folder, random, lambda m: m["tensors"].append(random.choice(m["tensors"])))


def swapped(folder, random, *names, like=lambda row: True):
    def change(manifest):
        rows = [row for row in manifest["tensors"] if like(row)]
        pairs = [pair for pair in combinations(rows, 2) if any(pair[0][name] != pair[1][name] for name in names)]
        one, other = random.choice(pairs) if pairs else (rows[0], rows[0])
        for name in names:
            one[name], other[name] = other[name], one[name]

    edit_rows(folder, random, change)


def swapped_keys(folder, random):
    """The values of m for those of v, of one parameter for those of another."""
    swapped(folder, random, "key")


def swapped_meaning(folder, random):
    swapped(folder, random, random.choice(["name", "state", "box"]))


def outside(folder, random):
    """A part whose file lies elsewhere, or has no checksum."""
    away = folder.parent / "other" / "rank-00000.safetensors"
    name = random.choice([f"../other/{away.name}", str(away), "nowhere.safetensors", "", ".", "\0", MANIFEST])
    checksum = xxhash.xxh3_128(away.read_bytes()).hexdigest()

    edit_rows(folder, random, lambda part: part.update(file=name, xxh3_128=checksum))


def listed_outside(folder, random):
    """A part elsewhere, listed with its checksum, in the place of one of ours."""
    away = folder.parent / "other" / "rank-00000.json"
    name = random.choice([f"../other/{away.name}", str(away)])

    def change(manifest):
        manifest["parts"][name] = sha256_of(away)
        if random.random() < 0.5:
            manifest["parts"].pop("rank-00000.json")

    edit(folder, change)


def foreign_part(folder, random):
    """The part of another checkpoint of the same run, one step later, with its checksum; perhaps with its tensors."""
    name = random.choice(parts(folder)).name
    shutil.copy(folder.parent / "other" / name, folder / name)
    list_part(folder, name)
    if random.random() < 0.5:
        file = name.replace(".json", ".safetensors")
        shutil.copy(folder.parent / "other" / file, folder / file)


def swapped_parts(folder, random):
    """What ranks say of their files, in each other's place, with checksums; perhaps with each other's file."""
    names = [path.name for path in parts(folder)]
    one, other = (names * 2)[:2]
    texts = [(folder / name).read_text() for name in (one, other)]
    (folder / one).write_text(texts[1])
    (folder / other).write_text(texts[0])
    if random.random() < 0.5:
        for name in (one, other):
            own = json.loads((folder / name).read_text())["file"]
            (folder / name).write_text((folder / name).read_text().replace(own, name.replace(".json", ".safetensors")))
    for name in (one, other):
        list_part(folder, name)


def lost_part(folder, random):
    """One rank less in the list of parts, in the mesh or not, or parts in another order."""

    def change(manifest):
        kept = list(manifest["parts"].items())
        if random.random() < 0.5:
            kept.pop(random.randrange(len(kept)))
        manifest["parts"] = dict(reversed(kept) if random.random() < 0.5 else kept)
        if random.random() < 0.5:
            manifest["mesh"]["dp"] = len(kept)

    edit(folder, change)


def moved_box(folder, random):
    """A box that begins or ends one later or earlier, with its key."""

    def change(manifest):
        row = random.choice(manifest["tensors"])
        if row["box"]:
            random.choice(row["box"])[random.randrange(2)] += random.choice([1, -1])
        row["key"] = f"{row['state']}:{row['name']}@" + ",".join(f"{a}:{b}" for a, b in row["box"])

    edit_rows(folder, random, change)


def other_parameter(folder, random):
    def change(manifest):
        name = random.choice(list(manifest["parameters"]))
        entry = manifest["parameters"][name]
        random.choice([
            lambda: entry.update(trainable=not entry["trainable"]),
            lambda: entry.update(shape=[*entry["shape"], 1]),
            lambda: manifest["parameters"].update({f"{name}.x": manifest["parameters"].pop(name)}),
            lambda: manifest["parameters"].update({"more": {"shape": [0], "trainable": False, "dtype": "float32"}}),
        ])()  # fmt: skip

    edit_any(folder, random, change)


def other_row_dtype(folder, random):
    edit_rows(
        folder,
        random,
        lambda m: random.choice(m["tensors"]).update(dtype=random.choice(["float64", "int8", "bfloat16", "F32"])),
    )


# --- edits of tensors ---------------------------------------------------------------------------


def shuffled(folder, random):
    """Rows in another order say the same."""
    edit_rows(folder, random, lambda m: random.shuffle(m["tensors"]))


def some_key(tensors, random):
    return random.choice(sorted(tensors))


def lost_tensor(folder, random):
    rewrite(folder, data(folder, random).name, lambda t: t.pop(some_key(t, random)))


def more_tensors(folder, random):
    keys = ["x", "buffer:x", "rng:x", "master:x@0:1"]
    rewrite(folder, data(folder, random).name, lambda t: t.update({random.choice(keys): torch.zeros(1)}))


def other_dtype(folder, random):
    def change(tensors):
        key = some_key(tensors, random)
        tensors[key] = tensors[key].to(torch.float16 if tensors[key].dtype != torch.float16 else torch.float64)

    rewrite(folder, data(folder, random).name, change)


def other_shape(folder, random):
    def change(tensors):
        key = some_key(tensors, random)
        tensors[key] = random.choice([lambda t: t[None], lambda t: t.flatten()[:-1], lambda t: torch.cat([t, t])])(
            tensors[key] if tensors[key].dim() else tensors[key][None]
        )

    rewrite(folder, data(folder, random).name, change)


def other_streams(folder, random):
    """Random states that no generator takes, in a file whose manifest knows of them."""
    file = data(folder, random).name
    key, value = random.choice([
        ("rng:torch", torch.zeros(7, dtype=torch.uint8)), ("rng:torch", torch.full((5056,), 255, dtype=torch.uint8)),
        ("rng:numpy", torch.full((624,), -1)), ("rng:numpy", torch.full((624,), 2**40)),
        ("rng:numpy", torch.zeros(3, dtype=torch.int64)),
    ])  # fmt: skip
    rewrite(folder, file, lambda t: t.update({key: value}))
    edit_part(folder, part_of(file), lambda part: part["own"][key].update(shape=list(value.shape)))


def other_buffer(folder, random):
    """A buffer of another shape or kind, or none, in a file whose manifest knows of it."""
    file = "rank-00000.safetensors"
    key = "buffer:seen"
    value = random.choice([torch.zeros(3), torch.zeros(2, dtype=torch.int64), None])

    def change(entries):
        entries.pop(key)
        if value is not None:
            entries[key] = value

    for item in [path.name for path in files(folder) if path.suffix == ".safetensors"] if value is None else [file]:
        rewrite(folder, item, change)
        dtype = str(value.dtype).removeprefix("torch.") if value is not None else ""
        listed = {} if value is None else {key: {"shape": list(value.shape), "dtype": dtype}}
        edit_part(folder, part_of(item), lambda part, listed=listed: (part["own"].pop(key), part["own"].update(listed)))


def broken_header(folder, random):
    """A file that is no safetensors, with all checksums right."""
    path = data(folder, random)
    content = path.read_bytes()
    path.write_bytes(
        random.choice([b"", b"\xff" * 8 + content[8:], content[:8] + b"[" * (len(content) - 8), b"\0" * 99])
    )
    list_file(folder, path.name)


EDITS = [
    text, version, other_type, other_type, other_type, lost_entry, lost_entry, doubled_entry, out_of_range,
    out_of_range, lost_row, lost_state, twice, swapped_keys, swapped_meaning, outside, listed_outside, foreign_part,
    swapped_parts, lost_part, moved_box,
    other_parameter, other_row_dtype, shuffled, lost_tensor, more_tensors, other_dtype, other_shape, other_streams,
    other_buffer, broken_header,
]  # fmt: skip


def damage(folder, random):
    """Do one of them; its name."""
    chosen = random.choice(FLAWS if random.random() < 0.4 else EDITS)
    chosen(folder, random)
    return chosen.__name__
