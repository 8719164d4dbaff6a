"""The scripts of launch/, as far as they run without installing anything."""

import re
import subprocess
from pathlib import Path

import pytest

from ep.settings import VARIABLES

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


def test_the_benchmark_s_own_help_is_told_by_one_rank():
    """A number of ranks that is none is not even looked at."""
    done = start("bench.sh", "--", "--help", EP_MPI="site", EP_NP="none")
    assert "there is no mpirun in PATH" in done.stderr, done


def test_what_open_mpi_s_ranks_say_to_a_file_has_no_colours():
    """It gives each rank a terminal, whatever it is started in."""
    assert bash("ep_tune_openmpi 1; echo $TERM", "/usr/bin:/bin", TERM="xterm").stdout == "dumb\n"


SCRIPTS = sorted(path for path in LAUNCH.iterdir() if path.stat().st_mode & 0o100)


def start(script, *words, cwd=LAUNCH.parent, **env):
    return subprocess.run(
        ["/bin/bash", LAUNCH / script, *words],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_each_script_says_what_it_does(script):
    done = start(script.name, "--help")
    assert done.returncode == 0, done
    assert done.stdout.count("\n") > 5
    assert "SBATCH" not in done.stdout.replace("#SBATCH lines", "").replace("^#SBATCH", "")
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize(
    ("script", "words", "env", "told"),
    [
        ("gb300_nvl72.sbatch", [], {}, "this is no Slurm job: sbatch "),
        ("mpirun.sh", [], {}, "no COMMAND"),
        ("mpirun.sh", ["--np", "4"], {}, "--np is not known"),
        ("mpirun.sh", ["-n"], {}, "-n needs a value"),
        ("mpirun.sh", ["-n", "73", "x"], {}, "73 is not a number of ranks: 1 to 72"),
        ("mpirun.sh", ["-np", "73", "x"], {}, "73 is not a number of ranks: 1 to 72"),
        ("mpirun.sh", ["--hosts", "a:4,b", "x"], {}, "'b' of --hosts is no HOST:RANKS"),
        ("mpirun.sh", ["--hosts", "a:4", "-n", "5", "x"], {}, "5 ranks do not fit"),
        ("mpirun.sh", ["x"], {"EP_VENV": "/nonexistent"}, "no mpirun"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(script, words, env, told):
    done = start(script, *words, **env)
    assert done.returncode == 1, done
    assert told in done.stderr
    assert done.stderr.count("\n") == 1, done


def test_a_batch_script_says_where_it_must_be_submitted(tmp_path):
    done = start("gb300_nvl72.sbatch", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done
    assert "submit from the checkout" in done.stderr


MPIRUN = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; else echo "$@"; fi
"""


def test_neither_cdpath_nor_a_missing_home_misleads(places):
    (places / "site" / "bin" / "mpirun").write_text(MPIRUN.format(version="HYDRA"))
    done = subprocess.run(
        ["/bin/bash", "launch/mpirun.sh", "-n", "2", "python", "x y"],
        env={"PATH": f"{places}/site/bin:/usr/bin:/bin", "CDPATH": ".", "EP_VENV": "/nonexistent"},
        cwd=LAUNCH.parent,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("-np 2 python x y\n", "")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("HYDRA build details", "-np 6 -a -b -hosts nvl0:4,nvl1:4 python x"),
        ("mpirun (Open MPI) 5.0.11", "-np 6 -a -b -x EP_CHECK --host nvl0:4,nvl1:4 python x"),
    ],
)
def test_hosts_of_both_mpis(places, version, words):
    (places / "site" / "bin" / "mpirun").write_text(MPIRUN.format(version=version))
    path = f"{places}/site/bin:/usr/bin:/bin"
    given = ["-n", "6", "--hosts", "nvl0:4,nvl1:4", "-o", "-a", "-o", "-b", "python", "x"]
    done = start("mpirun.sh", *given, PATH=path, EP_VENV="/nonexistent", EP_CHECK="1")
    said = re.sub(r" -x (?!EP_CHECK)\S+", "", done.stdout.strip())
    assert said == words, done


def test_a_stranger_s_mpirun_is_told(places):
    (places / "site" / "bin" / "mpirun").write_text(MPIRUN.format(version="1.0"))
    path = f"{places}/site/bin:/usr/bin:/bin"
    done = start("mpirun.sh", "x", PATH=path, EP_VENV="/nonexistent")
    assert "neither MPICH's nor Open MPI's" in done.stderr


def settings():
    """Lines of env.sh that set something, or show how, by name; and whether they only show."""
    found = {}
    for line in (LAUNCH / "env.sh").read_text().splitlines():
        if re.match("#?export ", line):
            for name, value in re.findall(r"(\w+)=(\S+)", line):
                found[name] = (value, line.startswith("#"))
    return found


def test_every_setting_of_a_job_is_in_env_sh():
    of_scripts = "".join(path.read_text() for path in SCRIPTS if path.name != "env.sh")
    own = {name for name in VARIABLES if re.search(rf"^#   {name}\b", of_scripts, re.MULTILINE)}
    found = {name for name in settings() if name.startswith("EP_")}
    assert found == set(VARIABLES) - own


def test_a_user_s_own_value_wins():
    for name, (value, _) in settings().items():
        assert re.fullmatch(rf"\$\{{{name}:-.*\}}", value), name
    active = [name for name, (_, shows) in settings().items() if not shows]
    assert {"NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_DISABLE_NVLS"} <= set(active)
    script = f"source {LAUNCH}/env.sh; " + "; ".join(f'echo "${name}"' for name in active)
    own = {name: f"own{number}" for number, name in enumerate(active)}
    assert bash(script, "/usr/bin:/bin", **own).stdout.split() == list(own.values())
    assert "none" in bash(script, "/usr/bin:/bin", HOME="/home/x").stdout.split()


SRUN = """#!/bin/sh
case "$*" in
  --help) echo "$SRUN_HELP" ;;
  *imex*) echo "$NODES" ;;
  *) echo "srun $*"; echo "secret $EP_SECRET" ;;
esac
"""


@pytest.fixture
def rack(tmp_path):
    """Run the rack's script as Slurm does, with an srun that is played."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)

    def run(nodes="nvl0 4 channel0\nnvl1 4 channel0", *words, **env):
        env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "EP_VENV": "/nonexistent"} | env
        path = f"{tmp_path}:/usr/bin:/bin"
        return start("gb300_nvl72.sbatch", *words, PATH=path, NODES=nodes, **env)

    return run


def test_a_job_of_the_rack_has_a_secret_of_its_own_that_no_command_line_shows(rack):
    secrets = []
    for _ in range(2):
        done = rack()
        assert done.returncode == 0, done
        command, _, secret = done.stdout.strip().partition("\nsecret ")
        assert command == "srun python -m ep.bench"
        assert len(secret) >= 40
        assert secret not in done.stderr
        secrets.append(secret)
    assert secrets[0] != secrets[1]
    assert rack(EP_SECRET="mine").stdout.endswith("secret mine\n")


def test_a_node_without_an_imex_channel_is_named(rack):
    done = rack("nvl0 4 channel0\nnvl1 4 none\nnvl2 4 none\nnvl3 0 none")
    assert done.returncode == 1, done
    assert "no IMEX channel can be opened on nvl1,nvl2:" in done.stderr
    assert "srun" not in done.stdout
    # One node needs none, and the host backend has no GPUs.
    assert rack("nvl0 4 none", SLURM_JOB_NUM_NODES="1").returncode == 0
    assert rack("nvl0 0 none\nnvl1 0 none", "python", "x").stdout.startswith("srun python x\n")


def test_a_container_needs_pyxis(rack):
    done = rack(EP_IMAGE="ep.sqsh", SRUN_HELP="none")
    assert (done.returncode, "lacks the plugin pyxis" in done.stderr) == (1, True)
    done = rack(EP_IMAGE="ep.sqsh", SRUN_HELP="--container-image=IMAGE")
    root = LAUNCH.parent
    words = f"--container-image=ep.sqsh --container-mounts={root}:{root} --container-workdir={root}"
    assert done.stdout.startswith(f"srun {words} python -m ep.bench\n"), done
