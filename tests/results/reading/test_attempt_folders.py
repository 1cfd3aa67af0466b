"""Folders are searched for attempts: through links, and each folder once."""

from __future__ import annotations

import os

import pytest

from ddlbench.results.reading.attempts import search


def attempt(*parts):
    folder = parts[0].joinpath(*parts[1:], "attempt-1")
    folder.mkdir(parents=True)
    return folder


def test_every_attempt_at_any_depth(tmp_path):
    folders = [attempt(tmp_path, "run"), attempt(tmp_path, "a", "b", "c", "d", "run"), attempt(tmp_path, ".old", "run")]
    assert set(search([tmp_path]).folders) == set(folders)


@pytest.mark.parametrize("linked", [".", "elsewhere", "elsewhere/run", "elsewhere/run/attempt-1"])
def test_links_to_results_runs_and_attempts_are_followed(tmp_path, linked):
    folder = attempt(tmp_path, "there", "elsewhere", "run")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "link").symlink_to(tmp_path / "there" / linked)
    result = search([tmp_path / "results"])
    assert [found.resolve() for found in result.folders] == [folder.resolve()]
    assert result.notes == []


def test_circles_end_and_the_real_folder_is_the_one_that_is_named(tmp_path):
    folder = attempt(tmp_path, "z", "run")
    for place, target in (("a", "."), ("b", "z"), ("z/run/up", "../.."), ("z/run/attempt-1/self", "."), ("c", "b")):
        (tmp_path / place).symlink_to(target)
    result = search([tmp_path, tmp_path])
    assert result.folders == [folder]
    assert result.notes == []


def test_a_link_hides_nothing_that_lies_deeper(tmp_path):
    folder = attempt(tmp_path, "z", "1", "2", "3", "4", "run")
    (tmp_path / "a").symlink_to("z")
    assert search([tmp_path]).folders == [folder]


def test_below_a_link_to_much_only_what_may_be_results(tmp_path):
    attempt(tmp_path, "home", "project", "results", "run")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "link").symlink_to(tmp_path)
    assert search([tmp_path / "results"]).folders == []
    assert len(search([tmp_path / "results", tmp_path / "home" / "project"]).folders) == 1


def test_broken_links_are_named(tmp_path):
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "file").symlink_to(os.devnull)
    assert [note.text for note in search([tmp_path]).notes] == [
        f"{tmp_path}/gone cannot be read (No such file or directory)",
        f"{tmp_path}/self cannot be read (Too many levels of symbolic links)",
    ]


def test_what_has_the_name_of_an_attempt_and_is_no_folder_is_named(tmp_path):
    attempt(tmp_path, "run")
    os.mkfifo(tmp_path / "run" / "attempt-2")
    (tmp_path / "run" / "attempt-3").write_text("")
    (tmp_path / "run" / "attempt-4").symlink_to(os.devnull)
    (tmp_path / "run" / "attempt-5").symlink_to("nowhere")
    (tmp_path / "run" / "attempt-1.tar").write_text("")
    reasons = dict.fromkeys((2, 3, 4), "it is not a folder") | {5: "No such file or directory"}
    assert [note.text for note in search([tmp_path]).notes] == [
        f"{tmp_path}/run/attempt-{number} cannot be read ({reason})" for number, reason in reasons.items()
    ]
