"""What others may put into a shared folder: nobody waits for it, reads it without end, follows it or trusts it."""

import json
import os
import signal
import socket
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from full_disks import limited
from lock_holder import locked_by_another
from shared_places import places

from zero3d.config import Config
from zero3d.errors import ConfigError
from zero3d.memory.file_lock import FileLock, holder, is_held
from zero3d.reading import Unreadable, read_bytes
from zero3d.tools.cli import elastic, worker, workers
from zero3d.tools.cli.elastic import Job, run_job
from zero3d.tools.cli.workers import launch
from zero3d.train.folder import Folder
from zero3d.train.lock import LOCK, FolderLock
from zero3d.train.start import Start
from zero3d.train.stop import Stopped, StopRequest
from zero3d.watchdog import own_files, place
from zero3d.watchdog.heartbeat import SIZE, TRAINING, Heartbeat, read_facts, read_record
from zero3d.watchdog.monitor import Monitor
from zero3d.watchdog.own_files import create_own, is_private, open_own, private_folder, read_own, write_whole
from zero3d.watchdog.place import open_folder, remove_if_left
from zero3d.watchdog.stacks import dump_on_signal, stack_file

OTHER = 54321  # a user's number
IS_ROOT = os.getuid() == 0


@pytest.fixture(autouse=True)
def _nobody_waits():
    """End a test that waits for ever, as one would that opens a pipe."""

    def end(*_):
        raise TimeoutError("it waits for what never comes")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def give_away(path, monkeypatch):
    """Make a file or folder another user's: by root it is, else every file seems to be."""
    if IS_ROOT:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)
    else:
        monkeypatch.setattr(own_files, "os", SimpleNamespace(**{**vars(os), "getuid": lambda: OTHER}))


def bind(path):
    """Leave a socket; its path may be longer than a socket's address."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def open_to_all(path):
    """A folder that is not closed to others, whatever the umask is."""
    path.mkdir()
    path.chmod(0o755)


ODD = {
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: path.write_bytes(bytes(SIZE - 1)),
    "long": lambda path: path.write_bytes(bytes(SIZE + 1)),
    "nobody's": lambda path: path.write_bytes(bytes(SIZE)),  # of process 0
    "a negative process": lambda path: path.write_bytes(b"\xff" * SIZE),
    "a terabyte": sparse,
    "a pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a loop": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: path.symlink_to("nowhere"),
    "a folder": open_to_all,
    "a socket": bind,
}  # fmt: skip


@pytest.fixture(params=ODD)
def odd(request, tmp_path):
    """A file in the place of a rank's record that is none."""
    ODD[request.param](tmp_path / "rank-0")
    return tmp_path / "rank-0"


# --- records --------------------------------------------------------------------------------------


def test_what_is_no_record_is_no_rank_and_a_record_beside_it_is_read(odd):
    Heartbeat.begin(odd.parent, 1, TRAINING)
    monitor = Monitor(odd.parent)
    assert list(monitor.beats()) == [1]
    assert [state.rank for state in monitor.states()] == [1]
    assert monitor.facts().world is None


def test_what_is_no_record_is_joined_by_nobody_and_no_obstacle_to_a_new_one(odd):
    target = odd.parent / "nowhere"
    Heartbeat.join(str(odd.parent), 0).step = 3
    Heartbeat.begin(odd.parent, 0, TRAINING).step = 5
    if odd.is_dir():
        return
    assert read_record(odd).step == 5
    assert not odd.is_symlink()
    assert not target.exists()


def test_a_record_of_another_user_is_not_read_joined_or_killed_for(tmp_path, monkeypatch):
    Heartbeat.begin(tmp_path, 0, TRAINING).tell(timeout=1.0)
    assert read_record(tmp_path / "rank-0").pid == os.getpid()
    for name in ("rank-0", "rank-0.json"):
        give_away(tmp_path / name, monkeypatch)
    assert Monitor(tmp_path).beats() == {}
    assert read_facts(tmp_path / "rank-0") == {}
    Heartbeat.join(str(tmp_path), 0).step = 9
    assert (tmp_path / "rank-0").read_bytes()[24:32] == bytes(8)
    with pytest.raises(PermissionError, match=f"it is user {OTHER if IS_ROOT else os.getuid()}'s"):
        open_own(tmp_path / "rank-0")


