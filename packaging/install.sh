#!/bin/sh
# Installs SoftHCA below ~/.local, or below PREFIX:    sh install.sh [VERSION]
set -eu
release=https://github.com/softhca/softhca/releases/$([ $# = 0 ] && echo latest/download || echo "download/v$1")
file=softhca-$(uname -m)-linux.tar.gz prefix=${PREFIX:-$HOME/.local} folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
for name in "$file" SHA256SUMS; do curl -fsSL "${SOFTHCA_RELEASE:-$release}/$name" -o "$folder/$name"; done
(cd "$folder" && grep " $file\$" SHA256SUMS | sha256sum -c --quiet)
mkdir -p "$prefix" && tar -xzf "$folder/$file" -C "$prefix" --strip-components=1 --no-same-owner
echo "Installed $("$prefix/bin/softhca" --version) in $prefix; the command is $prefix/bin/softhca"
