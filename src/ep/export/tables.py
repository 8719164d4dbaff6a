"""`ep.h` and `tables.h`: what the C sources take from layout, record and kernels."""

from __future__ import annotations

import json
import math
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ep.arming import Unknown, fills
from ep.config import MAX_RANKS, MAX_SECONDS, SCALE_BLOCK
from ep.export.plan import ABI_VERSION
from ep.kernels.compile import Kind
from ep.kernels.grid import HERALDS, SPARE_TOKENS
from ep.kernels.options import Pdl
from ep.kernels.tuning import load_table
from ep.layout import HEADER_WORDS, LINE_BYTES, PARITIES
from ep.record import RECORD_WORDS, Word
from ep.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ep.export.plan import ExportPlan
    from ep.kernels.compile import Image
    from ep.kernels.tuning import Point

SOURCES = Path(__file__).resolve().parent / "c"
ARGUMENT_TYPES = {
    **dict.fromkeys(("rank", "num_tokens", "num_senders"), "u32"),
    "eps": "f32",
}
"""Of the members of `arguments` in internal.h; the others are u64."""
WORDS = {
    Unknown.EMPTY_ID: "WORD_EMPTY_ID",
    Unknown.STEP_LOW: "WORD_STEP_LOW",
    Unknown.STEP_HIGH: "WORD_STEP_HIGH",
}
RECEIVED = ("x", "scales", "ids", "weights", "header")
"""Fields that experts read."""


def header_text(plan: ExportPlan) -> str:
    """Give `ep.h`."""
    config, layout = plan.config, plan.layout
    offsets = "\n".join(
        f"#define EP_OFFSET_{name.upper()} UINT64_C({layout.fields[name].offset_bytes})"
        for name in RECEIVED
    )
    return Template((SOURCES / "ep.h.in").read_text()).substitute(
        version=__version__,
        name=plan.source,
        abi_version=ABI_VERSION,
        config_id=plan.config_id,
        ranks=config.ranks,
        hidden=config.hidden,
        experts=config.experts,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        stride=layout.stride,
        rows=layout.rows,
        scales=config.hidden // SCALE_BLOCK,
        buffer_bytes=layout.total_bytes,
        buffer_align=LINE_BYTES,
        offsets=offsets,
        max_ranks=MAX_RANKS,
        timeout_us=math.ceil(config.timeout_s * 1e6),
        grace_us=math.ceil(config.grace_s * 1e6),
    )


def tables_text(plan: ExportPlan, images: Sequence[Image]) -> str:
    """Give `tables.h`."""
    config, layout = plan.config, plan.layout
    fields = layout.fields
    constants = {
        "HERALDS": HERALDS,
        "SPARE_TOKENS": SPARE_TOKENS,
        "HEADER_WORDS": HEADER_WORDS,
        "MAX_TIMEOUT_US": f"UINT64_C({MAX_SECONDS * 10**6})",
        "CONTROL_OFFSET": fields["control"].offset_bytes,
        "ANNOUNCEMENTS_OFFSET": fields["announcements"].offset_bytes,
        "ANNOUNCEMENT_WORDS": LINE_BYTES // 4,
        "ANNOUNCEMENT_LINES": PARITIES * config.ranks,
        "RECORD_WORDS": RECORD_WORDS,
        **{f"RECORD_{word.name}": int(word) for word in Word},
        "CONFIG_JSON": _quoted(json.dumps(plan.facts)),
        "FIELD_NAMES": _quoted(", ".join(fields)),
    }
    empty_ids = (config.empty_id(rank) for rank in range(config.ranks))
    parts = [
        "/* Made by python -m ep.export. */",
        "#ifndef EP_TABLES_H\n#define EP_TABLES_H\n",
        *(f"#define {name} {value}" for name, value in constants.items()),
        f"\nstatic const int32_t EMPTY_IDS[EP_RANKS] = {_braces(empty_ids)};",
        _array("buffer_fill", "FILLS", map(_braces, _fills(plan))),
        _array(
            "buffer_field",
            "FIELDS",
            (_braces((_quoted(f.name), f.offset_bytes, f.size_bytes)) for f in fields.values()),
        ),
        _params(images),
        _kernels(plan, images),
        _tuning(plan),
        "#endif\n",
    ]
    # Each file of the library uses some of them.
    unused = '#pragma GCC diagnostic ignored "-Wunused-const-variable"\n'
    return unused + "\n".join(parts)


