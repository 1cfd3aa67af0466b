from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddlbench.data.home import home, make_folder
from ddlbench.errors import UserError
from ddlbench.files import ABANDONED_S, replacing, unfinished_path
from tests.support.killed import ended_process


def test_home_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("DDLBENCH_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("DDLBENCH_HOME")
    assert home() == Path.home() / ".cache" / "ddlbench"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    for name in ("DDLBENCH_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a number of a user that the container does not know
    with pytest.raises(UserError, match=r"^the program needs a folder for its files.*: set DDLBENCH_HOME$"):
        home()


@pytest.mark.parametrize("empty", [False, True])
def test_folder_appears_whole(tmp_path, empty):
    folder = tmp_path / "new" / "set"
    if empty:
        folder.mkdir(parents=True)

    def make(temporary):
        assert not (folder.is_dir() and any(folder.iterdir()))
        (temporary / "a").write_text("1")

    make_folder(folder, make)
    assert (folder / "a").read_text() == "1"
    assert list(folder.parent.iterdir()) == [folder]
    assert folder.stat().st_mode & 0o777 == 0o755


def test_interrupted_maker_leaves_nothing(tmp_path):
    def make(temporary):
        (temporary / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_folder(tmp_path / "set", make)
    assert list(tmp_path.iterdir()) == []


def test_slower_of_two_makers_discards_its_folder(tmp_path):
    folder = tmp_path / "set"

    def fast(temporary):
        (temporary / "a").write_text("first")

    def slow(temporary):
        make_folder(folder, fast)
        (temporary / "a").write_text("second")

    make_folder(folder, slow)
    assert (folder / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]


def test_unwritable_place_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make .*set DDLBENCH_HOME, or choose another folder"):
        make_folder(tmp_path / "file" / "set", lambda _: None)


def left_by(path, pid, place=None):
    """A leftover as `path`'s maker with that process number leaves it, here or in the place of other processes."""
    name, *here, _, mark = unfinished_path(path, path.parent).name.split("~")
    left = path.parent / "~".join([name, *(place or here), str(pid), mark])
    left.mkdir(parents=True)
    (left / "half").write_text("")
    return left


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_the_next_maker_removes_what_a_killed_one_left(tmp_path, kind):
    path = tmp_path / "set"
    dead, alive = left_by(path, ended_process().pid), left_by(path, os.getppid())
    elsewhere = left_by(path, 1, ("other-node", "7"))
    forgotten = left_by(path, 2, ("other-node", "7"))
    of_another_path = left_by(tmp_path / "set2", ended_process().pid)
    old = time.time() - ABANDONED_S - 60
    for part in (forgotten / "half", forgotten):
        os.utime(part, (old, old))
    if kind == "folder":
        make_folder(path, lambda temporary: (temporary / "a").touch())
    else:
        with replacing(path) as file:
            file.write(b"1")
    assert sorted(tmp_path.iterdir()) == sorted([path, alive, elsewhere, of_another_path])
    assert not dead.exists()


def test_a_maker_that_is_killed_leaves_what_the_next_one_knows(tmp_path):
    """The name it leaves, not one made up here."""
    script = "import os, sys; from pathlib import Path; from ddlbench.data.home import *\n"
    script += "make_folder(Path(sys.argv[1]), lambda temporary: os.kill(os.getpid(), 9))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "set")], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    make_folder(tmp_path / "set", lambda temporary: None)
    assert list(tmp_path.iterdir()) == [tmp_path / "set"]
