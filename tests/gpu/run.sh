#!/usr/bin/env bash
# The first hour on a GPU: bash run.sh CALL-OR-PIECE...   tests/gpu/README.md says what each piece shows.
#
# "run.sh 1" does the pieces of call 1 that have not been done, in order of worth on one GPU, and then what was cut short
# in an earlier call: of its tests those that had not ended.  A piece that is named ("run.sh test-gpu-torch", or a
# pattern) is done anew.  Each piece is followed by the next one whatever came of it, and $OUT has all results after each:
# summary.txt, to be read at once, and results.tgz.
set -uo pipefail

LIMIT=${LIMIT:-540} # seconds in which this call ends
STATE=${FIRST_HOUR:-${XDG_CACHE_HOME:-$HOME/.cache}/distopt-first-hour} # what the next call finds; whoever wants to begin anew removes it
OUT=${OUT:-$STATE/out}
export PYTHON=${GPU_PYTHON:-python3}

# call, piece, seconds that it may take, and what it does: the only list of them
PIECES='
1 test-gpu-doctor     60 doctor
1 test-gpu-train     150 tests tests/gpu/test_train.py
1 test-gpu-load      180 tests tests/gpu/test_load.py
1 test-gpu-kernels   200 tests tests/gpu/test_real.py
1 test-gpu-one       120 tests tests/gpu/test_ranks.py -k one_rank
2 test-gpu-torch     240 tests tests/gpu/test_torch.py
2 test-gpu-two       200 tests tests/gpu/test_ranks.py -k two_ranks
2 bench-gpu-models   150 benchmark gpu_models
2 bench-gpu-kernels  150 benchmark gpu_kernels
3 test-gpu-faults    120 tests tests/gpu/test_faults.py
3 test-gpu-memcheck  150 sanitizer memcheck
3 test-gpu-racecheck 150 sanitizer racecheck
3 test-gpu-laws      200 tests tests/gpu/test_every_law.py -k "(one_rank or two_ranks) and not modes"
3 test-gpu-modes     200 tests tests/gpu/test_every_law.py -k "two_ranks and modes"
3 test-gpu-four      200 tests tests/gpu/test_ranks.py tests/gpu/test_every_law.py -k "four_ranks and (verbs or steps or sums or bits)"
'

doctor() {
  "$PYTHON" -m distopt.cli doctor
}

tests() {
  "$PYTHON" -m pytest -m gpu -v --durations=10 -p no:cacheprovider -o faulthandler_timeout=100 "$@"
}

benchmark() {
  "$PYTHON" -m "benchmarks.$1" --save
}

sanitizer() {
  command -v compute-sanitizer || { echo "skipped: compute-sanitizer is not on PATH; the CUDA toolkit has it"; return; }
  DISTOPT_NO_POOL=1 compute-sanitizer --tool "$1" --error-exitcode 9 "$PYTHON" -m pytest -m gpu -v -p no:cacheprovider \
    tests/gpu/test_load.py tests/gpu/test_real.py -k "a_step or 1000003 or (every_mode and float32)"
}

# what there is here, none of which may hang
machine() {
  echo "== $(date '+%Y-%m-%d %H:%M'), $(cat commit 2> /dev/null || git describe --always --dirty 2>&1), $(nproc) cores"
  timeout 20 nvidia-smi --query-gpu=index,name,memory.total,memory.used,driver_version --format=csv 2>&1 | head -9
  "$PYTHON" --version
  timeout 60 "$PYTHON" - << 'END_OF_PYTHON' 2>&1 | tail -20
from importlib.metadata import PackageNotFoundError, version
for name in "numpy ml_dtypes cupy-cuda13x cupy-cuda12x nvidia-nccl-cu13 nvidia-nccl-cu12 torch mpi4py pytest hypothesis".split():
    try:
        print(name, version(name), end="; ")
    except PackageNotFoundError:
        print("no", name, end="; ")
from distopt import device
print("\nGPU:", device.gpu_state())
from distopt.comm import nccl_library as nccl
print("NCCL:", nccl.nccl_state(), nccl.version_text(nccl.nccl_version()) if nccl.nccl_state() == "ok" else "")
END_OF_PYTHON
  for name in nvcc make g++ cmake ninja compute-sanitizer mpiexec; do
    echo "$name: $(command -v "$name" || echo none)"
  done | paste -sd ' '
  command -v nvcc > /dev/null && nvcc --version | tail -1
  timeout 5 ip -br addr 2>&1
  timeout 20 "$PYTHON" -c 'import socket
with socket.create_server(("127.0.0.1", 0)) as there, socket.create_connection(there.getsockname()):
    print("loopback: ok")' 2>&1 | tail -1
}

