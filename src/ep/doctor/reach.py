"""Which rank's GPU loads and stores in which other's memory, as far as the driver tells. Local."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep.bootstrap.fabric import is_own_machine
from ep.doctor.ranks import domains
from ep.doctor.result import MAX_ALIKE, failed, passed, warned
from ep.errors import name_ranks

if TYPE_CHECKING:
    from ep.doctor.ranks import Survey
    from ep.doctor.result import Finding

SAME, PEER, FABRIC, NONE, UNKNOWN = "=", "p", "f", "-", "?"
LEGEND = {
    SAME: "same GPU",
    PEER: "peer access",
    FABRIC: "one fabric",
    NONE: "none",
    UNKNOWN: "not told",
}

_SHOW_ALL = (
    "the self-check tells; if it fails, show every rank all GPUs of its node "
    "(CUDA_VISIBLE_DEVICES, container, --gpu-bind=none)"
)


def matrix(survey: Survey) -> list[str]:
    """One string a rank, one letter of `LEGEND` a peer: how the rank's GPU reaches the peer's."""
    by_domain = domains(survey)
    domain = {rank: name for name, ranks in by_domain.items() for rank in ranks}
    apart = [name for name in by_domain if is_own_machine(name)]

    def letter(rank: int, peer: int) -> str:
        own, other = survey.gpus[rank], survey.gpus[peer]
        if own is None or other is None:
            return UNKNOWN
        if own.uuid == other.uuid:
            return SAME
        if survey.places[rank].machine != survey.places[peer].machine:
            shared = domain[rank] == domain[peer] and domain[rank] not in ("", *apart)
            return FABRIC if shared else NONE
        if other.uuid in own.reach:
            return PEER
        visible = {gpu["uuid"] for gpu in survey.facts[rank].get("gpus", [])}
        # A GPU that this process does not see is no answer of the driver.
        return NONE if other.uuid in visible else UNKNOWN

    return [
        "".join(letter(rank, peer) for peer in range(survey.size)) for rank in range(survey.size)
    ]


def check_reach(survey: Survey) -> list[Finding]:
    """Whether every rank reaches every other by loads and stores."""
    rows = matrix(survey)
    findings: list[Finding] = []
    for letter, give, words, remedy in (
        (
            NONE,
            failed,
            "cannot reach",
            "look at nvidia-smi topo -p2p r; use GPUs that are joined by NVLink",
        ),
        (
            UNKNOWN,
            warned,
            "do not see the GPU of",
            _SHOW_ALL,
        ),
    ):
        told: dict[tuple[int, ...], list[int]] = {}
        for rank, row in enumerate(rows):
            peers = tuple(peer for peer, found in enumerate(row) if found == letter)
            if peers:
                told.setdefault(peers, []).append(rank)
        said = [
            f"{name_ranks(ranks)} {words} {name_ranks([*peers])}" for peers, ranks in told.items()
        ]
        if len(said) > MAX_ALIKE:
            who = sorted(rank for ranks in told.values() for rank in ranks)
            said = [f"{name_ranks(who)} {words} some others: see the matrix"]
        findings += [give(sentence, remedy) for sentence in said]
    return findings or [passed("every rank's GPU reaches every other's")]
