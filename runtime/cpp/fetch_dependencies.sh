#!/usr/bin/env bash
# Lay out what the C++ build needs in a folder; nothing is installed and no root is needed.
#
#   fetch_dependencies.sh DIR [PYTHON]     then build with -DCMAKE_PREFIX_PATH=DIR/usr
#
# - Headers, from Debian packages of trixie, whatever release this machine runs: the first one with those of ONNX
#   Runtime. They are plain headers, so the release does not matter.
# - ONNX Runtime's library: links to the one in PYTHON's onnxruntime package, which may be newer than the headers and
#   lacks the names that linkers and loaders look for.
#
# On a system without apt, get the same five by other means: docs/cpp.md.
set -euo pipefail
release=trixie
packages=()
for name in libonnxruntime-dev nlohmann-json3-dev libcli11-dev doctest-dev; do
  packages+=("$name/$release")
done

target=$1
python=${2:-python3}
mkdir -p "$target"
target=$(cd "$target" && pwd)
state=$target/apt
mkdir -p "$state/lists/partial" "$state/archives/partial"

# The mirror that this machine is set up with, and apt's own check of its signature.
read -r mirror own_release < <(
  apt-get indextargets --format '$(ORIGIN) $(COMPONENT) $(REPO_URI) $(CODENAME)' 'Created-By: Packages' |
    awk '$1 == "Debian" && $2 == "main" && $4 !~ /-/ { print $3, $4; exit }') || true
if [ -z "${mirror:-}" ]; then
  echo "fetch_dependencies.sh: expected a Debian mirror in apt's sources, found none; run apt-get update, or see docs/cpp.md" >&2
  exit 4
fi
source="deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror"
echo "$source $release main" >"$state/sources.list"
if [ ! -e /usr/include/openssl/evp.h ]; then  # brings a static library too, which has to fit this machine's C library
  echo "$source $own_release main" >>"$state/sources.list"
  packages+=("libssl-dev/$own_release")
fi
options=(-qq -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o Dir::State::lists="$state/lists" -o Dir::Cache="$state" -o Acquire::Languages=none -o APT::Sandbox::User=)
apt-get "${options[@]}" update
(cd "$state/archives" && apt-get "${options[@]}" download "${packages[@]}")
for package in "$state"/archives/*.deb; do
  dpkg -x "$package" "$target"
done
rm -rf "$state"

library=$("$python" - <<'EOF'
import importlib.util, pathlib
spec = importlib.util.find_spec("onnxruntime")
print(*sorted(pathlib.Path(spec.origin).parent.glob("capi/libonnxruntime.so.*")) if spec else [])
EOF
)
if [ ! -f "$library" ]; then
  echo "fetch_dependencies.sh: expected one libonnxruntime.so of $python's onnxruntime, found '$library'; pip install onnxruntime" >&2
  exit 4
fi
rm -f "$target"/usr/lib/*/libonnxruntime*  # a link to a library that the package of headers does not bring
ln -sfn "$library" "$target/usr/lib/libonnxruntime.so"
ln -sfn "$library" "$target/usr/lib/libonnxruntime.so.1"