def test_a_link_to_a_record_of_ours_is_none(tmp_path):
    Heartbeat.begin(tmp_path, 7, TRAINING)
    (tmp_path / "rank-0").symlink_to("rank-7")
    assert list(Monitor(tmp_path).beats()) == [7]


@pytest.mark.parametrize(
    "text", [b"3", b"[]", b"", b"\xff", b"[" * 99_999, b'{"timeout": ' + b"9" * 9999 + b"}", b"null"]
)
def test_odd_facts_are_none(tmp_path, text):
    Heartbeat.begin(tmp_path, 0, TRAINING)
    (tmp_path / "rank-0.json").write_bytes(text)
    assert Monitor(tmp_path).facts() == Monitor(tmp_path / "nowhere").facts()
    assert [state.axes for state in Monitor(tmp_path).states()] == [{}]


@pytest.mark.parametrize("limit", ["-1", "NaN", "Infinity", '"x"', "null", "1e999", "9" * 400])
def test_an_odd_limit_is_none(tmp_path, limit):
    Heartbeat.begin(tmp_path, 0, TRAINING)
    (tmp_path / "rank-0.json").write_text(f'{{"timeout": {limit}, "slow_timeout": 7}}')
    assert (Monitor(tmp_path).facts().timeout, Monitor(tmp_path).facts().slow_timeout) == (float("inf"), 7.0)


def test_stacks_are_written_to_a_new_file_and_never_through_a_link(tmp_path):
    victim = tmp_path / "mine"
    victim.write_text("precious")
    stack_file(tmp_path, 0).symlink_to(victim)
    dump_in_child(tmp_path)
    assert victim.read_text() == "precious"
    assert not stack_file(tmp_path, 0).is_symlink()


