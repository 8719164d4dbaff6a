"""What a process holds, measured, so that two moments can be compared."""

import gc
import os
import re
import threading
from pathlib import Path
from typing import NamedTuple

_PAGE_KIB = os.sysconf("SC_PAGESIZE") // 1024


class Footprint(NamedTuple):
    """Of this process: counts, but for `resident_kib`, its resident memory (VmRSS)."""

    descriptors: int
    mappings: int
    """Of files: those of anonymous memory come and go with the allocator."""
    threads: int
    objects: int
    """That the garbage collector knows."""
    resident_kib: int

    @classmethod
    def now(cls):
        gc.collect()
        folder = Path("/proc/self")
        return cls(
            len(list((folder / "fd").iterdir())),
            len(re.findall(r" /", (folder / "maps").read_text())),
            threading.active_count(),
            len(gc.get_objects()),
            int((folder / "statm").read_text().split()[1]) * _PAGE_KIB,
        )

    def growth(self, later, rounds, slack_kib=1024):
        """Say what `later` has more, `rounds` rounds after this; None if nothing leaks.

        What is counted exactly must be the same. Objects and memory move a little by themselves:
        a leak is at least one object a round, or more than `slack_kib`.
        """
        exact = ("descriptors", "mappings", "threads")
        grown = [name for name in exact if getattr(later, name) > getattr(self, name)]
        if later.objects - self.objects >= rounds:
            grown.append("objects")
        if later.resident_kib - self.resident_kib > slack_kib:
            grown.append("resident_kib")
        return f"{', '.join(grown)} grew in {rounds} rounds: {self} {later}" if grown else None
