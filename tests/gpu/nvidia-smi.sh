#!/bin/sh
# Runs this machine's nvidia-smi natively and as a client of rgpu over the same GPU, and compares what both say.
#
#   nvidia-smi.sh
#
# It needs a GPU, its driver, and what `cargo xtask build` makes in the tree that RGPU_ROOT names (default: the tree
# that this script is in). What does not change from one moment to the next must be the same, line for line; the whole
# reports are kept beside each other for a person to look at. Exit status 0: no difference.
set -u

here=$(cd "$(dirname "$0")" && pwd)
RGPU_ROOT=${RGPU_ROOT:-$here/../..}
out=${OUT:-$RGPU_ROOT/target}/nvidia-smi
mkdir -p "$out"
RGPU_LIB_DIR=${RGPU_LIB_DIR:-$RGPU_ROOT/target/guest/lib}
export RGPU_LIB_DIR
command -v nvidia-smi >/dev/null || { echo "nvidia-smi is not on this machine" >&2; exit 2; }
[ -f "$RGPU_LIB_DIR/libnvidia-ml.so.1" ] || { echo "no libnvidia-ml.so.1 in $RGPU_LIB_DIR: cargo xtask build" >&2; exit 2; }

remote() {
    "$RGPU_ROOT/target/release/rgpuctl" run --backend cuda --log-dir "$out/logs" -- "$@"
}

failed=0
# Arguments of both, and the name of the files.
compare() {
    name=$1
    shift
    nvidia-smi "$@" 2>"$out/$name.native.err" | sort >"$out/$name.native"
    remote nvidia-smi "$@" 2>"$out/$name.rgpu.err" | sort >"$out/$name.rgpu"
    if [ -s "$out/$name.native" ] && cmp -s "$out/$name.native" "$out/$name.rgpu"; then
        echo "PASS nvidia-smi $*"
    else
        echo "FAIL nvidia-smi $*"
        diff "$out/$name.native" "$out/$name.rgpu"
        cat "$out/$name.rgpu.err"
        failed=1
    fi
}

compare list -L
for field in name uuid serial pci.bus_id memory.total driver_version vbios_version compute_cap \
    power.max_limit power.default_limit clocks.max.sm clocks.max.memory ecc.mode.current mig.mode.current \
    persistence_mode compute_mode; do
    compare "$field" "--query-gpu=$field" --format=csv,noheader
done

# Monitors: the same columns and the same rows for the GPUs. Values change, and processes are the server's own matter.
watch() {
    name=$1
    shift
    nvidia-smi "$@" >"$out/$name.native" 2>&1
    remote nvidia-smi "$@" >"$out/$name.rgpu" 2>"$out/$name.rgpu.err"
    status=$?
    grep '^#' "$out/$name.native" >"$out/$name.native.columns"
    grep '^#' "$out/$name.rgpu" >"$out/$name.rgpu.columns"
    if [ $status = 0 ] && [ -s "$out/$name.native.columns" ] && grep -q '^ *0 ' "$out/$name.rgpu" &&
        cmp -s "$out/$name.native.columns" "$out/$name.rgpu.columns"; then
        echo "PASS nvidia-smi $*"
    else
        echo "FAIL nvidia-smi $*: status $status"
        cat "$out/$name.rgpu" "$out/$name.rgpu.err"
        failed=1
    fi
}

watch dmon dmon -c 2
for columns in p u c v m e t pucvmet; do
    watch "dmon-$columns" dmon -s "$columns" -c 1
done
watch pmon pmon -c 2
watch pmon-um pmon -s um -c 1

# The report that people look at: it must be made, and name the GPUs.
nvidia-smi >"$out/report.native"
if remote nvidia-smi >"$out/report.rgpu" 2>"$out/report.rgpu.err" && grep -q MiB "$out/report.rgpu"; then
    echo "PASS nvidia-smi"
else
    echo "FAIL nvidia-smi: what it asked and was refused:"
    RGPU_LOG=debug remote nvidia-smi 2>&1 | tail -40
    failed=1
fi
cat "$out/report.rgpu"
nvidia-smi -q >"$out/query.native"
remote nvidia-smi -q >"$out/query.rgpu" 2>"$out/query.rgpu.err"
echo "$(diff "$out/query.native" "$out/query.rgpu" | grep -c '^[<>]') lines of nvidia-smi -q differ ($out/query.*)"
exit $failed
