"""docs/frameworks.md: what runs with what, and the reason where it does not. `python -m ddlbench.supported` prints it.

Every cell is the result of a framework's own `check`, which needs no weights and starts nothing. The options of a
framework and their meanings are read from its YAML; page.md, beside this file, has the text of the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from ddlbench.config.choices import title
from ddlbench.config.compose import quiet
from ddlbench.config.keys import BATCH_PER_GPU, PRECISIONS
from ddlbench.results.rows import group_by
from ddlbench.supported.survey import COMPUTING, CPU, RANKS, UNCHANGED, Answers, Case, Change, Questions, Survey, knobs
from ddlbench.texts import markdown_table

PAGE = files("ddlbench.supported").joinpath("page.md").read_text(encoding="utf-8")


@dataclass
class Reasons:
    """Numbers for the program's messages, in their order on the page. Messages that differ only by the
    framework's name before them and by words with figures in them (3, fp16, resnet50) share the first one's number."""

    messages: dict[str, str] = field(default_factory=dict[str, str])  # the first one of each kind

    def notes(self, reasons: Iterable[str | None]) -> str:
        numbers = set[int]()
        for reason in filter(None, reasons):
            text = re.sub(r"^\w+: ", "", reason)
            kind = re.sub(r"\w*\d\w*", "#", text)
            self.messages.setdefault(kind, text)
            numbers.add(list(self.messages).index(kind) + 1)
        return f"({', '.join(f'[{number}]' for number in sorted(numbers))})" if numbers else ""

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


def code(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page(survey: Survey) -> str:
    """The whole page. Unavailable for a framework that cannot answer without its library."""
    reasons = Reasons()
    fewer = [name for name in survey.names if survey.ranks[name] != RANKS[0]]
    ranks = f"{RANKS[0]} GPUs" + (f" ({code(fewer)}: {RANKS[1]})" if fewer else "")
    models = [
        [f"`{name}`", *(cell(survey.answers(name, {model: of}), reasons) for model, of in survey.models.items())]
        for name in survey.names
    ]
    return PAGE.format(
        ranks=ranks,
        batch=BATCH_PER_GPU,
        models=markdown_table(["framework", *survey.models], models),
        computing=_shared(survey, COMPUTING, reasons),
        updating=_shared(survey, survey.updating, reasons),
        own="".join(_section(survey, group, reasons) for group in survey.groups).removesuffix("\n"),
        cpu=_on_cpu(survey, reasons),
        reasons=reasons.listed().removesuffix("\n"),
    )


def _shared(survey: Survey, changes: Mapping[str, Change], reasons: Reasons) -> str:
    rows = [
        [f"`{name}`", *(cell(survey.changed(name, change), reasons) for change in changes.values())]
        for name in survey.names
    ]
    heads = [f"`{words.removeprefix('train.').removesuffix('=true')}`" for words in changes]
    return markdown_table(["framework", *heads], rows)


def _section(survey: Survey, group: list[str], reasons: Reasons) -> str:
    """Frameworks of one class: what they are, their options, and the effects of the options."""
    keys, several = knobs(group), len(group) > 1

    def effects(name: str, change: Change) -> str:
        """The cases that an option refuses, for each reason, and the cases that run only with it."""
        answers, texts = survey.changed(name, change), list[str]()
        notes = {case: reasons.notes([reason]) for case, reason in answers.items() if reason is not None}
        for note in dict.fromkeys(notes.values()):
            where = scope([case for case, number in notes.items() if number == note], answers)
            texts.append(f"not {where} {note}" if where else f"no {note}")
        if gained := survey.gained(name, change):
            texts.append(f"also {scope(gained, survey.answers(name, survey.families))}")
        return " and ".join(texts)

    parts = [
        f"### {', '.join(group)}\n",
        "".join(f"- `{name}`: {title('framework', name)}\n" for name in group)
        if several
        else title("framework", group[0]) + "\n",
        markdown_table(["option", "default", "meaning"], [key.row() for key in keys]) if keys else "No options.\n",
        _lines(survey.tried(keys), effects, several),
    ]
    return "\n".join(filter(None, parts)) + "\n"


def _on_cpu(survey: Survey, reasons: Reasons) -> str:
    """One line per option whose answers differ on CPU."""
    shared = {"nothing changed": UNCHANGED, **COMPUTING, **survey.updating}
    questions: Questions = {words: dict.fromkeys(survey.names, change) for words, change in shared.items()}
    for group in survey.groups:
        for words, asked in survey.tried(knobs(group)).items():
            questions.setdefault(f"framework.{words}", {}).update(asked)

    def answer(name: str, change: Change) -> str:
        here = survey.changed(name, change, CPU)
        return cell(here, reasons) if here != survey.changed(name, change) else ""

    return _lines(questions, answer)


def _lines(questions: Questions, text: Callable[[str, Change], str], named: bool = True) -> str:
    """A line for each question: frameworks with the same text are together. No line if all texts are empty."""
    lines = ""
    for words, asked in questions.items():
        answers = {name: answer for name, change in asked.items() if (answer := text(name, change))}
        frameworks = group_by(answers, answers.__getitem__)
        parts = [f"{code(names)} {answer}" if named else answer for answer, names in frameworks.items()]
        lines += f"- `{words}`: {'; '.join(parts)}\n" if parts else ""
    return lines


if __name__ == "__main__":
    with quiet():
        text = page(Survey.compose())
    print(text, end="")
