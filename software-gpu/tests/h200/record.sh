#!/bin/sh
# Builds the programs that record a real GPU's results, in the folder carry/h200 of the repository (ignored by git). Needs nvcc
# 13.0 on the PATH. Then run `sh carry/h200/run.sh FOLDER` from the repository's root on a machine with an H200. It writes
# results.bin and textures-results.bin to FOLDER; copy them to software-gpu/tests/h200.
set -eu
cd "$(dirname "$0")/../../.."
folder=carry/h200
mkdir -p $folder
cargo run -q -p software-gpu --example h200_corpus -- $folder
rm -f $folder/*.ptx
toolkit=$(dirname "$(dirname "$(command -v nvcc)")")
for name in runner textures; do
    nvcc -O1 -std=c++17 -arch=sm_90 -cudart static -L"$toolkit/lib" software-gpu/tests/h200/$name.cu -o $folder/$name
done
cat > $folder/run.sh <<'END'
#!/bin/sh
here=$(dirname "$0")
timeout 300 "$here/runner" "$here/corpus.bin" "$1/results.bin" && timeout 300 "$here/textures" "$here/textures.bin" "$1/textures-results.bin"
END
chmod +x $folder/run.sh $folder/runner $folder/textures
ls -l $folder
