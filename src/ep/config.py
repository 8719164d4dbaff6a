"""What is exchanged: `EpConfig`, and the model shapes shipped as data in `configs/`."""

from __future__ import annotations

import dataclasses
import numbers
import operator
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ep.errors import ArgumentError, ConfigError, cut, shown
from ep.files import read_text

MAX_RANKS = 72
MAX_HIDDEN = 16384
MAX_TOP_K = 32
MAX_TOKENS = 65535
MAX_EXPERTS = 2**31 - 2
"""`experts` itself must be an int32 as ids are: it marks empty rows where all are local."""
MAX_SECONDS = 86400
TUNING_FILE = "tuning.toml"
"""What lies in `configs/` and is no shape."""
SCALE_BLOCK = 32
"""Elements that share one MXFP8 scale (OCP Microscaling Formats 1.0)."""


class DispatchFormat(StrEnum):
    """How a token travels in dispatch."""

    MXFP8 = "mxfp8"


class Protocol(StrEnum):
    """How GPUs tell each other that data has arrived; `docs/protocol.md` argues both."""

    FENCE_FREE = "fence_free"
    """Every 16-byte chunk says itself that it has come: no row waits for a fence or a flag."""
    FLAGS = "flags"
    """Payload, fence, flag: the yardstick."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpConfig:
    """The shape of one exchange. The same on every rank; checked when an `Exchange` is made.

    Parameters
    ----------
    ranks : int
        N, processes that exchange: 1..72.
    hidden : int
        H, elements of a token's vector: a multiple of 32, 32..16384.
    experts : int
        E, routed experts of the model, global ids 0..E-1. Rank r owns a contiguous block; the
        first E mod N ranks own one more than the others, as vLLM splits them.
    top_k : int
        K, experts a token chooses: 1..32.
    max_tokens : int
        Most tokens one rank sends in one step: 1..65535. Fixes the size of the buffer.
    dispatch_format : DispatchFormat or str
        How a token travels. "mxfp8": E4M3 elements and one E8M0 scale a 32-block.
    timeout_s : float
        Bound of every wait, in seconds: above 0, at most 86400.
    grace_s : float
        How much longer waits may take in the first step, while other ranks may still compile what
        they need for it: 0..86400.
    protocol : Protocol or str
        Of the GPU backend: "fence_free" or "flags". The host backend has one of its own.

    Raises
    ------
    ConfigError
        Naming field, value and what is allowed.
    """

    ranks: int
    hidden: int
    experts: int
    top_k: int
    max_tokens: int
    dispatch_format: DispatchFormat = DispatchFormat.MXFP8
    timeout_s: float = 10.0
    grace_s: float = 60.0
    protocol: Protocol = Protocol.FENCE_FREE

    def __post_init__(self) -> None:
        limits = {
            "ranks": (1, MAX_RANKS),
            "hidden": (SCALE_BLOCK, MAX_HIDDEN),
            "experts": (1, MAX_EXPERTS),
            "top_k": (1, MAX_TOP_K),
            "max_tokens": (1, MAX_TOKENS),
        }
        for field, (low, high) in limits.items():
            value = _as_int(field, getattr(self, field))
            if not low <= value <= high:
                raise ConfigError(field, value, f"{low}..{high}")
            object.__setattr__(self, field, value)
        if self.hidden % SCALE_BLOCK:
            raise ConfigError("hidden", self.hidden, f"a multiple of {SCALE_BLOCK}")
        for field, kind in (("dispatch_format", DispatchFormat), ("protocol", Protocol)):
            value = getattr(self, field)
            # Only then: an array, say, is neither equal to a name nor not.
            if not isinstance(value, str) or value not in list(kind):
                raise ConfigError(field, value, f"one of {', '.join(kind)}")
            object.__setattr__(self, field, kind(value))
        for field, may_be_zero in (("timeout_s", False), ("grace_s", True)):
            object.__setattr__(
                self, field, _as_seconds(field, getattr(self, field), zero=may_be_zero)
            )

    @classmethod
    def load(cls, source: str | Path, /, **fields: Any) -> EpConfig:
        """Read a shape from `configs/` and complete it.

        Parameters
        ----------
        source : str or Path
            A name in `configs/` ("kimi_k3") or the path of a TOML file.
        **fields
            Fields of `EpConfig` that the file does not give (`ranks`, `max_tokens`) or that
            replace the file's.

        Returns
        -------
        EpConfig

        Raises
        ------
        ConfigError
            If there is no such file, it is not TOML, or a field is missing, unknown or not allowed.
        """
        table = _read_shape(source)
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in table | fields:
            if name not in known:
                raise ConfigError(name, (table | fields)[name], f"fields are {', '.join(known)}")
        merged = table | fields
        missing = [
            name
            for name, field in known.items()
            if name not in merged and field.default is dataclasses.MISSING
        ]
        if missing:
            raise ConfigError(
                "config",
                str(source),
                f"it lacks {', '.join(missing)}: write that there, or pass it to EpConfig.load",
            )
        return cls(**merged)

    @staticmethod
    def available() -> tuple[str, ...]:
        """Names that `load` knows, sorted."""
        files = configs_dir().glob("*.toml")
        return tuple(sorted(path.stem for path in files if path.name != TUNING_FILE))

    def local_experts(self, rank: int) -> range:
        """Global ids of the experts that `rank` owns; a rank may own none.

        Parameters
        ----------
        rank : int
            0..ranks-1.

        Returns
        -------
        range

        Raises
        ------
        ArgumentError
            If there is no such rank.
        """
        given: object = rank
        if not isinstance(given, (int, np.integer)) or not 0 <= given < self.ranks:
            raise ArgumentError(f"rank {shown(rank)} does not exist: ranks are 0..{self.ranks - 1}")
        rank = int(rank)
        base, extra = divmod(self.experts, self.ranks)
        start = rank * base + min(rank, extra)
        return range(start, start + base + (rank < extra))

    def owner_of(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Rank that owns each expert.

        Parameters
        ----------
        ids : array_like of int
            Global expert ids of any shape; -1 is a masked choice.

        Returns
        -------
        ndarray of int32
            Same shape; -1 for a masked id and for one outside -1..E-1, which selects nobody.

        Raises
        ------
        ArgumentError
            If `ids` are no integers, or no array.
        """
        try:
            given = np.asarray(ids)
        except Exception as error:
            raise ArgumentError(
                f"ids are no array ({shown(error)}); allowed are integers"
            ) from error
        if given.dtype.kind not in "iu":
            raise ArgumentError(f"ids are {given.dtype}, allowed is an integer type")
        is_expert = (given >= 0) & (given < self.experts)
        # In a type that holds E, whatever the ids' own.
        expert = np.where(is_expert, given, 0).astype(np.int64)
        base, extra = divmod(self.experts, self.ranks)
        # Two branches only: blocks of base+1 up to the pivot, blocks of base after it.
        pivot = extra * (base + 1)
        late = extra + (expert - pivot) // max(base, 1)
        owner = np.where(expert < pivot, expert // (base + 1), late)
        return np.where(is_expert, owner, -1).astype(np.int32)

    def empty_id(self, rank: int) -> int:
        """Id that fills the ids of `rank`'s empty rows: never one of its own experts.

        0 where the rank's block starts above 0, else the end of its block, which is E (one past
        the last) where every expert is local.
        """
        local = self.local_experts(rank)
        return 0 if local.start > 0 else local.stop


def _as_seconds(field: str, value: Any, *, zero: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(field, value, "a number of seconds")
    # A NaN is in no range; an integer beyond FP64 is compared as it is.
    seconds: Any = value
    if not 0 <= seconds <= MAX_SECONDS or not (zero or float(seconds)):
        least = "0 or more" if zero else "above 0"
        raise ConfigError(field, value, f"{least} and at most {MAX_SECONDS} seconds")
    return float(seconds)


def _as_int(field: str, value: object) -> int:
    if isinstance(value, bool):
        raise ConfigError(field, value, "an integer")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a stranger's
        raise ConfigError(field, value, "an integer") from None


def configs_dir() -> Path:
    """Folder of the data that is shipped."""
    here = Path(__file__).resolve().parent
    installed = here / "configs"
    # An editable install finds the folder at the top of the source tree.
    return installed if installed.is_dir() else here.parents[1] / "configs"


def _read_shape(source: str | Path) -> dict[str, Any]:
    if not isinstance(source, (str, Path)):
        raise ConfigError("config", source, "a name, or the path of a .toml file")
    try:
        path = Path(source).expanduser()
        if path.suffix != ".toml":
            path = configs_dir() / f"{source}.toml"
        table = tomllib.loads(read_text(path))
    except FileNotFoundError:
        names = ", ".join(EpConfig.available())
        raise ConfigError(
            "config", str(source), f"a .toml file that exists, or (without .toml) one of {names}"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "config", str(source), f"a readable TOML file ({cut(str(error))})"
        ) from error
    return {name: value for name, value in table.items() if name not in ("model", "source")}
