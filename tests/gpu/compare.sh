#!/bin/sh
# Runs the programs and Python scripts of this folder natively and through rgpu on this machine's GPU, and compares what they print.
#
#   compare.sh RGPUCTL [NAME...]
#
# RGPUCTL is the command of a build whose guest libraries lie beside it; NAME picks from the files here and from the programs in ../programs, without their ending. It needs nvcc, and a python3
# with what the scripts import: PyTorch, CuPy, JAX, Numba. Exit status: how many comparisons failed.
set -u

[ $# -ge 1 ] || { echo "usage: compare.sh RGPUCTL [NAME...]" >&2; exit 2; }
rgpuctl=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# A library that meets an error where it can give it to nobody says so in a warning.
warnings() { # native or remote
    grep "CUDA warning" "$work/$1.err" >> "$work/$1"
}

compare() { # name, then the command
    name=$1
    shift
    "$@" > "$work/native" 2> "$work/native.err" || { echo "$name fails natively"; tail -3 "$work/native.err"; failed=$((failed + 1)); return; }
    warnings native
    for transport in local tcp; do
        "$rgpuctl" run --backend cuda --transport $transport -- "$@" > "$work/remote" 2> "$work/remote.err"
        warnings remote
        if diff "$work/native" "$work/remote" > "$work/diff"; then
            echo "$name, $transport: the same"
        else
            echo "$name, $transport: differs"
            head -20 "$work/diff"
            tail -5 "$work/remote.err"
            failed=$((failed + 1))
        fi
    done
}

[ $# -gt 0 ] || set -- mapped_host graph_capture torch_ops
for name in "$@"; do
    source=$here/$name.cu
    [ -f "$source" ] || source=$here/../programs/$name.cu
    if [ -f "$source" ]; then
        nvcc -cudart shared -arch=native -o "$work/$name" "$source" -lcuda || { failed=$((failed + 1)); continue; }
        compare "$name" "$work/$name"
    else
        compare "$name" python3 "$here/$name.py"
    fi
done
exit $failed
