"""What imports what: the order of CONTRIBUTING.md, and a core that is light."""

import ast
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
# Top to bottom: a module may import, when it is loaded, only from its own layer and those above.
LAYERS = (
    ("ep.errors", "ep.files", "ep.settings", "ep.version"),
    ("ep.config",),
    ("ep.layout",),
    ("ep.arming", "ep.record"),
    ("ep.memory",),
    ("ep.bootstrap",),
    ("ep.buffers",),
    ("ep.device",),
    ("ep.kernels",),
    ("ep.arguments", "ep.engine"),
    ("ep.host", "ep.gpu"),
    ("ep.lifecycle",),
    ("ep.prepared",),
    ("ep.exchange",),
    ("ep", "ep.testing"),
    ("ep.export",),
    ("ep.bench",),
    ("ep.doctor", "ep.tune"),
)
BESIDE = {"ep.reference": set(), "ep.routing": {"ep.reference"}}
ONLY_IN = {
    "mpi4py": {"ep.bootstrap.mpi", "ep.bench.record"},
    "nvshmem": {"ep.memory.nvshmem"},
    "torch": set(),
}


def modules():
    for path in sorted((SRC / "ep").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text())


def imports(tree):
    """Modules imported anywhere in a file, except for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def layer(name):
    """Index of the layer of a module; packages are matched by their longest name."""
    found = [
        (len(prefix), index)
        for index, layer in enumerate(LAYERS)
        for prefix in layer
        if name == prefix or name.startswith(prefix + ".")
    ]
    return max(found)[1]


ALL = dict(modules())


@pytest.mark.parametrize("name", ALL)
def test_a_file_imports_only_what_stands_above_it(name):
    for target in imports(ALL[name]):
        if target.split(".")[0] != "ep":
            continue
        if name in BESIDE:
            assert target in BESIDE[name], f"{name} imports {target}"
        elif target not in BESIDE:
            assert layer(target) <= layer(name), f"{name} imports {target}"


@pytest.mark.parametrize("name", ALL)
def test_heavy_libraries_stay_in_their_file(name):
    for target in imports(ALL[name]):
        allowed = ONLY_IN.get(target.split(".")[0])
        assert allowed is None or name in allowed, f"{name} imports {target}"


def test_every_file_is_short():
    long = {
        str(path.relative_to(SRC.parent)): lines
        for folder in (SRC / "ep", SRC.parent / "tests")
        for path in folder.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_import_is_quick_and_light():
    heavy = ["mpi4py", "torch", "cuda", "cutlass", "nvshmem", "rich", "click"]
    heavy += ["ep.bench", "ep.doctor", "ep.export", "ep.gpu", "ep.kernels.tuning", "ep.tune"]
    code = f"import sys, ep; print([name for name in {heavy} if name in sys.modules])"
    best_s = float("inf")
    for _ in range(3):
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        best_s = min(best_s, time.monotonic() - start)
        assert done.stdout.strip() == "[]"
    assert best_s < 1, "the contract allows a second, the interpreter's own start included"


def test_public_names():
    import ep

    assert sorted(ep.__all__) == list(ep.__all__)
    for name in ep.__all__:
        assert name == "__version__" or getattr(ep, name).__doc__, name


def test_versions_in_the_code_are_the_pins():
    from ep.kernels.compile import PINNED_COMPILER
    from ep.memory.nvshmem import TESTED

    extras = tomllib.loads((SRC.parent / "pyproject.toml").read_text())["project"]
    pins = [pin.replace("[cu13]", "") for pin in extras["optional-dependencies"]["gpu"]]
    assert f"nvidia-cutlass-dsl=={PINNED_COMPILER}" in pins
    assert {f"{name}=={version}" for name, version in TESTED.items()} <= set(pins)
