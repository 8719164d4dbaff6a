"""The scripts of launch/, as far as they run without installing anything."""

import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def bash(script, path, **env):
    return subprocess.run(
        ["/bin/bash", "-c", f"set -euo pipefail; source {LAUNCH}/_setup.sh; {script}"],
        env={"PATH": path} | env,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def places(tmp_path):
    """An mpirun of an activated environment, before one of the site."""
    for name in ("venv", "site"):
        (tmp_path / name / "bin").mkdir(parents=True)
        program = tmp_path / name / "bin" / "mpirun"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "own" / "bin").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(("mpi", "found"), [("site", "site"), ("mpich", "venv"), ("", "venv")])
def test_the_mpirun_of_a_site_is_not_that_of_an_activated_environment(places, mpi, found):
    path = f"{places}/venv/bin:{places}/site/bin:/usr/bin:/bin"
    done = bash(f"ep_activate {places}/own; command -v mpirun; echo $PATH", path, EP_MPI=mpi)
    mpirun, now = done.stdout.split()
    assert mpirun == f"{places}/{found}/bin/mpirun", done
    assert now.startswith(f"{places}/own/bin:")


def test_a_site_without_an_mpirun_is_told_though_an_environment_has_one(places):
    done = subprocess.run(
        ["/bin/bash", LAUNCH / "bench.sh"],
        env={"PATH": f"{places}/venv/bin:/usr/bin:/bin", "EP_MPI": "site"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "there is no mpirun in PATH, apart from virtual environments" in done.stderr
