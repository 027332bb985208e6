"""The folders that users of a host share, in a test's own."""

from zero3d.watchdog import place


def places(monkeypatch, folder):
    """Have a shared and a temporary place in a test's folder; the shared one."""
    for name in ("shm", "tmp"):
        (folder / name).mkdir()
    monkeypatch.setattr(place, "SHARED", folder / "shm")
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    return folder / "shm"
