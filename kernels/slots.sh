#!/usr/bin/env bash
# A GPU in three runs of at most ten minutes each: kernels/slots.sh 1|2|3 OUT [--dry-run]
#
#   1  right?           limits, where a step's time goes, the tests of kernels, graphs and memory
#   2  how fast?        the common benchmark, overlap, kernels, steps
#   3  why, beside whom? a bounded sweep of launches, transformers, nano-vLLM (NANO_VLLM=CHECKOUT), mixtures, counters
#
# Everything is written into OUT: slot1.log and so on with all output, slot1.txt with a line for each step (exit code,
# seconds, name), and the figures as JSON. Each step has a limit of its own, so one that fails or hangs leaves the others
# their time; the exit code is 1 if any failed. PYTHON names the interpreter that has torch and Triton.
set -u
cd "$(dirname "$0")/.."

slot=${1:-} out=${2:-} dry=${3:-}
if [[ ! $slot =~ ^[123]$ || -z $out || ( -n $dry && $dry != --dry-run ) ]]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
python=${PYTHON:-python3}
# A GPU machine may lack what pyproject.toml asks for, and a network to fetch it.
if ! "$python" -c 'import numpy, pydantic, safetensors, tqdm, transformers, xxhash'; then
    echo "install it, or unpack its wheels (pydantic: also pydantic_core, annotated_types, typing_inspection) into" \
        "a folder and put that into PYTHONPATH" >&2
    exit 2
fi
mkdir -p "$out" && out=$(cd "$out" && pwd)
log=$out/slot$slot.log summary=$out/slot$slot.txt failed=0
: >"$log" && : >"$summary"
export HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# step SECONDS NAME COMMAND...: run it for at most SECONDS; add its output to the log and one line to the summary.
step() {
    local limit=$1 name=$2 start=$SECONDS code=0
    shift 2
    printf '\n==== %s: %s\n' "$name" "$*" >>"$log"
    timeout -k 10 "$limit" "$@" >>"$log" 2>&1 </dev/null || code=$?
    [[ $code == 0 ]] || failed=1
    printf '%3d %4d s  %s%s\n' "$code" $((SECONDS - start)) "$name" "$([[ $code == 124 ]] && echo " (longer than $limit s)")" |
        tee -a "$summary"
}

bench() { # bench SECONDS NAME PART...: those parts of kernels/bench.py, their figures in NAME.json
    local limit=$1 name=$2
    shift 2
    step "$limit" "$name" "$python" kernels/bench.py $dry --json "$out/$name.json" "$@"
}

tests() { # tests SECONDS NAME ARGUMENT...
    local limit=$1 name=$2 side_by_side=() chosen=()
    shift 2
    "$python" -c 'import xdist' 2>/dev/null && [[ -z $dry ]] && side_by_side=(--dist load -n 12)
    [[ -n $dry ]] && chosen=(--collect-only)
    step "$limit" "$name" "$python" -m pytest -p no:cacheprovider ${side_by_side[@]+"${side_by_side[@]}"} \
        ${chosen[@]+"${chosen[@]}"} "$@"
}

case $slot in
1)
    [[ -n $dry ]] || step 30 "a GPU is here" "$python" kernels/bench.py --check
    bench 60 limits --only limits
    step 120 profile "$python" kernels/profile_step.py $dry "$out"
    tests 150 "kernels and graphs" tests/engine/test_kernels.py tests/families/test_grouped.py tests/families/test_latent_kernel.py tests/engine/test_graphs.py tests/engine/test_sampling_kernels.py tests/refinements/test_fused.py
    tests 230 "engine on a GPU" -m gpu -rs tests/engine/test_gpu.py tests/engine/test_gpu_right.py tests/engine/test_parity.py tests/systems/test_spyre.py tests/processes/test_tensor_parallel.py
    ;;
2)
    bench 180 common --only common single overlap
    bench 200 kernels --only kernels
    bench 200 steps --only steps
    ;;
3)
    bench 240 sweep --sweep --limit 200
    bench 150 beside --only transformers nano_vllm ${NANO_VLLM:+--nano-vllm "$NANO_VLLM"}
    bench 90 mixtures --only mixtures
    if [[ -z $dry ]] && command -v ncu >/dev/null; then
        step 60 counters ncu --kernel-name regex:attention --launch-count 4 --set full \
            "$python" kernels/bench.py --json "$out/counted.json" --only kernels
    fi
    if [[ -z $dry ]] && command -v compute-sanitizer >/dev/null; then
        step 50 memcheck compute-sanitizer --tool memcheck "$python" -m pytest -p no:cacheprovider -x tests/engine/test_gpu.py -m gpu -k replay
    fi
    ;;
esac
exit $failed
