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
    from ep.bootstrap.address import parse_address, rendezvous_of
    from ep.bootstrap.frames import BadFrame, Opener
    from ep.bootstrap.greeting import Party, Unwelcome, check_claim, claim_bytes, hello
    from ep.bootstrap.launcher import _VARIABLES, detect
    from ep.bootstrap.proof import SharedSecret
    from ep.bootstrap.slurm import MAX_HOSTS, expand_hosts
    from ep.kernels.options import KernelOptions
    from ep.kernels.tuning import read_table

NAMES = [*dict.fromkeys(name for variables in _VARIABLES for name in variables[1:] if name)]
NAMES += ["EP_LOCAL_RANK", "EP_RENDEZVOUS", "MASTER_PORT", "SLURM_STEP_NODELIST"]
NAMES += ["SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_RESV_PORTS"]
HOST = Party(0, 4, "job", SharedSecret(bytes(16)))
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
    environ = {name: value for name, value in values if value != "unset"}
    launch = detect(environ)
    if launch is not None:
        assert 0 <= launch.rank < launch.size
        place = rendezvous_of(environ, launch)
        assert place.host
        assert all(0 < port < 65536 for port in place.ports)


def hosts(data):
    assert 0 < len(expand_hosts(text(data))) <= MAX_HOSTS


def address(data):
    host, ports = parse_address(text(data))
    assert host
    assert ports


def frames(data):
    """None is right, since nobody here has the key."""
    opener = Opener(bytes(32))
    try:
        for byte in data:
            opener.feed(bytes([byte]))
            assert opener.next() is None
    except BadFrame:
        pass


def claims(data):
    """None proves anything."""
    try:
        if claim_bytes(data) > len(data):
            return
        check_claim(HOST, hello(HOST), data)
    except Unwelcome:
        return
    raise AssertionError("a stranger is let in")


def options(data):
    assert KernelOptions.parse(text(data)).pdl


READERS = (shape, tuning, environment, options, hosts, address, frames, claims)
TARGETS = {function.__name__: function for function in READERS}


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
