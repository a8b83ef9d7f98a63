#!/bin/sh
# Builds what records a real GPU's answers, into the folder carry/h200 of the repository (which git ignores). Needs nvcc 13.0 on the
# PATH. Then, on a machine with an H200 and from the repository's root: sh carry/h200/run.sh FILE writes FILE, which belongs
# into software-gpu/tests/h200/results.bin.
set -eu
cd "$(dirname "$0")/../../.."
folder=carry/h200
mkdir -p $folder
cargo run -q -p software-gpu --example h200_corpus -- $folder
rm -f $folder/*.ptx
toolkit=$(dirname "$(dirname "$(command -v nvcc)")")
nvcc -O1 -std=c++17 -arch=sm_90 -cudart static -L"$toolkit/lib" software-gpu/tests/h200/runner.cu -o $folder/runner
cat > $folder/run.sh <<'END'
#!/bin/sh
exec timeout 300 "$(dirname "$0")/runner" "$(dirname "$0")/corpus.bin" "$1"
END
chmod +x $folder/run.sh $folder/runner
ls -l $folder