# the packages that this Python lacks, from wheels/; the libraries, if those that were carried are not of these sources
prepare() {
  local needs="import hypothesis, ml_dtypes, numpy, pytest" stale
  stale='from distopt.kernels import signatures as s; assert s.library().source_hash().decode() == s.source_hash()'
  if [[ -d wheels ]] && ! "$PYTHON" -c "$needs" 2> /dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --upgrade --target "$STATE/site" wheels/*.whl
  fi
  "$PYTHON" -c "$needs" || return
  "$PYTHON" -c "$stale" 2> /dev/null && return
  if command -v ninja > /dev/null; then export CMAKE_GENERATOR=Ninja; fi
  cmake -S . -B "$STATE/build" -DCMAKE_BUILD_TYPE=Release \
    && timeout 240 cmake --build "$STATE/build" --parallel "$(nproc)" && cp "$STATE"/build/libdistopt*.so distopt
}

# outcome CODE LOG: passed, failed, cut or skipped
outcome() {
  case $1 in
    124 | 137) echo cut ;;
    0 | 5) # 5: all tests had ended in an earlier call
      if grep -qE ' (FAILED|ERROR) ' "$2"; then
        echo failed
      elif ! grep -q ' PASSED ' "$2" && grep -qE '^skipped: |^(warn +)?no GPU| SKIPPED ' "$2"; then
        echo skipped
      else
        echo passed
      fi ;;
    *) echo failed ;;
  esac
}

# why OUTCOME LOG: the lines that say what came of it
why() {
  case $1 in
    passed) grep -m12 -E '^=+ .* in [0-9.]+s|MISSED' "$2" | tr -d = ;;
    skipped) grep -m1 -oE 'no GPU.*|skipped: .*' "$2" ;;
    failed)
      {
        grep -E '^(E  |FAILED |ERROR|fail |[a-zA-Z.]*(Error|Exception)\b)' "$2" | awk '!seen[$0]++' | head -12
        grep -E '^(=+ .* in [0-9.]+s|left behind)' "$2" | tr -d =
      } | grep . || tail -5 "$2" ;;
    cut) tail -3 "$2" ;;
  esac | cut -c-200 | sed 's/^ */         /'
}

# is there time for a piece?  15 s are for what does not end when it is asked to, and for the results
enough() {
  ((LIMIT - SECONDS >= 25))
}

# end_rest NAME: a process that its piece has left behind would have a GPU that the next one wants
end_rest() {
  local rest
  rest=$(grep -lszx "DISTOPT_LOG=$STATE/$1.log" /proc/[0-9]*/environ | cut -d/ -f3)
  [[ -z $rest ]] || { echo "left behind, and ended: processes" $rest; kill -KILL $rest; }
}

# piece NAME SECONDS COMMAND: do it, or what is left of it, in the time that is left
piece() {
  local log=$STATE/results/$1.txt seconds=$2 left=$((LIMIT - SECONDS - 15)) started=$SECONDS code=0 came
  if ! enough; then
    printf 'cut      %-18s not begun\n' "$1" | tee "$STATE/$1.end"
    bad=1
    return
  fi
  { echo "== $(date '+%Y-%m-%d %H:%M:%S') $1: $3"; head -3 "$STATE/machine.txt"; } >> "$log"
  DISTOPT_LOG=$STATE/$1.log timeout -s INT -k 10 $((seconds < left ? seconds : left)) \
    bash -c "$3" < /dev/null >> "$log" 2>&1 || code=$?
  end_rest "$1" >> "$log" 2>&1
  came=$(outcome $code "$log")
  [[ $came != failed && $came != cut ]] || bad=1
  { printf '%-8s %-18s %4d s\n' "$came" "$1" $((SECONDS - started)); why "$came" "$log"; } | tee "$STATE/$1.end"
  cp benchmarks/results/gpu_{kernels,models}.txt "$STATE/results" 2> /dev/null
  save
}

# what is known of all pieces, where the caller finds it
save() {
  {
    cat "$STATE/machine.txt"
    echo "== pieces, in order of worth"
    while read -r _ name _; do cat "$STATE/$name.end" 2> /dev/null; done <<< "$PIECES"
  } > "$OUT/summary.txt"
  tar czf "$OUT/results.tgz" -C "$STATE" machine.txt results
}

if (($# == 0)); then
  echo "which call or piece?$PIECES"
  exit 2
fi
cd "$(dirname "$0")" && until [[ -e CMakeLists.txt ]]; do cd ..; done
mkdir -p "$STATE/results" "$OUT"
export PYTHONPATH=$PWD:$STATE/site PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export CUPY_CACHE_DIR=$STATE/cupy DISTOPT_CACHE=$STATE/kernels # what is compiled is compiled once
export -f doctor tests benchmark sanitizer

prepare > "$STATE/prepared.txt" 2>&1 || why failed "$STATE/prepared.txt"
machine | tee "$STATE/machine.txt"

bad=0 # has a piece failed, or been cut?
while read -r call name seconds command; do
  for words in "$@"; do
    if [[ -n $name && $name == $words ]]; then
      rm -f "$STATE/$name".{end,log} "$STATE/results/$name.txt"
    elif [[ $call != "$words" || -e $STATE/$name.end ]]; then
      continue
    fi
    piece "$name" "$seconds" "$command"
  done
done <<< "$PIECES"
while [[ ${1:-} == [0-9]* ]] && enough && read -r _ name seconds command; do
  if grep -qs ^cut "$STATE/$name.end"; then piece "$name" "$seconds" "$command"; fi
done <<< "$PIECES"
save
exit $bad
