#!/bin/sh
# Runs test programs natively and through one server, one after the other, and compares what they print; a line for each as soon as it is known.
#
#   corpus.sh TARGET [NAME...]
#
# TARGET is a target folder of a build: programs/, programs-static/, guest/lib/ and release/ are used. NAME picks programs; all of programs/ else.
# `cargo xtask test gpu` compares the same with a private server for each run. Here the workers, whose contexts take NVIDIA's driver about a second each
# and one at a time, are made while programs run. WAYS picks from "local tcp static" (static: over local, with NVIDIA's runtime inside the program).
# SERVER_OPTIONS are passed to the server, which listens at PORT (default: 9799), so that several of these scripts can run at once. BACKEND=software tries the script itself: then nothing is run natively. Exit status: how many differ.
set -u

[ $# -ge 1 ] || { echo "usage: corpus.sh TARGET [NAME...]" >&2; exit 2; }
target=$(cd "$1" && pwd) || exit 2
shift
backend=${BACKEND:-cuda}
port=${PORT:-9799}
RGPU_LIB_DIR=$target/guest/lib
export RGPU_LIB_DIR
work=$(mktemp -d)
"$target/release/rgpu-server" --backend "$backend" --workers 4 --insecure ${SERVER_OPTIONS:-} --listen "unix:$work/server" --listen "tcp:127.0.0.1:$port" 2> "$work/log" &
server=$!
trap 'kill $server; wait $server; rm -rf "$work"' EXIT
tries=0
while [ ! -S "$work/server" ]; do
    tries=$((tries + 1))
    [ $tries -le 300 ] || { echo "the server does not listen:" >&2; tail -3 "$work/log" >&2; exit 2; }
    sleep 0.1
done

[ $# -gt 0 ] || set -- $(ls "$target/programs")
differing=0
for name in "$@"; do
    said="" first=$work/native
    if [ "$backend" = cuda ]; then
        timeout 40 "$target/programs/$name" > "$first" 2> /dev/null < /dev/null || said="$said native: exit status $?;"
    fi
    for way in ${WAYS:-local tcp static}; do
        address=unix:$work/server folder=programs
        [ $way = tcp ] && address=127.0.0.1:$port
        [ $way = static ] && folder=programs-static
        timeout 40 "$target/release/rgpuctl" run --insecure --server "$address" -- "$target/$folder/$name" > "$work/$way" 2> "$work/$way.err" < /dev/null ||
            said="$said $way: exit status $?: $(tail -n 1 "$work/$way") $(tail -n 1 "$work/$way.err");"
        [ -f "$first" ] || first=$work/$way
        cmp -s "$first" "$work/$way" || said="$said $way: $(diff "$first" "$work/$way" | head -n 4 | tr '\n' ' ');"
    done
    rm -f "$work/native"
    [ -z "$said" ] || differing=$((differing + 1))
    echo "$name:${said:- the same}"
done
exit $differing
