#!/bin/sh
# Links the static library of this crate into libcudart.so.12 or libcudart.so.13.
#
#   link.sh STATICLIB OUTDIR 12|13
#
# STATICLIB is cargo's libcudart.a, built with the feature v12 for 12. The names that are exported, all under one
# version node that is called like the library, are those of exports/12.txt or 13.txt; a name in the list that the
# library lacks is an error. CC chooses the compiler (default gcc).
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

# nodelete: the driver and the C library keep addresses in it, so closing the last plugin that uses it must not unload it.
"${CC:-gcc}" -shared -o "$outdir/$name.tmp" \
    -Wl,--version-script="$script" -Wl,--no-undefined-version -Wl,-soname,"$name" \
    -Wl,--whole-archive "$staticlib" -Wl,--no-whole-archive \
    -Wl,--gc-sections -Wl,--no-undefined -Wl,-z,relro -Wl,-z,now -Wl,-z,nodelete -Wl,--strip-all \
    -static-libgcc -lpthread -ldl -lm -lc
rm -f "$script"
# The new library takes the old one's place in one step: a program may be starting.
mv -f "$outdir/$name.tmp" "$outdir/$name"
