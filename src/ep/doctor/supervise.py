"""Run the checks in a child that may hang or crash, and know where it did. Local."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any

from ep.doctor.child import CHECKS
from ep.doctor.result import Mark, Result, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ep.doctor.result import Options

COMMAND = (sys.executable, "-m", "ep.doctor.child")
SPARE_S = 10.0
"""By how much longer a child may be silent than its own bounds: their words say more."""
MAX_OUTPUT_BYTES = 4000


@dataclasses.dataclass
class Outcome:
    """What came of this rank.

    Attributes
    ----------
    results : list of Result
        Of this process alone.
    facts : dict
    document : dict or None
        Of all ranks, if they came to the end.
    output : str
        The end of what libraries printed in the child.
    others_until : float
        Until when, on the monotonic clock, other ranks may wait for this one.
    """

    results: list[Result] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    document: dict[str, Any] | None = None
    output: str = ""
    others_until: float = 0.0


def supervise(
    options: Options,
    tell: Callable[[str], None] = lambda _stage: None,
    command: Sequence[str] = COMMAND,
) -> Outcome:
    """Run children until every check of this process has ended or failed, and the job with it.

    Parameters
    ----------
    options : Options
    tell : callable
        Told of each stage when it begins.
    command : sequence of str
        Of the child; it gets the number of a descriptor as its last argument.

    Returns
    -------
    Outcome
        Whatever happens in the child: it is given `timeout_s` and `SPARE_S` for each stage.
    """
    outcome = Outcome()
    done = 0
    while True:
        child = _Child(options, outcome, done, tell)
        ended = child.run(command)
        if child.checking is None:
            if ended:
                outcome.results.append(_lost(ended, outcome.document is not None))
            return outcome
        # The next child does without the check that this one did not survive.
        check = CHECKS[child.checking]
        outcome.results.append(
            Result(check.area, check.name, failed(ended, "see the words and the output below"))
        )
        done = child.checking + 1


def _lost(words: str, is_late: bool) -> Result:
    remedy = (
        "all else is told above; look at what the words name"
        if is_late
        else "look at the ranks that are missing or named: each tells its own checks on stderr"
    )
    return Result("job", "ranks together", failed(words, remedy))


class _Child:
    """One child: `checking` is the number of the check it is at, None once it is past them."""

    def __init__(
        self, options: Options, outcome: Outcome, done: int, tell: Callable[[str], None]
    ) -> None:
        self.checking: int | None = None
        self._options = options
        self._outcome = outcome
        self._done = done
        self._tell = tell
        self._stage = "starting"
        self._error = ""
        self._silent_since = time.monotonic()

    def run(self, command: Sequence[str]) -> str:
        """Run it to its end, or end it; gives what went wrong, "" if nothing did."""
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        with os.fdopen(reading, "rb", 0) as pipe, tempfile.TemporaryFile() as output:
            try:
                # All descriptors: a launcher's PMI_FD is one of them.
                process = subprocess.Popen(
                    [*command, str(writing)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    close_fds=False,
                )
            finally:
                os.close(writing)
            try:
                self._ask(process)
                in_time = self._listen(pipe)
                ended = self._end(process, in_time=in_time)
            finally:
                process.kill()
                # Not even a kill ends one that the system itself keeps.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            said = _tail(output)
        self._outcome.output += said
        if ended and not self._error and said.strip():
            # Whoever killed it, the bound of MPI's start-up say, has said why.
            ended += f"; its last words: {said.strip().splitlines()[-1]}"
        return ended

    def _ask(self, process: subprocess.Popen[bytes]) -> None:
        request = {
            "options": dataclasses.asdict(self._options),
            "done": self._done,
            "facts": self._outcome.facts,
            "results": [result.to_json() for result in self._outcome.results],
        }
        assert process.stdin is not None
        # One that has died already is found out by its silence.
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(request).encode())

    def _listen(self, pipe: IO[bytes]) -> bool:
        """Take messages until the child closes its end; False if it was silent for too long."""
        limit_s = self._options.timeout_s + SPARE_S
        rest = b""
        while True:
            left_s = limit_s - (time.monotonic() - self._silent_since)
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                return False
            data = pipe.read(1 << 16)
            if not data:
                return True
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        self._silent_since = time.monotonic()
        if "stage" in message:
            self._stage = message["stage"]
            self.checking = message.get("begins")
            waits_s = message.get("waits", 1.0) * self._options.timeout_s
            self._outcome.others_until = self._silent_since + waits_s
            self._tell(self._stage)
        if "results" in message:
            self._outcome.results += map(Result.from_json, message["results"])
            self._outcome.facts.update(message["facts"])
        self._outcome.document = message.get("document", self._outcome.document)
        if "error" in message:
            self._error = message["error"]
            # Told, not died: most likely the others meet the same, and none waits.
            self._outcome.others_until = 0.0

    def _end(self, process: subprocess.Popen[bytes], *, in_time: bool) -> str:
        if not in_time:
            limit_s = self._options.timeout_s + SPARE_S
            return f"{self._stage}: nothing came of it in {limit_s:.0f} s"
        if self._error:
            return f"{self._stage}: {self._error}"
        try:
            code = process.wait(SPARE_S)
        except subprocess.TimeoutExpired:
            return f"{self._stage}: the process does not end"
        if code >= 0 and self._outcome.document is not None:
            return ""
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"{self._stage}: the process ended ({how})"


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - MAX_OUTPUT_BYTES))
    return output.read().decode(errors="replace")


def is_fail(results: Sequence[Result]) -> bool:
    """Whether any of the results is a fail."""
    return any(result.finding.mark is Mark.FAIL for result in results)
