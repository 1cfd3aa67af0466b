"""docs/frameworks.md: what runs with what, or why not. `python -m scripts.pages.frameworks` prints it.

Every cell is the result of a framework's own `check`, which needs no weights and starts nothing. The options of a
framework and their meanings are read from its YAML; frameworks.md, beside this file, has the text of the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddlbench.config.choices import title
from ddlbench.config.compose import quiet
from ddlbench.config.keys import BATCH_PER_GPU, PRECISIONS
from ddlbench.results.rows import group_by
from ddlbench.texts import markdown_table
from scripts.pages.survey import COMPUTING, CPU, RANKS, UNCHANGED, Answers, Case, Change, Questions, Survey, knobs

PAGE = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")


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
    """Yes, no, or the cases that run, with the numbers of the reasons; a dash where nothing was checked."""
    if not answers:
        return "-"
    runs = [case for case, reason in answers.items() if reason is None]
    words = (scope(runs, answers) or "yes") if runs else "no"
    return f"{words} {reasons.notes(answers.values())}".rstrip()


def scope(some: Iterable[Case], cases: Iterable[Case]) -> str:
    """The models, the precisions, or the precisions of each model that `some` of the cases have; "" for all of them."""
    chosen, complete = (
        {model: [name for name in PRECISIONS if Case(model, name) in same] for model, same in by_model.items()}
        for by_model in (group_by(of, lambda case: case.model) for of in (some, cases))
    )
    models = group_by(chosen, lambda model: "" if chosen[model] == complete[model] else ", ".join(chosen[model]))
    if len(models) == 1 and len(chosen) == len(complete):
        return next(iter(models))
    return "; ".join(", ".join(names) + (f" in {words}" if words else "") for words, names in models.items())


def page(survey: Survey) -> str:
    """The whole page. Unavailable for a framework that cannot answer without its library."""
    reasons = Reasons()
    fewer = [name for name in survey.names if survey.ranks[name] != RANKS[0]]

    def table(heads: Iterable[str], answers: Callable[[str], Iterable[Answers]]) -> str:
        rows = [[f"`{name}`", *(cell(answer, reasons) for answer in answers(name))] for name in survey.names]
        return markdown_table(["framework", *heads], rows)

    def options(changes: Mapping[str, Change]) -> str:
        heads = [f"`{words.removeprefix('train.').removesuffix('=true')}`" for words in changes]
        return table(heads, lambda name: (survey.changed(name, change)[0] for change in changes.values()))

    return PAGE.format(
        ranks=f"{RANKS[0]} GPUs" + (f" ({code(fewer)}: {RANKS[1]})" if fewer else ""),
        batch=BATCH_PER_GPU,
        models=table(
            survey.models, lambda name: (survey.answers(name, {key: one}) for key, one in survey.models.items())
        ),
        computing=options(COMPUTING),
        updating=options(survey.updating),
        own="".join(_section(survey, group, reasons) for group in survey.groups).removesuffix("\n"),
        cpu=_on_cpu(survey, reasons),
        reasons=reasons.listed().removesuffix("\n"),
    )


def _section(survey: Survey, group: list[str], reasons: Reasons) -> str:
    """Frameworks of one class: what they are, their options, and the effects of the options."""
    options, several = knobs(group), len(group) > 1

    def effects(name: str, change: Change) -> str:
        """The cases that an option refuses, for each reason, and the cases that run only with it."""
        (answers, gained), texts = survey.changed(name, change), list[str]()
        notes = {case: reasons.notes([reason]) for case, reason in answers.items() if reason is not None}
        for note in dict.fromkeys(notes.values()):
            where = scope([case for case, number in notes.items() if number == note], answers)
            texts.append(f"not {where} {note}" if where else f"no {note}")
        if gained:
            texts.append(f"also {scope(gained, survey.answers(name, survey.families))}")
        return " and ".join(texts)

    rows = list[list[str]]()
    for key, (meaning, values) in options.items():
        names = group_by(values, values.__getitem__)  # the frameworks that have each value
        defaults = [f"`{value}`" + (f" ({', '.join(names[value])})" if len(names) > 1 else "") for value in names]
        rows.append([f"`{key}`", "; ".join(defaults), meaning.replace("|", r"\|")])
    parts = [
        f"### {', '.join(group)}\n",
        "".join(f"- `{name}`: {title('framework', name)}\n" for name in group)
        if several
        else title("framework", group[0]) + "\n",
        markdown_table(["option", "default", "meaning"], rows) if rows else "No options.\n",
        _lines(survey.tried(options), effects, several),
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
        here, _ = survey.changed(name, change, CPU)
        return cell(here, reasons) if here != survey.changed(name, change)[0] else ""

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


def code(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    with quiet():
        text = page(Survey.compose())
    print(text, end="")
