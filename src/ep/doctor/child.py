"""The process in which all checks run: it may hang, crash or be killed; `supervise` survives that.

Everything it learns goes to its parent at once, one JSON object a line, on a descriptor of its own:
libraries print to stdout as they like.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from ep.bootstrap import Backend, World
from ep.bootstrap.device import device_index
from ep.config import EpConfig
from ep.doctor import gpu, launch, machine, software
from ep.doctor.probe import memory_bytes
from ep.doctor.ranks import Survey, judge
from ep.doctor.reach import matrix
from ep.doctor.result import Context, Options, Result, in_words_of, merge
from ep.doctor.selfcheck import AREA, check_fabric_between, check_steps
from ep.layout import EpLayout
from ep.settings import is_set

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKS = (*launch.CHECKS, *software.CHECKS, *machine.CHECKS, *gpu.CHECKS)
"""Of one process, in an order in which a later one may read what an earlier one has left."""
_PR_SET_PDEATHSIG = 1


class Line:
    """Tells the parent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, **message: Any) -> None:
        """Send one message, in one piece."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def stage(self, words: str, waits: float = 1.0) -> None:
        """Say what begins; other ranks wait for this one for `waits` times `timeout_s`."""
        self.say(stage=words, waits=waits)


def run(descriptor: int, request: dict[str, Any]) -> int:
    """Do what is left of the checks of this process, then, if there is none, those over ranks.

    Parameters
    ----------
    descriptor : int
        Where messages go.
    request : dict
        "options", "done" (checks that an earlier child has ended or died of), "facts" and
        "results" of those.

    Returns
    -------
    int
        Exit code: 1 if this child could not come to the end.
    """
    line = Line(descriptor)
    context = Context(os.environ, Options(**request["options"]), request["facts"])
    results = [Result.from_json(told) for told in request["results"]]
    for number, check in enumerate(CHECKS):
        if number < request["done"]:
            continue
        line.say(begins=number, stage=f"the check {check.area}, {check.name}")
        found = check.run(context)
        results += found
        line.say(results=[result.to_json() for result in found], facts=context.facts)
    try:
        control, document = examine(context, results, line.stage)
        line.say(document=document)
        if not document["in_order"]:
            return 1
        line.stage("leaving the other ranks")
        control.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells it
        line.say(error=in_words_of(error))
        return 1
    return 0


def examine(
    context: Context, results: list[Result], stage: Callable[..., None]
) -> tuple[World, dict[str, Any]]:
    """Join the other ranks, compare, and run the self-check. Collective.

    Returns
    -------
    World, dict
        To be closed; and what `report` shows and `--json` writes, the same on every rank.

    Raises
    ------
    Exception
        If the ranks did not find each other; all else is a result.
    """
    options = context.options
    stage("joining the ranks")
    # The host's world needs no GPU, so that what keeps one from its GPU is told by all.
    control = World.connect(Backend.HOST, timeout_s=options.timeout_s)
    control.agree_on(dataclasses.asdict(options), "the options of ep.doctor")
    stage("looking at this rank's GPU")
    _own_gpu(context, control)
    stage("collecting what each rank found")
    facts = control.allgather(context.facts, "collecting what each rank found")
    config = EpConfig.load(options.config, ranks=control.size, max_tokens=options.max_tokens)
    survey = Survey(
        options,
        control.places,
        facts,
        EpLayout(config).total_bytes,
        share_gpus=is_set("EP_SHARE_GPUS", context.environ),
    )
    over_ranks = judge(survey)
    mine = list(results)
    if survey.backend is Backend.GPU and survey.num_nodes > 1:
        stage("fabric memory between nodes")
        mine += check_fabric_between(control, survey)
    stage("the self-check")
    # They give up the step, and then what collects the results.
    tell = partial(stage, waits=1.5)
    finding, in_order = check_steps(options, _checked(survey), tell)
    mine.append(Result(AREA, "steps", finding))
    stage("collecting the results")
    told = {"results": [result.to_json() for result in mine], "in_order": in_order}
    said = control.allgather(told, "collecting the results")
    merged = merge([[Result.from_json(words) for words in theirs["results"]] for theirs in said])
    local = [result for result in merged if result.area != AREA]
    last = [result for result in merged if result.area == AREA]
    document = _document(survey, [*local, *over_ranks, *last])
    return control, document | {"in_order": all(theirs["in_order"] for theirs in said)}


def _checked(survey: Survey) -> Backend:
    """Backend of the self-check: the one asked for, also where it cannot be had, to hear why."""
    asked = survey.options.backend
    return survey.backend if asked == "auto" else Backend(asked)


def _own_gpu(context: Context, control: World) -> None:
    """Find which of the visible GPUs is this rank's, and its memory. What fails is a fact, too."""
    visible = len(context.facts.get("gpus", []))
    if not visible or context.facts.get("obstacle"):
        return
    try:
        ordinal = device_index(control.local_rank, visible, share_gpus=True)
        context.facts["ordinal"] = ordinal
        context.facts["memory"] = memory_bytes(ordinal)
    except Exception as error:  # noqa: BLE001 - told by the check of the backend
        context.facts["obstacle"] = in_words_of(error)


def _document(survey: Survey, results: list[Result]) -> dict[str, Any]:
    ranks = []
    for rank, (place, facts) in enumerate(zip(survey.places, survey.facts, strict=True)):
        own = survey.gpus[rank]
        ranks.append(
            {
                "rank": rank,
                "node": place.node,
                "process": place.process,
                "local_rank": place.local_rank,
                "cpus": facts.get("cpus", []),
                "numa": facts.get("numa", []),
                "gpu": own and dataclasses.asdict(own),
                "facts": facts,
            }
        )
    return {
        "ranks": ranks,
        "backend": str(survey.backend),
        "reach": matrix(survey) if survey.backend is Backend.GPU else [],
        "results": [result.to_json() for result in results],
    }


def main() -> None:
    """Serve one parent, and end with it."""
    # A launcher that kills the parent knows nothing of this process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    code = run(int(sys.argv[1]), json.loads(sys.stdin.read()))
    if code:
        # Nothing is left in order: MPI_Finalize would wait for ranks that are gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