def dump_in_child(folder):
    """Let a child announce its stacks: this process keeps its own handler."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dump_on_signal(folder, 0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path, monkeypatch):
    return places(monkeypatch, tmp_path)


def gone():
    """The number of a process that is gone."""
    done = subprocess.Popen(["true"])
    done.wait()
    return done.pid


def test_what_others_put_beside_ours_stops_no_start_and_stays(shared, odd):
    """Names of folders that a killed launcher would have left, in both places."""
    dead, mine = gone(), place._prefix()
    for where in (shared, shared.parent / "tmp"):
        odd_file = where / f"{mine}{dead}-file"
        os.rename(odd, odd_file) if where == shared else os.mkfifo(odd_file)
        (where / f"{mine}{dead}-link").symlink_to(shared.parent)
        (where / f"{mine}{'9' * 200}-x").mkdir(mode=0o700)
        (where / f"{mine}{dead}-open").mkdir()
        os.mkfifo(where / f"{mine}{dead}-open" / "rank-0")
        (where / f"{mine}{dead}-open").chmod(0o755)
    before = sorted(shared.parent.rglob("*"))
    folder = open_folder(os.getpid(), ["a run"])
    assert is_private(folder)
    assert sorted({*shared.parent.rglob("*")} - {folder}) == before


def test_a_folder_of_another_user_is_not_looked_into_and_stays(shared, monkeypatch):
    left = shared / f"{place._prefix()}{gone()}-left"
    left.mkdir(mode=0o700)
    os.mkfifo(left / "rank-0")
    give_away(left, monkeypatch)
    assert not is_private(left)
    if IS_ROOT:
        assert open_folder(os.getpid(), ["a run"]).parent == shared
    remove_if_left(left)
    assert left.exists()


def test_a_folder_of_ours_is_removed_whatever_is_in_it(shared, odd):
    left = shared / f"{place._prefix()}{gone()}-left"
    left.mkdir(mode=0o700)
    os.rename(odd, left / "rank-0")
    (shared.parent / "precious").mkdir()
    (left / "rank-1").symlink_to(shared.parent / "precious")
    open_folder(os.getpid(), ["a run"])
    assert not left.exists()
    assert (shared.parent / "precious").exists()


@pytest.mark.parametrize("how", ["another user's", "open to all", "a link", "a file", "a pipe", "a dangling link"])
def test_a_name_that_is_taken_is_not_used(shared, monkeypatch, how):
    folder = open_folder(os.getpid(), ["a run"])
    folder.rmdir()
    aside = shared.parent / "aside"
    aside.mkdir(mode=0o700)
    if how in ("another user's", "open to all"):
        folder.mkdir(mode=0o700)
        folder.chmod(0o700 if how == "another user's" else 0o777)
        if how == "another user's":
            give_away(folder, monkeypatch)
    elif how == "a file":
        folder.touch()
    elif how == "a pipe":
        os.mkfifo(folder)
    else:
        folder.symlink_to(aside if how == "a link" else shared.parent / "nowhere")
    assert open_folder(os.getpid(), ["a run"]) is None
    assert list(aside.iterdir()) == []
    assert not (shared.parent / "nowhere").exists()


def test_of_a_crowded_place_only_so_much_is_looked_at(shared, monkeypatch):
    monkeypatch.setattr(place, "MOST_ENTRIES", 3)
    looked = []
    monkeypatch.setattr(place, "remove_if_left", looked.append)
    for number in range(9):
        (shared / f"{place._prefix()}{number}-x").touch()
    assert open_folder(os.getpid(), ["a run"]).parent == shared
    assert len(looked) == 3


def test_without_a_folder_the_first_rank_of_a_host_says_that_nobody_watches(monkeypatch, capsys):
    monkeypatch.setattr(worker, "open_folder", lambda *_: None)
    monkeypatch.delenv(worker.LAUNCHED, raising=False)
    monkeypatch.delenv(worker.WATCH, raising=False)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        worker.begin_heartbeat({}).step = 1
    assert capsys.readouterr().err.count("the watchdog does not watch the ranks of this host") == 1


def test_a_temporary_folder_is_private_and_where_none_can_be_made_the_error_says_what_to_type(tmp_path, monkeypatch):
    with private_folder() as folder:
        assert is_private(folder)
    assert not folder.exists()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigError, match=r"nowhere \(No such file .*\): see to it that nobody removes this folder, or .*TMPDIR=FOLDER"
    ):
        private_folder().__enter__()


# --- files ----------------------------------------------------------------------------------------


def test_what_is_read_is_decided_of_the_open_file_and_never_more_than_asked(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert (read_own(path, 4), read_own(path, 99, 8), read_own(path, 1, 99)) == (b"0123", b"89", b"")
    looked = os.fstat
    other = SimpleNamespace(st_mode=stat.S_IFREG | 0o600, st_uid=os.getuid() + 1)
    for found in (other, SimpleNamespace(st_mode=stat.S_IFIFO | 0o600, st_uid=os.getuid())):
        monkeypatch.setattr(own_files.os, "fstat", lambda _, found=found: found)
        with pytest.raises(OSError, match=r"it is (user|a pipe)"):
            open_own(path)
    monkeypatch.setattr(own_files.os, "fstat", looked)
    assert read_own(path, 4) == b"0123"


def test_a_new_file_takes_the_place_of_a_link_and_is_closed_to_others(tmp_path):
    victim, path = tmp_path / "mine", tmp_path / "file"
    victim.write_text("precious")
    path.symlink_to(victim)
    os.close(create_own(path))
    assert (path.lstat().st_mode, path.read_bytes()) == (stat.S_IFREG | 0o600, b"")
    (tmp_path / ".other.new").symlink_to(victim)
    write_whole(tmp_path / "other", "said")
    assert ((tmp_path / "other").read_text(), victim.read_text()) == ("said", "precious")


def test_a_file_that_cannot_be_written_whole_leaves_the_one_before_and_no_part(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "before")
    with pytest.raises(OSError, match="File too large"), limited(4096):
        write_whole(path, "x" * 10_000)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("before", [path])


@pytest.mark.parametrize("how", ["a pipe", "endless", "a folder", "a socket"])
def test_a_regular_file_is_wanted_of_what_a_user_names_too_and_a_swap_after_the_look_is_noticed(
    tmp_path, monkeypatch, how
):
    path = tmp_path / "file"
    ODD[how](path)
    with pytest.raises((OSError, Unreadable), match=r"not a regular file|Is a directory"):
        read_bytes(path)
    monkeypatch.setattr("zero3d.reading.check_regular", lambda _: 0)  # as it was a moment ago
    with pytest.raises((OSError, Unreadable), match=r"not a regular file|Is a directory|No such device"):
        read_bytes(path)


def test_odd_files_of_an_output_folder_are_as_good_as_none(tmp_path):
    for name in ("metrics.jsonl", ".run", "lost-slots"):
        os.mkfifo(tmp_path / name)
    assert (Folder(tmp_path).last_step, Folder(tmp_path).run_id) == (0, "")
    assert elastic._named(Folder(tmp_path)) == []


# --- locks ----------------------------------------------------------------------------------------


def test_a_lock_is_never_written_through_a_link_or_into_a_pipe(tmp_path):
    victim, lock = tmp_path / "mine", tmp_path / LOCK
    victim.write_text("precious, and longer than what a lock says of its holder " * 9)
    before = victim.read_text()
    lock.symlink_to(victim)
    for _ in range(2):
        with pytest.raises(OSError, match=r"symbolic links|it is a pipe"):
            FileLock().acquire(lock)
        with pytest.raises(ConfigError, match=r"\.lock is not a file that a run has locked .*: remove it, or"):
            FolderLock().acquire(tmp_path)
        assert not is_held(lock)
        lock.unlink()
        os.mkfifo(lock)
    assert holder(lock)[0] == "process unknown on host unknown since unknown"
    assert victim.read_text() == before


def test_a_holder_that_says_too_much_is_unknown(tmp_path):
    with locked_by_another(tmp_path):
        sparse(tmp_path / LOCK)
        assert is_held(tmp_path / LOCK)
        assert holder(tmp_path / LOCK)[0] == "process unknown on host unknown since unknown"


# --- a launcher that waits ------------------------------------------------------------------------


def test_inside_at_once_the_first_signal_ends_what_waits_also_one_of_before():
    with StopRequest() as request:
        with pytest.raises(Stopped) as stop, request.at_once():
            signal.raise_signal(signal.SIGTERM)
        assert stop.value.signal == request.signal == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)  # outside it is a request
        with pytest.raises(Stopped), request.at_once():
            pytest.fail("begun after a request to stop")


def interrupted(*_):
    """What a launcher might wait in; the signal must end it."""
    signal.raise_signal(signal.SIGTERM)
    pytest.fail("it went on after SIGTERM")


def test_a_launcher_that_waits_before_its_first_worker_ends_at_the_first_sigterm(monkeypatch, capsys):
    monkeypatch.setattr(workers, "open_folder", interrupted)
    monkeypatch.setattr(workers, "start_process", lambda *_: pytest.fail("a worker was started"))
    assert launch(["train"], 2) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.startswith("stopped by SIGTERM outside of training")
    assert run_job(Job(["train"], Config(), Start(), 2)) == 128 + signal.SIGTERM
    monkeypatch.setattr(elastic.Slots, "choose", interrupted)
    assert run_job(Job(["train"], Config(), Start(), 2)) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.count("stopped by SIGTERM outside of training") == 2


def test_what_a_worker_leaves_is_read_in_part_and_only_if_it_is_its_own(tmp_path, capsys):
    lines = [f"line {number}" for number in range(200_000)]
    (tmp_path / "output").write_text("\n".join(lines))
    died = workers.Worker(1, SimpleNamespace(poll=lambda: 3), tmp_path)
    assert workers.report_failure([died]) == 1
    assert capsys.readouterr().err.splitlines()[1:] == lines[-workers.LAST_LINES :]
    for name in ("output", workers.ERROR_NAME, workers.OUTPUT):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    assert workers.report_failure([died]) == 1
    assert (workers.chosen_output(died), workers.message_of(died)) == ("", "")
    (tmp_path / workers.ERROR_NAME).unlink()
    error = {"message": {"message": "ConfigError: x", "extraInfo": {"py_callstack": ""}}}
    (tmp_path / workers.ERROR_NAME).write_text(json.dumps(error))
    assert workers.message_of(died) == "ConfigError: x"
