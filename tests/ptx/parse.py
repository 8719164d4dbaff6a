"""From PTX text to segments: straight code that starts at a label, an access or a warp operation.

Only what CuTe DSL makes of this library's kernels is understood; all else is refused by name.
"""

from __future__ import annotations

import dataclasses
import re


class UnknownPtx(Exception):
    """PTX that the machine does not cover."""


@dataclasses.dataclass(frozen=True)
class Instr:
    """One instruction; `guard` is a predicate register, `wanted` the value it must have."""

    op: str
    args: tuple[str, ...]
    guard: str = ""
    wanted: bool = True

    def __str__(self) -> str:
        guard = f"@{'' if self.wanted else '!'}{self.guard} " if self.guard else ""
        return f"{guard}{self.op} {', '.join(self.args)}"


@dataclasses.dataclass
class Segment:
    """Instructions that run without a stop.

    Attributes
    ----------
    idx : int
    body : list of Instr
        Without the branch at the end.
    branch : Instr or None
        `bra` or `ret`, guarded or not.
    target : int
        Segment that the branch goes to.
    whole_warp : bool
        Starts only when all lanes of the warp have come.
    stop : str
        "bar" or "wait" where the one instruction of the segment blocks; else empty.
    """

    idx: int
    body: list[Instr]
    branch: Instr | None = None
    target: int = -1
    whole_warp: bool = False
    stop: str = ""


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A kernel: its parameters as (name, PTX type), registers' types by name, segments in order."""

    name: str
    params: tuple[tuple[str, str], ...]
    registers: dict[str, str]
    shared: dict[str, int]
    shared_bytes: int
    segments: list[Segment]


WARP_OPS = ("shfl.", "vote.", "redux.", "match.", "bar.warp.")
_ACCESSES = ("ld.global", "st.global", "ld.shared", "st.shared", "atom.", "red.", "fence.")
_STATE = re.compile(r"^(ld|st)\.(acquire|release|relaxed|volatile)\.")


def parse(ptx: str) -> Parsed:
    """Read the one kernel of a module."""
    text = re.sub(r"//[^\n]*", "", ptx)
    entry = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)", text)
    if entry is None:
        raise UnknownPtx("no .entry in this PTX")
    params = tuple(
        (name, kind) for kind, name in re.findall(r"\.param\s+\.(\w+)\s+(\w+)", entry[2])
    )
    body = text[text.index("{", entry.end()) + 1 : text.rindex("}")]
    registers: dict[str, str] = {}
    shared: dict[str, int] = {}
    shared_bytes = 0
    code: list[Instr | str] = []
    scopes: list[dict[str, str]] = []
    num_scopes = 0
    for raw in body.split(";"):
        line = raw.strip()
        while found := re.match(r"(\$\w+):|([{}])", line):
            line = line[found.end() :].strip()
            if found[1]:
                code.append(found[1])
            elif found[2] == "{":
                num_scopes += 1
                scopes.append({})
            else:
                scopes.pop()
        if not line:
            continue
        if line.startswith(".reg"):
            kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
            for name in names.split(","):
                many = re.fullmatch(r"\s*(%\w+)<(\d+)>\s*", name)
                if many:
                    registers.update({f"{many[1]}{idx}": kind for idx in range(int(many[2]))})
                elif scopes:
                    scopes[-1][name.strip()] = f"%{name.strip()}_{num_scopes}"
                    registers[f"%{name.strip()}_{num_scopes}"] = kind
                else:
                    registers[name.strip()] = kind
        elif line.startswith(".shared"):
            size = re.fullmatch(
                r"\.shared\s+\.align\s+(\d+)\s+\.(?:b8|u64)\s+([\w$]+)(?:\[(\d+)\])?", line
            )
            if size is None:
                raise UnknownPtx(line)
            shared_bytes = -(-shared_bytes // int(size[1])) * int(size[1])
            shared[size[2]] = shared_bytes
            shared_bytes += int(size[3] or 8)
        elif line.startswith("."):
            raise UnknownPtx(line)
        else:
            local = {old: new for scope in scopes for old, new in scope.items()}
            code.append(_instr(line, local))
    return Parsed(entry[1], params, registers, shared, shared_bytes, _segments(code))


def _instr(line: str, local: dict[str, str]) -> Instr:
    found = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", line, re.DOTALL)
    if found is None:
        raise UnknownPtx(line)
    negated, guard, op, rest = found.groups()
    if local:
        rest = re.sub(r"(?<![\w%$.])[A-Za-z]\w*", lambda word: local.get(word[0], word[0]), rest)
    args = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    return Instr(op, tuple(args), local.get(guard or "", guard or ""), negated != "!")


def is_access(op: str) -> bool:
    """Whether an instruction touches memory that others see, or orders such accesses."""
    return op.startswith(_ACCESSES) or _STATE.match(op) is not None


def _is_after_load(segment: Segment, instr: Instr) -> bool:
    """Whether `segment` is a load, and `instr` does more than to take its result apart."""
    if not segment.body or not segment.body[0].op.startswith("ld.") or segment.whole_warp:
        return False
    if not is_access(segment.body[0].op):
        return False
    made = {name for one in segment.body for name in re.findall(r"[%$]?\w+", one.args[0])}
    source = instr.args[1] if len(instr.args) == 2 else ""
    return not (instr.op.startswith("mov.b") and source in made)


def _segments(code: list[Instr | str]) -> list[Segment]:
    segments = [Segment(0, [])]
    labels: dict[str, int] = {}

    def start() -> Segment:
        if segments[-1].body or segments[-1].branch or segments[-1].stop:
            segments.append(Segment(len(segments), []))
        return segments[-1]

    for item in code:
        if isinstance(item, str):
            labels[item] = start().idx
            continue
        op = item.op
        if op in {"bra", "bra.uni", "ret"}:
            segments[-1].branch = item
            segments.append(Segment(len(segments), []))
        elif op in {"bar.sync", "bar.red.and.pred", "griddepcontrol.wait"}:
            stop = start()
            stop.body.append(item)
            stop.stop = "wait" if op.startswith("grid") else "bar"
            stop.whole_warp = stop.stop == "bar"
            segments.append(Segment(len(segments), []))
        else:
            current = segments[-1]
            if (
                is_access(op)
                or (op.startswith(WARP_OPS) and not current.whole_warp)
                or _is_after_load(current, item)
            ):
                current = start()
            current.whole_warp |= op.startswith(WARP_OPS)
            current.body.append(item)
    for segment in segments:
        if segment.branch and segment.branch.op != "ret":
            segment.target = labels[segment.branch.args[0]]
    return segments
