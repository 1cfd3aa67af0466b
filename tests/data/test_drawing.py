"""The sample images' pixels: exact figures, and bytes that must never change."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from numpy.random import RandomState

from ddlbench.data.samples import FIGURES, SIZES, draw, stretched, turned


def at(name, *points):
    """The figure's inks at points (u, v)."""
    u, v = np.array(points, np.int32).T
    return FIGURES[name](u, v).astype(int).tolist()


@pytest.mark.parametrize(
    ("name", "points", "inks"),
    [
        ("ring", [(0, 0), (200, 0), (0, -200), (257, 0)], [0, 1, 1, 0]),
        ("cross", [(0, 0), (240, 60), (60, -240), (100, 100)], [1, 1, 1, 0]),
        ("triangle", [(0, 240), (0, -150), (190, -150), (190, 100), (0, -170)], [1, 1, 1, 0, 0]),
        ("crescent", [(-200, 0), (100, 0), (0, 300)], [1, 0, 0]),
        ("target", [(0, 0), (60, 0), (0, 110), (160, 0), (0, -250), (260, 0)], [1, 2, 1, 2, 1, 0]),
        ("stripes", [(0, 0), (64, 0), (64, 100), (-1, 0), (200, 200)], [1, 2, 2, 2, 0]),
        ("checkers", [(0, 0), (64, 0), (64, 64), (219, 219), (221, 0)], [1, 2, 1, 1, 0]),
        ("star", [(0, 0), (200, 10), (-10, 200), (100, 100)], [2, 1, 1, 0]),
        ("dots", [(0, 0), (64, 64), (64, 20), (-64, 64)], [0, 1, 0, 1]),
        ("zigzag", [(64, 0), (64, 32), (96, 0), (200, 200)], [1, 2, 2, 0]),
    ],
)
def test_figures_by_hand(name, points, inks):
    assert at(name, *points) == inks


def test_turning_is_a_rotation():
    for turn in range(32):
        angle = turn * math.pi / 16
        u, v = turned(np.array([100], np.int32), np.array([0], np.int32), turn, radius=100)
        assert (int(u[0]), int(v[0])) == pytest.approx((256 * math.cos(angle), -256 * math.sin(angle)), abs=1.1)


def test_stretching_is_linear_between_points():
    grid = np.array([[[0, 64], [128, 192]]], np.int16)
    assert stretched(grid, 2, 4).tolist() == [[[0, 16, 32, 48], [64, 80, 96, 112]]]


def test_pictures_fill_the_range_and_the_sizes():
    images = [draw(index % 10, RandomState([7, index])) for index in range(40)]
    assert {image.shape[1::-1] for image in images} <= set(SIZES)
    assert len({image.shape for image in images}) > 3
    together = np.concatenate([image.ravel() for image in images])
    assert (together.min(), together.max(), together.dtype) == (0, 255, np.uint8)
    assert 100 < together.mean() < 156


def test_pixels_are_pinned():
    """A change of a picture needs a new samples.IMAGES_VERSION: sets of one name must be equal everywhere."""
    digest = hashlib.sha256()
    for label in range(10):
        digest.update(draw(label, RandomState([0, label])).tobytes())
    assert digest.hexdigest() == "4af5cf399872fac5ee0997e99fba303afdb1240297a35b9336ab2f0e95195dfe"
