"""One sentence: what takes the time of a predicted step, or why it does not fit."""

from __future__ import annotations

from dataclasses import asdict

from ddlbench.oracle.setting import Outcome
from ddlbench.texts import GIB, bytes_text


def reason(
    gpus: int, outcome: Outcome, step_s: float, wait_s: float | None, capacity: float | None, fits: bool | None
) -> str:
    """capacity: bytes of the device's memory; None: unknown."""
    if capacity is None or fits:
        return _time(gpus, outcome, step_s, wait_s)
    needed = f"{outcome.memory.total / GIB:.1f} GiB of {capacity / GIB:.1f} GiB"
    if fits is None:
        time = _time(gpus, outcome, step_s, wait_s)
        return f"{time}; it may not fit: it needs about {needed} (--exact-memory rehearses it)"
    part, bytes_ = max(asdict(outcome.memory).items(), key=lambda item: item[1])
    return f"does not fit: it needs {needed}, of which {part} {bytes_ / GIB:.1f} GiB"


def _time(gpus: int, outcome: Outcome, step_s: float, wait_s: float | None) -> str:
    where = f"at {gpus} GPU{'s' if gpus > 1 else ''}"
    largest = max(outcome.messages, key=lambda message: message.exposed, default=None)
    shares = {
        "computing": outcome.compute_s,
        "bubble": outcome.bubble_s,
        "data": wait_s or 0.0,
        "communication": largest.exposed if largest else 0.0,
    }
    lost = max((name for name in shares if name != "computing"), key=lambda name: shares[name])
    if shares[lost] < 0.05 * step_s:
        return f"{where} computing takes {outcome.compute_s / step_s:.0%} of the step{_hidden(outcome)}"
    share = f"{shares[lost] / step_s:.0%} of the step: computing takes {outcome.compute_s / step_s:.0%}"
    if lost == "bubble":
        return f"{where} stages wait for each other for {share} ({', '.join(outcome.notes)})"
    if lost == "data":
        return f"{where} the loader is waited for during {share}"
    assert largest is not None
    return f"{where} the {largest.what} ({bytes_text(largest.bytes_)}) takes {share}{_hidden(outcome)}"


def _hidden(outcome: Outcome) -> str:
    sent = outcome.hidden_s + outcome.exposed_s
    if outcome.hidden_s < 0.01 * outcome.step_s:
        return ""
    return f"; {outcome.hidden_s / sent:.0%} of the communication is hidden behind computing"