def assembly_text(images: Sequence[Image]) -> str:
    """Give what puts the CUBINs into the library, for the assembler."""
    lines = ['    .section .rodata.ep, "a", @progbits']
    for index in range(len(images)):
        name = _cubin(index)
        lines += [
            f"    .balign 64\n    .globl {name}\n    .hidden {name}\n    .type {name}, @object",
            f'{name}:\n    .incbin "{name}.bin"\n    .size {name}, . - {name}',
        ]
    return "\n".join([*lines, '    .section .note.GNU-stack, "", @progbits', ""])


def cubin_files(images: Sequence[Image]) -> dict[str, bytes]:
    """Give the files that `assembly_text` names."""
    return {f"{_cubin(index)}.bin": image.cubin for index, image in enumerate(images)}


def _cubin(index: int) -> str:
    return f"ep_cubin_{index}"


def _fills(plan: ExportPlan) -> Iterable[tuple[int | str, ...]]:
    for fill in fills(plan.layout):
        shape = (fill.offset_bytes, fill.width_words, fill.height, fill.pitch_bytes)
        if isinstance(fill.word, Unknown):
            yield (*shape, WORDS[fill.word], 0)
        else:
            yield (*shape, "WORD_KNOWN", f"{fill.word & 0xFFFFFFFF:#x}u")


def _params(images: Sequence[Image]) -> str:
    """Offsets in `arguments` of what each of the two kernels takes, in order."""
    rows = []
    for kind in (Kind.DISPATCH, Kind.COMBINE):
        params = {image.params for image in images if image.entry.startswith(f"ep_{kind}")}
        assert len(params) == 1, params
        for name, ptx_type in (taken := params.pop()):
            assert ptx_type == ARGUMENT_TYPES.get(name, "u64"), f"{kind} takes {name}: {ptx_type}"
        rows.append(_braces([f"offsetof(arguments, {name})" for name, _ in taken] + ["NO_PARAM"]))
    return "#define NO_PARAM UINT16_MAX\n" + _array("uint16_t", "PARAMS", rows, "[MAX_PARAMS + 1]")


def _kernels(plan: ExportPlan, images: Sequence[Image]) -> str:
    names = ("DISPATCH", "COMBINE", "COMBINE_NORM")
    declared = [f"extern const unsigned char {_cubin(index)}[];" for index in range(len(images))]
    rows = [
        _braces(
            (
                _quoted(arch),
                names[part.place],
                "true" if pdl == Pdl.EARLY else "false",
                _quoted(image.entry),
                image.threads,
                _cubin(index),
            )
        )
        for index, ((arch, pdl, part), image) in enumerate(zip(plan.kernels(), images, strict=True))
    ]
    return "\n".join([*declared, _array("kernel_image", "IMAGES", rows)])


def _tuning(plan: ExportPlan) -> str:
    """The entries of the tuning table that were measured for what the library serves."""
    parts, rows = [], []
    for arch, tuning in load_table().items():
        if arch not in plan.arches or not tuning.fits(plan.config):
            continue
        for name, points in (("DISPATCH", tuning.dispatch), ("COMBINE", tuning.combine)):
            parts.append(_array("tuning_point", f"{name}_{arch.upper()}", _points(points)))
        rows.append(
            _braces((_quoted(arch), f"{{DISPATCH_{arch.upper()}, COMBINE_{arch.upper()}}}"))
        )
    return "\n".join([*parts, _array("tuning_entry", "TUNING", [*rows, "{NULL, {NULL, NULL}}"])])


def _points(points: Sequence[Point]) -> list[str]:
    rows = [
        _braces((point.up_to, *(-1.0 if value is None else value for value in point.per_sm)))
        for point in points
    ]
    return [*rows, "{0, -1.0, -1.0}"]


def _array(kind: str, name: str, rows: Iterable[str], inner: str = "") -> str:
    body = ",\n".join(f"    {row}" for row in rows)
    return f"static const {kind} {name}[]{inner} = {{\n{body}}};\n"


def _braces(values: Iterable[object]) -> str:
    return f"{{{', '.join(map(str, values))}}}"


def _quoted(text: str) -> str:
    """Text as a C string: JSON's rules are C's for what is printable ASCII."""
    return json.dumps(text)
