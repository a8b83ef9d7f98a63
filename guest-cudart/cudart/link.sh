#!/bin/sh
# Links the static library of this crate into libcudart.so.12 or libcudart.so.13.
#
#   link.sh STATICLIB OUTDIR 12|13
#
# STATICLIB is cargo's libcudart.a, built with the feature v12 for 12. The library exports the names in exports/12.txt or
# 13.txt, all under one version node with the library's name. A listed name that the library lacks is an error. CC sets
# the compiler (default gcc).
set -eu

[ $# -eq 3 ] || { echo "usage: link.sh STATICLIB OUTDIR 12|13" >&2; exit 2; }
staticlib=$1
outdir=$2
version=$3
here=$(dirname "$0")
exports=$here/exports/$version.txt
[ -f "$exports" ] || { echo "link.sh: there is no list of exports for version $version" >&2; exit 2; }

name=libcudart.so.$version
mkdir -p "$outdir"
script=$outdir/$name.map
{
    echo "$name {"
    echo "  global:"
    sed 's/.*/    &;/' "$exports"
    echo "  local: *;"
    echo "};"
} > "$script"

# nodelete: the driver and the C library keep addresses in this library, so it must stay loaded when its last user is closed.
"${CC:-gcc}" -shared -o "$outdir/$name.tmp" \
    -Wl,--version-script="$script" -Wl,--no-undefined-version -Wl,-soname,"$name" \
    -Wl,--whole-archive "$staticlib" -Wl,--no-whole-archive \
    -Wl,--gc-sections -Wl,--no-undefined -Wl,-z,relro -Wl,-z,now -Wl,-z,nodelete -Wl,--strip-all \
    -static-libgcc -lpthread -ldl -lm -lc
rm -f "$script"
# Replace the old library atomically, because a program may be starting.
mv -f "$outdir/$name.tmp" "$outdir/$name"
