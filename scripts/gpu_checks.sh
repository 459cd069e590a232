#!/usr/bin/env bash
# All that only a GPU can show, in minutes: the kernels against the reference, the engine against itself and against
# transformers. `make test` holds the rest, on any machine.
#
#   scripts/gpu_checks.sh              tests of kernels, side by side since most of their time is compiling, then those
#                                      of whole engines, one after another since each takes most of the GPU's memory
#   scripts/gpu_checks.sh --memcheck   compute-sanitizer over each kernel at small sizes, and nothing else
#
# PYTHON names another interpreter than .venv/bin/python, SANITIZER another compute-sanitizer than that on PATH (one
# comes with the CUDA toolkit and with the package nvidia-cuda-sanitizer-api). Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

pytest=("${PYTHON:-.venv/bin/python}" -m pytest -q -p no:cacheprovider)
export OMP_NUM_THREADS=1
"${pytest[0]}" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "there is no GPU")'

if [[ ${1:-} == --memcheck ]]; then
    shift
    # Each tensor in memory of its own, or what lies beyond its end would be another tensor's.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    exec "${SANITIZER:-compute-sanitizer}" --tool memcheck --error-exitcode 9 --report-api-errors no \
        "${pytest[@]}" tests/gpu/test_each_kernel.py "$@"
fi

logs=$(mktemp -d)
trap 'jobs -p | xargs -r kill 2>/dev/null || true; rm -rf "$logs"' EXIT
status=0
none_selected=5
declare -A running
for file in tests/gpu/test_*.py; do
    [[ $file == tests/gpu/test_engine.py ]] && continue
    "${pytest[@]}" --durations=3 --basetemp="$logs/${file##*/}.tmp" "$file" "$@" >"$logs/${file##*/}" 2>&1 &
    running[$file]=$!
done
for file in "${!running[@]}"; do
    code=0
    wait "${running[$file]}" || code=$?
    if ((code == 0 || code == none_selected)); then
        echo "$file: $(tail -n 1 "$logs/${file##*/}")"
    else
        status=1
        echo "$file: FAILED"
        cat "$logs/${file##*/}"
    fi
done

equal_transformers='tests/models/test_families_in_llm.py::test_tokens_equal_transformers'
code=0
"${pytest[@]}" --durations=10 --basetemp="$logs/engines.tmp" tests/gpu/test_engine.py tests/test_solo_run.py \
    tests/test_equals_transformers.py "$equal_transformers"[{gpt-oss,gemma2,falcon-7b}] "$@" || code=$?
((code == 0 || code == none_selected)) || status=1
exit "$status"
