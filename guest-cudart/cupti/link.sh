#!/bin/sh
# Links libcupti.so.13 from cargo's static library of rgpu-cupti.
#
#   link.sh STATICLIB OUTDIR
#
# It exports the names in exports/13.txt, all under one version node with the library's name, like NVIDIA's library,
# and a name that distinguishes it from that one. It only needs the C library, because programs may load it without
# using CUDA. CC sets the compiler (default gcc).
set -eu

[ $# -eq 2 ] || { echo "usage: link.sh STATICLIB OUTDIR" >&2; exit 2; }
staticlib=$1
outdir=$2
here=$(dirname "$0")
name=libcupti.so.13

mkdir -p "$outdir"
script=$outdir/$name.map
{
    echo "$name {"
    echo "  global:"
    echo "    rgpu_libcupti;"
    sed 's/.*/    &;/' "$here/exports/13.txt"
    echo "  local: *;"
    echo "};"
} > "$script"

# nodelete: libcuda keeps addresses in this library, so it must stay loaded when its last user is closed.
"${CC:-gcc}" -shared -o "$outdir/$name.tmp" \
    -Wl,--version-script="$script" -Wl,--no-undefined-version -Wl,-soname,"$name" \
    -Wl,--whole-archive "$staticlib" -Wl,--no-whole-archive \
    -Wl,--gc-sections -Wl,--no-undefined -Wl,-z,relro -Wl,-z,now -Wl,-z,nodelete -Wl,--strip-all \
    -static-libgcc -lpthread -ldl -lm -lc
rm -f "$script"
# Replace the old library atomically, because a program may be starting.
mv -f "$outdir/$name.tmp" "$outdir/$name"
