"""Coverage-guided fuzzing of what reads text: `python -m tests.fuzz.parsers TARGET [LIBFUZZER]`.

A target ends the process by any exception but those of `ep.errors`.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ep", "tomllib"]):
    import tomllib  # noqa: F401 - what the readers stand on

    import ep
    from ep.bootstrap.launcher import _VARIABLES, detect
    from ep.kernels.options import KernelOptions
    from ep.kernels.tuning import read_table

NAMES = [name for variables in _VARIABLES for name in variables[1:] if name]
FILE = Path(tempfile.mkdtemp(prefix="ep-fuzz-")) / "odd.toml"


def text(data):
    """Bytes as Python gives those of the environment and of arguments."""
    return data.decode("utf-8", "surrogateescape")


def shape(data):
    FILE.write_bytes(data)
    config = ep.EpConfig.load(FILE, ranks=2, max_tokens=3)
    assert ep.EpLayout(config).total_bytes > 0


def tuning(data):
    FILE.write_bytes(data)
    for entry in read_table(FILE).values():
        assert entry.dispatch == tuple(sorted(entry.dispatch, key=lambda point: point.up_to))


def environment(data):
    values = zip(NAMES, text(data).split("\0"), strict=False)
    launch = detect({name: value for name, value in values if value != "unset"})
    assert launch is None or 0 <= launch.rank < launch.size


def options(data):
    assert KernelOptions.parse(text(data)).pdl


TARGETS = {function.__name__: function for function in (shape, tuning, environment, options)}


def main():
    target = TARGETS[sys.argv.pop(1)]

    def check(data):
        try:
            target(data)
        except ep.EpError as error:
            str(error)

    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
