#!/bin/bash
# Builds a small Linux 6.1 that watches its own memory, locks or data races, from Debian's source:
#
#   debug-kernel.sh FOLDER kasan|kcsan
#
# kasan: accesses to freed or foreign memory (KASAN), wrong use of locks (lockdep), objects that are freed while in use.
# kcsan: data races (KCSAN).
#
# Then run the driver's tests on it, as root:
#
#   RGPU_TEST_KERNEL=FOLDER cargo test -p rgpu-tests --test driver -- --test-threads 2
#
# Needs Debian 12 and about 3 GB in FOLDER; takes ten minutes on two idle cores. Installs what it needs.
set -euo pipefail
[ $# = 2 ] && { [ "$2" = kasan ] || [ "$2" = kcsan ]; } || { sed -n '2,14p' "$0" | cut -c3-; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
apt-get install -y -q linux-source-6.1 flex bison bc libelf-dev libssl-dev make gcc xz-utils kmod cpio rsync > /dev/null

source=$folder/source
if [ ! -d "$source" ]; then
    mkdir "$source.part"
    tar -xf /usr/src/linux-source-6.1.tar.xz -C "$source.part" --strip-components 1
    mv "$source.part" "$source"
fi
cd "$source"
cat > kernel/configs/rgpu.config <<'CONFIG'
CONFIG_LOCALVERSION="-debug"
CONFIG_64BIT=y
CONFIG_SMP=y
CONFIG_PREEMPT=y
CONFIG_MODULES=y
CONFIG_MODULE_UNLOAD=y
CONFIG_BLK_DEV_INITRD=y
CONFIG_RD_GZIP=y
CONFIG_BINFMT_ELF=y
CONFIG_BINFMT_SCRIPT=y
CONFIG_MULTIUSER=y
CONFIG_DEVTMPFS=y
CONFIG_TMPFS=y
CONFIG_PROC_FS=y
CONFIG_PROC_SYSCTL=y
CONFIG_SYSFS=y
CONFIG_SHMEM=y
CONFIG_VM_EVENT_COUNTERS=y
CONFIG_MEMCG=y
CONFIG_TRANSPARENT_HUGEPAGE=y
CONFIG_PRINTK=y
CONFIG_BUG=y
CONFIG_KALLSYMS=y
CONFIG_TTY=y
CONFIG_SERIAL_8250=y
CONFIG_SERIAL_8250_CONSOLE=y
CONFIG_PCI=y
CONFIG_PCI_MSI=y
CONFIG_ACPI=y
CONFIG_PM=y
CONFIG_SUSPEND=y
CONFIG_RTC_CLASS=y
CONFIG_RTC_DRV_CMOS=y
CONFIG_HIGH_RES_TIMERS=y
CONFIG_POSIX_TIMERS=y
CONFIG_FUTEX=y
CONFIG_EPOLL=y
CONFIG_SIGNALFD=y
CONFIG_EVENTFD=y
CONFIG_TIMERFD=y
CONFIG_UNIX=y
CONFIG_NET=y
CONFIG_PTRACE=y
CONFIG_CROSS_MEMORY_ATTACH=y
CONFIG_VIRTIO_MENU=y
CONFIG_VIRTIO_PCI=y
CONFIG_VIRTIO_CONSOLE=y
CONFIG_DEBUG_KERNEL=y
CONFIG_DEBUG_INFO_NONE=y
CONFIG_FRAME_POINTER=y
CONFIG_UNWINDER_FRAME_POINTER=y
CONFIG_STACKTRACE=y
CONFIG_DEBUG_LIST=y
CONFIG_DEBUG_SG=y
CONFIG_PANIC_ON_OOPS=y
CONFIG
if [ "$2" = kasan ]; then
    cat >> kernel/configs/rgpu.config <<'CONFIG'
CONFIG_KASAN=y
CONFIG_KASAN_GENERIC=y
CONFIG_KASAN_INLINE=y
CONFIG_KASAN_VMALLOC=y
CONFIG_PROVE_LOCKING=y
CONFIG_DEBUG_ATOMIC_SLEEP=y
CONFIG_DEBUG_OBJECTS=y
CONFIG_DEBUG_OBJECTS_WORK=y
CONFIG_DEBUG_OBJECTS_FREE=y
CONFIG_DEBUG_OBJECTS_TIMERS=y
CONFIG_DEBUG_VM=y
CONFIG_PAGE_OWNER=n
CONFIG
else
    cat >> kernel/configs/rgpu.config <<'CONFIG'
CONFIG_KCSAN=y
CONFIG_KCSAN_VERBOSE=n
CONFIG_KCSAN_EARLY_ENABLE=y
CONFIG_KCSAN_REPORT_ONCE_IN_MS=0
CONFIG
fi
make -s tinyconfig rgpu.config
make -s -j"$(nproc)" bzImage modules
version=$(make -s kernelrelease)
mkdir -p "$folder/boot" "$folder/usr/src"
cp arch/x86/boot/bzImage "$folder/boot/vmlinuz-$version"
make -s modules_install INSTALL_MOD_PATH="$folder"
ln -sfn "$source" "$folder/usr/src/linux-headers-$version"
echo "$version" > "$folder/version"
echo "built $folder/boot/vmlinuz-$version"
