#!/bin/sh
# Compares our libcudart with NVIDIA's, call by call, over the same libcuda. Needs a GPU.
#
#   compare.sh NVCC NVIDIA_LIBRARIES OUR_LIBRARIES
#
# NVCC is the compiler, NVIDIA_LIBRARIES the folder with NVIDIA's libcudart.so.* (and libcudadevrt.a), OUR_LIBRARIES the
# one with ours. ARCH is the GPU's architecture (default native). The exit status is 0 if all lines are equal.
set -eu

[ $# -eq 3 ] || { echo "usage: compare.sh NVCC NVIDIA_LIBRARIES OUR_LIBRARIES" >&2; exit 2; }
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# PyPI's packages lack the file name that the linker expects.
for library in "$2"/libcudart.so.*; do ln -sf "$library" "$work/libcudart.so"; done
"$1" -cudart shared -arch="${ARCH:-native}" -L"$work" -L"$2" -o "$work/api" "$here/api.cu"
LD_LIBRARY_PATH=$2 "$work/api" > "$work/nvidia" 2> "$work/nvidia.err" || echo "with NVIDIA's: exit status $?"
LD_LIBRARY_PATH=$3 "$work/api" > "$work/ours" 2> "$work/ours.err" || echo "with ours: exit status $?"
cat "$work/ours.err"
echo "$(wc -l < "$work/nvidia") lines"
diff "$work/nvidia" "$work/ours"
