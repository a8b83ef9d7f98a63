#!/bin/bash
# Builds a small Linux 6.1 that watches itself, from Debian's source:
#
#   debug-kernel.sh FOLDER kasan|kcsan
#
# kasan: accesses to freed or foreign memory (KASAN), wrong use of locks (lockdep), of the DMA API and of objects that are
#        freed while in use, undefined behavior (UBSAN), memory that nothing refers to (kmemleak), failed allocations on
#        request (fault injection).
# kcsan: data races (KCSAN).
#
# The kernel comes into FOLDER/kasan or FOLDER/kcsan. `cargo xtask test debug_kernels` builds both and runs the driver's
# tests on them. Needs Debian 12 and 3 GB in FOLDER; installs what it needs if it is root.
set -euo pipefail
kind=${2:-}
if [ $# != 2 ] || { [ "$kind" != kasan ] && [ "$kind" != kcsan ]; }; then
    sed -n '2,13p' "$0" | cut -c3-
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/$kind"
folder=$(cd "$1" && pwd)
packages="linux-source-6.1 flex bison bc libelf-dev libssl-dev make gcc xz-utils kmod"
# shellcheck disable=SC2086 # They are several.
dpkg-query -W $packages > /dev/null 2>&1 ||
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $packages; } > /dev/null

archive=/usr/src/linux-source-6.1.tar.xz
source=$folder/source
if [ ! "$source" -nt "$archive" ]; then
    rm -rf "$source" "$source.part"
    mkdir "$source.part"
    tar -xf "$archive" -C "$source.part" --strip-components 1
    mv "$source.part" "$source"
    touch "$source"
fi
root=$folder/$kind
objects=$root/objects
mkdir -p "$objects" "$root/boot" "$root/usr/src"
build() { make -s -C "$source" O="$objects" -j"$(nproc)" "$@"; }

build tinyconfig > /dev/null
cat "$here/debug-kernel.config" "$here/debug-kernel-$kind.config" > "$root/wanted"
# A kernel with other options has another version, so that nobody uses a module that was built for the one before.
echo "CONFIG_LOCALVERSION=\"-$kind-$(sha256sum "$root/wanted" | cut -c1-8)\"" >> "$root/wanted"
"$source/scripts/kconfig/merge_config.sh" -m -O "$objects" "$objects/.config" "$root/wanted" > /dev/null
build olddefconfig > /dev/null
# An option that the kernel does not know, or whose dependencies are missing, is silently off.
if grep '=y$' "$root/wanted" | grep -vxF -f "$objects/.config"; then
    echo "$0: the kernel has not taken these options" >&2
    exit 1
fi
build bzImage modules
version=$(build kernelrelease)
cp "$objects/arch/x86/boot/bzImage" "$root/boot/vmlinuz-$version"
build modules_install INSTALL_MOD_PATH="$root"
ln -sfn "$objects" "$root/usr/src/linux-headers-$version"
echo "$version" > "$root/version"
echo "built $root/boot/vmlinuz-$version"
