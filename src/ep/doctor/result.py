"""What a check gives, what it is given, and how it is kept from ending the others."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ep.errors import EpError, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_ALIKE = 4
"""Findings of one check and mark that are told each; of more, the first and how many."""


class Mark(StrEnum):
    """How a check ended. Only `FAIL` changes the exit code."""

    PASS = "pass"  # noqa: S105 - no password
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence of a check.

    Attributes
    ----------
    mark : Mark
    words : str
        What was found.
    remedy : str
        What to do; there is one for each warn and fail.
    """

    mark: Mark
    words: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if bool(self.remedy) != (self.mark in (Mark.WARN, Mark.FAIL)):
            raise ValueError(f"{self.mark} with remedy {self.remedy!r}: {self.words}")


def passed(words: str) -> Finding:
    """All is well."""
    return Finding(Mark.PASS, words)


def skipped(words: str) -> Finding:
    """There was nothing to check, or no need."""
    return Finding(Mark.SKIP, words)


def warned(words: str, remedy: str) -> Finding:
    """It works, but slowly, or perhaps not everywhere."""
    return Finding(Mark.WARN, words, remedy)


def failed(words: str, remedy: str) -> Finding:
    """It will not work."""
    return Finding(Mark.FAIL, words, remedy)


@dataclasses.dataclass(frozen=True)
class Result:
    """A finding and where it comes from.

    Attributes
    ----------
    area, name : str
        Of the check.
    finding : Finding
    ranks : tuple of int
        Which ranks found it; empty where it is about the job.
    """

    area: str
    name: str
    finding: Finding
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Give the fields as JSON holds them."""
        told = dataclasses.asdict(self.finding)
        return {"area": self.area, "name": self.name, **told, "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Result:
        """Undo `to_json`."""
        finding = Finding(Mark(told["mark"]), told["words"], told["remedy"])
        return cls(told["area"], told["name"], finding, tuple(told["ranks"]))


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes
    ----------
    backend : str
        "auto", "host" or "gpu".
    config : str
        Name or file of the shape.
    max_tokens : int
    steps : int
        Of the self-check; 0: none.
    timeout_s : float
        Most that any wait, and any single check, may take.
    """

    backend: str = "auto"
    config: str = "kimi_k3"
    max_tokens: int = 128
    steps: int = 100
    timeout_s: float = 120.0


@dataclasses.dataclass(frozen=True)
class Context:
    """What checks of one process read, and where they leave facts for those over ranks.

    Attributes
    ----------
    environ : mapping of str to str
    options : Options
    facts : dict
        What JSON can hold, by name; a check may read what an earlier one has left.
    """

    environ: Mapping[str, str]
    options: Options
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of one process: `function` gives one finding or several, and may raise anything."""

    area: str
    name: str
    function: Callable[[Context], Finding | Sequence[Finding]]

    def run(self, context: Context) -> list[Result]:
        """Give the results; an exception is a failure of this check alone."""
        return guarded(self.area, self.name, lambda: self.function(context))


def guarded(
    area: str, name: str, function: Callable[[], Finding | Sequence[Finding]]
) -> list[Result]:
    """Call `function` and give what it finds; an exception becomes a failure in its words."""
    try:
        found = function()
    except Exception as error:  # noqa: BLE001 - the point: no check may end the others
        found = failed(
            f"the check broke: {in_words_of(error)}",
            "read the words: if they name nothing of this machine, report them as a bug of ep",
        )
    findings = [found] if isinstance(found, Finding) else found
    return [Result(area, name, finding) for finding in findings]


def in_words_of(error: BaseException) -> str:
    """Kind and words of an exception, in one line; of those of `ep` the words alone."""
    kind = "" if isinstance(error, EpError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())


def merge(said: Sequence[Sequence[Result]]) -> list[Result]:
    """Put every rank's results together, those alike into one.

    Parameters
    ----------
    said : sequence of sequence of Result
        By rank.

    Returns
    -------
    list of Result
        In the order of the checks, as the first rank that ran each has it.
    """
    ranks: dict[tuple[str, str], dict[Finding, list[int]]] = {}
    for rank, results in enumerate(said):
        for result in results:
            found = ranks.setdefault((result.area, result.name), {})
            mine = found.setdefault(result.finding, [])
            if rank not in mine:
                mine.append(rank)
    merged = []
    for (area, name), found in ranks.items():
        for mark in Mark:
            alike = [pair for pair in found.items() if pair[0].mark is mark]
            merged += [Result(area, name, finding, tuple(who)) for finding, who in _cut(alike)]
    return merged


def _cut(alike: list[tuple[Finding, list[int]]]) -> list[tuple[Finding, list[int]]]:
    if len(alike) <= MAX_ALIKE:
        return alike
    kept, rest = alike[: MAX_ALIKE - 1], alike[MAX_ALIKE - 1 :]
    who = sorted({rank for _, ranks in rest for rank in ranks})
    first = rest[0][0]
    words = f"{first.words} (of {name_ranks(rest[0][1])}; the others' differ)"
    return [*kept, (dataclasses.replace(first, words=words), who)]
