"""Build the shared library with the C compiler of the machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ep.errors import EpError, shown
from ep.export.tables import SOURCES, assembly_text, cubin_files, header_text, tables_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep.export.plan import ExportPlan
    from ep.kernels.compile import Image

LIBRARY, HEADER, ASSEMBLY = "libep.so", "ep.h", "cubins.s"
MEMBERS = ("driver.c", "ep.c", "grid.c", "hang.c", "step.c")
HEADERS = ("driver.h", "internal.h")
SYMBOLS = "symbols.txt"
"""Beside the sources: every function of the library, a line each. What it lacks stays hidden."""
MOST_WORDS = 2000
"""Of what the compiler says."""
FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-D_GNU_SOURCE")
LINK = (
    *("-shared", "-pthread", "-ldl", "-Wl,-soname,libep.so", "-Wl,-z,defs"),
    *("-Wl,--build-id=sha1", "-Wl,--version-script,ep.map"),
)


def write_sources(plan: ExportPlan, images: Sequence[Image], folder: Path) -> None:
    """Write all that the library is made of into `folder`, which exists. Local."""
    texts = {
        HEADER: header_text(plan),
        "tables.h": tables_text(plan, images),
        ASSEMBLY: assembly_text(images),
        "ep.map": _version_script(),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in (*MEMBERS, *HEADERS):
        shutil.copyfile(SOURCES / name, folder / name)
    for name, data in cubin_files(images).items():
        (folder / name).write_bytes(data)


def build_library(plan: ExportPlan, images: Sequence[Image], to: Path) -> tuple[Path, Path]:
    """Write library and header into the folder `to`, which is made. Local.

    Returns
    -------
    tuple of Path
        The library, and the header.

    Raises
    ------
    EpError
        If there is no C compiler, or it fails; what lay in `to` is then as it was.
    OSError
    """
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ep-", dir=to) as scratch:
        folder = Path(scratch)
        write_sources(plan, images, folder)
        run_compiler(folder, *MEMBERS, ASSEMBLY, *LINK, "-o", LIBRARY)
        if not (folder / LIBRARY).is_file():
            raise EpError(f"the C compiler failed: it gave no {LIBRARY}")
        for name in (LIBRARY, HEADER):
            if (to / name).is_dir():
                raise EpError(f"{to / name} is a folder; remove it, or export to another")
        for name in (LIBRARY, HEADER):
            (folder / name).chmod(0o755 if name == LIBRARY else 0o644)
            # In one piece: a process may be loading the one that is there.
            (folder / name).replace(to / name)
    return to / LIBRARY, to / HEADER


def symbols() -> list[str]:
    """Names that the library exports."""
    return (SOURCES / SYMBOLS).read_text().split()


def find_compiler() -> list[str]:
    """Give the C compiler's command: of CC, else cc. Local.

    Raises
    ------
    EpError
        If there is none.
    """
    given = os.environ.get("CC", "")
    try:
        name, *options = shlex.split(given) or ["cc"]
    except ValueError as error:
        raise EpError(f"CC is {shown(given)}, which is no command ({error}); set it anew") from None
    found = shutil.which(name)
    if found is None:
        raise EpError(f"there is no C compiler {name!r}; install one (gcc, say), or name it in CC")
    # It runs in another folder.
    return [os.path.abspath(found), *options]  # noqa: PTH100 - its name may say what it is


def run_compiler(folder: Path, *arguments: str) -> None:
    """Compile sources of ours in `folder`. Local.

    Raises
    ------
    EpError
        If there is no C compiler, or it fails.
    """
    command = [*find_compiler(), *FLAGS, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        raise EpError(f"the C compiler failed: {error}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[:MOST_WORDS]
        raise EpError(f"the C compiler failed: {said or f'exit code {done.returncode}'}")


def _version_script() -> str:
    names = "".join(f"    {name};\n" for name in symbols())
    return f"EP_1 {{\n  global:\n{names}  local: *;\n}};\n"
