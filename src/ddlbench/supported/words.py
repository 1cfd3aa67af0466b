"""The words of docs/frameworks.md: answers as cells, reasons as numbered notes, options as in their YAMLs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddlbench.config.choices import keys
from ddlbench.config.keys import PRECISIONS
from ddlbench.results.rows import group_by


class Case(NamedTuple):
    model: str  # or a family of models
    precision: str


Answers = Mapping[Case, str | None]  # why it is refused; None: it runs


@dataclass
class Reasons:
    """Numbers for the program's messages, in their order on the page. Messages that differ only by the
    framework's name before them and by words with figures in them (3, fp16, resnet50) share the first one's number."""

    messages: dict[str, str] = field(default_factory=dict[str, str])  # the first one of each kind

    def notes(self, reasons: Iterable[str | None]) -> str:
        numbers = sorted({self._number(reason) for reason in reasons if reason is not None})
        return f"({', '.join(f'[{number}]' for number in numbers)})" if numbers else ""

    def _number(self, reason: str) -> int:
        text = re.sub(r"^\w+: ", "", reason)
        kind = re.sub(r"\w*\d\w*", "#", text)
        self.messages.setdefault(kind, text)
        return list(self.messages).index(kind) + 1

    def listed(self) -> str:
        """The numbered messages, and the targets of the numbers' links."""
        numbered = dict(enumerate(self.messages.values(), start=1))
        lines = [f'{number}. <a id="reason-{number}"></a>{text}\n' for number, text in numbered.items()]
        links = [f"[{number}]: #reason-{number}\n" for number in numbered]
        return "".join([*lines, "\n", *links])


def cell(answers: Answers, reasons: Reasons) -> str:
    """Yes, no, or what runs of it, with the numbers of the reasons; a dash where nothing was checked."""
    if not answers:
        return "-"
    runs = [case for case, reason in answers.items() if reason is None]
    words = (scope(runs, answers) or "yes") if runs else "no"
    return f"{words} {reasons.notes(answers.values())}".rstrip()


def scope(some: Iterable[Case], cases: Iterable[Case]) -> str:
    """The models, the precisions, or the precisions of each model that `some` of the cases have; "" for all of them."""
    chosen, complete = _by_model(some), _by_model(cases)
    models = group_by(chosen, lambda model: "" if chosen[model] == complete[model] else ", ".join(chosen[model]))
    if len(models) == 1 and len(chosen) == len(complete):
        return next(iter(models))
    return "; ".join(", ".join(names) + (f" in {words}" if words else "") for words, names in models.items())


def _by_model(cases: Iterable[Case]) -> dict[str, list[str]]:
    by_model = group_by(cases, lambda case: case.model)
    return {model: [name for name in PRECISIONS if Case(model, name) in same] for model, same in by_model.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *lines = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *lines]) + "\n"


def code(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@dataclass(frozen=True)
class Knob:
    """One key of one or more YAMLs. values: as written there, by the YAML's name; meaning: their comments."""

    name: str
    values: dict[str, str]
    meaning: str

    @property
    def default(self) -> str:
        """The value, or each with the frameworks that have it."""
        names = group_by(self.values, self.values.__getitem__)
        return "; ".join(f"`{value}`" + (f" ({', '.join(names[value])})" if len(names) > 1 else "") for value in names)

    def row(self) -> list[str]:
        return [f"`{self.name}`", self.default, self.meaning.replace("|", r"\|")]

    def choices(self) -> list[str]:
        """The words of a comment such as "none | fp16: what travels"."""
        words = [part.partition(":")[0].strip() for part in self.meaning.split("|")]
        return [word for word in words if re.fullmatch(r"\w+", word)]


def knobs(frameworks: Sequence[str]) -> list[Knob]:
    """All keys of YAMLs of one class but those that name it."""
    values: dict[str, dict[str, str]] = {}
    meanings: dict[str, dict[str, None]] = {}
    for framework in frameworks:
        for key in keys("framework", framework):
            values.setdefault(key.name, {})[framework] = key.value
            meanings.setdefault(key.name, {})[key.comment] = None
    return [
        Knob(name, values[name], "; ".join(filter(None, meanings[name])))
        for name in values
        if name not in ("_target_", "name")
    ]
