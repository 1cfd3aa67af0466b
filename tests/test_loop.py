"""The loop's own promises; that it trains right is tests/equality/test_equal_training.py."""

from __future__ import annotations

import ast
from pathlib import Path

import ddlbench.loop
from ddlbench.config.choices import choices


def test_the_loop_names_no_framework() -> None:
    source = Path(ddlbench.loop.__file__).read_text()
    words = {word.lower() for node in ast.walk(ast.parse(source)) for word in names(node)}
    assert words.isdisjoint(set(choices("framework")) - {"single", "tensor"})  # torch's Tensor is no framework
    assert "isinstance" not in words
    assert not any("frameworks" in word for word in words)


def test_the_loop_fits_a_screen() -> None:
    functions = [
        node for node in ast.parse(Path(ddlbench.loop.__file__).read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    assert {function.name for function in functions} == {"train", "validate", "set_learning_rate"}
    assert sum((function.end_lineno or 0) - function.lineno for function in functions) < 60


def names(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [name]
        case ast.ImportFrom(module=module, names=aliases):
            return [module or "", *(alias.name for alias in aliases)]
        case _:
            return []
