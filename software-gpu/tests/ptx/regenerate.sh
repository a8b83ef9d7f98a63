#!/bin/sh
# Compiles the .cu files in this folder to PTX. Needs nvcc 13.0 on the PATH.
set -eu
cd "$(dirname "$0")"
for source in *.cu; do
    name=${source%.cu}
    arch=compute_75
    flags=
    case $name in features | clusters | nested) arch=compute_90 ;; esac
    [ "$name" = nested ] && flags=-rdc=true
    nvcc -std=c++17 -ptx $flags -arch=$arch -O3 "$source" -o "$name.ptx"
    nvcc -std=c++17 -ptx $flags -arch=compute_90 -Xcicc -O0 "$source" -o "$name.O0.ptx"
done
nvcc -fatbin -gencode arch=compute_75,code=compute_75 -gencode arch=compute_90,code=compute_90 programs.cu -o programs.zstd.fatbin
nvcc -fatbin --compress-mode=none -arch=compute_80 programs.cu -o programs.plain.fatbin || true
