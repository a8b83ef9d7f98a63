#!/bin/sh
# Links libcuda.so.1 from cargo's static library of rgpu-cuda.
#
#   link.sh STATICLIB OUTDIR
#
# It exports the names in exports/libcuda.txt, without versions like NVIDIA's library, and nothing else. NCCL
# finds its network in it by the name libnccl-net.so.
set -eu
static=$1
out=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
script=$(mktemp)
trap 'rm -f "$script"' EXIT
{
    echo '{ global:'
    sed 's/$/;/' "$here/exports/libcuda.txt"
    echo 'local: *; };'
} >"$script"
${CC:-cc} -shared -o "$out/libcuda.so.1" -Wl,-soname,libcuda.so.1 -Wl,--version-script="$script" \
    -Wl,--whole-archive "$static" -Wl,--no-whole-archive \
    -Wl,--gc-sections -Wl,-z,defs -Wl,-z,relro -Wl,-z,now -Wl,-z,nodelete -Wl,-Bsymbolic -Wl,--strip-all \
    -lpthread -ldl -lm -lgcc_s -lc
ln -sf libcuda.so.1 "$out/libcuda.so"
ln -sf libcuda.so.1 "$out/libnccl-net.so"
