#!/usr/bin/env bash
# Ends what up.sh has started, jobs first, and removes its folder. May be run again.
#
#   down.sh FOLDER
set -uo pipefail
PATH=$PATH:/usr/sbin:/sbin

case ${1:-} in
  '' | -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' -- "$0"
    exit
    ;;
esac
lab=$1
export SLURM_CONF=$lab/slurm.conf
if [[ ! -e $lab/run ]]; then exit 0; fi

# What runs for this lab has its SLURM_CONF, or its folder, in its words: tasks, too.
ours() { # NAME...
  local name pid
  for name in "$@"; do
    for pid in $(pgrep -x "$name"); do
      if grep -qF -- "$lab/" "/proc/$pid/cmdline" ||
        grep -qzxF -- "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ"; then
        echo "$pid"
      fi 2>/dev/null
    done
  done
}

end() { # NAME...
  local signal pids
  for signal in TERM KILL; do
    for _ in {1..30}; do
      mapfile -t pids < <(ours "$@")
      ((${#pids[@]})) || return 0
      kill "-$signal" "${pids[@]}" 2>/dev/null
      sleep 0.1
    done
  done
}

mapfile -t jobs < <(timeout 5 squeue -h -o %i 2>/dev/null)
if ((${#jobs[@]})); then
  timeout 5 scancel --signal=KILL --full "${jobs[@]}" 2>/dev/null
  timeout 5 scancel "${jobs[@]}" 2>/dev/null
  for _ in {1..20}; do
    [[ -n $(timeout 5 squeue -h 2>/dev/null) ]] || break
    sleep 0.2
  done
fi
end srun
end slurmstepd
end slurmd
end slurmctld
end munged
rm -rf -- "$lab"
