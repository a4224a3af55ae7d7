#!/usr/bin/env bash
# A GPU in three runs of at most ten minutes each: kernels/slots.sh 1|2|3 OUT [--dry-run]
#
#   1  right?           limits, the CPU's tokens, the tests of kernels, graphs and memory, where a step's time goes
#   2  how fast?        tokens per second at 1 to 256 requests, kernels, the common benchmark, steps
#   3  why, beside whom? nano-vLLM (installed, or NANO_VLLM=CHECKOUT), transformers, mixtures, a bounded sweep of launches,
#                       counters
#
# Each ends with a block of text to paste into an issue, made from all that is in OUT: OUT/report.txt has it after every
# step, so stop the run whenever you like. OUT also has slot1.log and so on with all output, slot1.txt with a line for each
# step (exit code, seconds, name), and the figures as JSON. Each step has a limit of its own, so one that fails or hangs
# leaves the others their time; the exit code is 1 if any failed. PYTHON names the interpreter that has torch and Triton.
set -u
cd "$(dirname "$0")/.."

slot=${1:-} out=${2:-} dry=${3:-}
if [[ ! $slot =~ ^[123]$ || -z $out || ( -n $dry && $dry != --dry-run ) ]]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
python=${PYTHON:-python3}
# A GPU machine may lack what pyproject.toml asks for, and a network to fetch it.
if ! "$python" -c 'import numpy, pydantic, safetensors, tqdm, transformers, xxhash'; then
    echo "install it, or unpack its wheels (pydantic: also pydantic_core, annotated_types, typing_inspection) into" \
        "a folder and put that into PYTHONPATH" >&2
    exit 2
fi
"$python" -c 'import pytest' 2>/dev/null || echo "pytest is not installed: the tests of the first run will fail" >&2
mkdir -p "$out" && out=$(cd "$out" && pwd)
log=$out/slot$slot.log summary=$out/slot$slot.txt failed=0
: >"$log" && : >"$summary"
export HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

report() { "$python" kernels/gpu_report.py "$out"; }
running=
# Stopped from outside, too: `wait` can be interrupted, a command in the foreground cannot.
trap 'exit 130' INT TERM
trap '[[ -z $running ]] || kill "$running" 2>/dev/null; report' EXIT

# step SECONDS NAME COMMAND...: run it for at most SECONDS; add its output to the log and one line to the summary.
step() {
    local limit=$1 name=$2 start=$SECONDS code=0
    shift 2
    [[ -z $dry ]] || limit=$((10 * limit)) # an interpreter, perhaps on a busy CPU
    printf '\n==== %s: %s\n' "$name" "$*" >>"$log"
    timeout -k 10 "$limit" "$@" >>"$log" 2>&1 </dev/null &
    running=$!
    wait "$running" || code=$?
    running=
    [[ $code == 0 ]] || failed=1
    printf '%3d %4d s  %s%s\n' "$code" $((SECONDS - start)) "$name" "$([[ $code == 124 ]] && echo " (longer than $limit s)")" |
        tee -a "$summary"
    report >/dev/null
}

fresh() { # fresh NAME...: no figures of an earlier run into the same folder
    for name in "$@"; do rm -f "$out/$name".json*; done
}

bench() { # bench SECONDS NAME PART...: those parts of kernels/bench.py, their figures in NAME.json
    local limit=$1 name=$2
    shift 2
    step "$limit" "$name" "$python" kernels/bench.py $dry --json "$out/$name.json" "$@"
}

tests() { # tests SECONDS NAME ARGUMENT...: pytest, each test's end in tests-NAME.jsonl
    local limit=$1 name=$2 side_by_side=() chosen=()
    shift 2
    "$python" -c 'import xdist' 2>/dev/null && [[ -z $dry ]] && side_by_side=(--dist load -n $(($(nproc) < 12 ? $(nproc) : 12)))
    [[ -n $dry ]] && chosen=(--collect-only)
    step "$limit" "$name" "$python" -m pytest -p no:cacheprovider --outcomes "$out/tests-$name.jsonl" \
        ${side_by_side[@]+"${side_by_side[@]}"} ${chosen[@]+"${chosen[@]}"} "$@"
}

case $slot in
1)
    fresh limits tokens profile tests-kernels tests-engine
    [[ -n $dry ]] || step 30 "a GPU is here" "$python" kernels/bench.py --check
    bench 50 limits --only limits
    step 100 tokens "$python" kernels/same_tokens.py $dry "$out"
    tests 130 kernels tests/gpu/test_kernels.py tests/families/test_grouped.py tests/families/test_latent_kernel.py tests/gpu/test_graphs.py tests/gpu/test_sampling_kernels.py tests/gpu/test_fused.py
    tests 200 engine -m gpu -rs tests/gpu/test_gpu.py tests/gpu/test_gpu_right.py tests/engine/test_parity.py tests/scheduling/test_spyre.py tests/parallel/test_tensor_parallel.py
    step 80 profile "$python" kernels/profile_step.py $dry "$out"
    ;;
2)
    fresh rates kernels common steps
    bench 110 rates --only rates
    bench 180 kernels --only kernels
    bench 150 common --only common single overlap
    bench 150 steps --only steps
    ;;
3)
    fresh nano-vllm transformers mixtures sweep counted
    bench 110 nano-vllm --only nano_vllm ${NANO_VLLM:+--nano-vllm "$NANO_VLLM"}
    bench 70 transformers --only transformers
    bench 90 mixtures --only mixtures
    bench 210 sweep --sweep --limit 170
    if [[ -z $dry ]] && command -v ncu >/dev/null; then
        step 60 counters ncu --kernel-name regex:attention --launch-count 4 --set full \
            "$python" kernels/bench.py --json "$out/counted.json" --only kernels
    fi
    if [[ -z $dry ]] && command -v compute-sanitizer >/dev/null; then
        step 50 memcheck compute-sanitizer --tool memcheck "$python" -m pytest -p no:cacheprovider -x tests/gpu/test_gpu.py -m gpu -k replay
    fi
    ;;
esac
exit $failed
