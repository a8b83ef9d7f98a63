#!/bin/sh
# Compares the errors of our libcudart with those of NVIDIA's library of the same version, call by call, over the same
# libcuda: NVIDIA's on a GPU, or rgpu's with a software GPU.
#
#   errors.sh FATBINARY HEADERS COMPILER_HEADERS NVIDIA_LIBRARY OUR_LIBRARY [RUNNER...]
#
# FATBINARY is NVIDIA's tool of that name. HEADERS contains cuda_runtime_api.h, COMPILER_HEADERS crt/host_defines.h. The
# libraries are files. RUNNER precedes the program (`rgpuctl run --backend software --`); the program uses the libcuda
# that it then finds. The exit status is 0 if all lines are equal.
set -eu

[ $# -ge 5 ] || {
    echo "usage: errors.sh FATBINARY HEADERS COMPILER_HEADERS NVIDIA_LIBRARY OUR_LIBRARY [RUNNER...]" >&2
    exit 2
}
here=$(dirname "$0")
fatbinary=$1 headers=$2 compiler_headers=$3 nvidia=$4 ours=$5
shift 5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$fatbinary" --create "$work/fatbin" -64 "--image3=kind=ptx,sm=70,file=$here/errors.ptx" --compress=false
"${CC:-gcc}" -O0 -I"$headers" -I"$compiler_headers" -o "$work/errors" "$here/errors.c" "$nvidia"
for who in nvidia ours; do
    if [ $who = nvidia ]; then library=$nvidia; else library=$ours; fi
    # The library named first provides the soname.
    "$@" env LD_PRELOAD="$library" "$work/errors" "$work/fatbin" >"$work/$who" || echo "with $library: exit status $?"
done
echo "$(wc -l <"$work/nvidia") lines"
diff "$work/nvidia" "$work/ours"
