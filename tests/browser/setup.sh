#!/usr/bin/env bash
# What the tests in a browser need besides Python packages; only what is missing is installed.
# Debian packages: chromium and its driver, a font (pages are laid out with it), npm. From npm: axe-core, into the folder given.
set -euo pipefail
folder=$1
axe=axe-core@4.14.0

missing=()
command -v chromium > /dev/null || missing+=(chromium fonts-dejavu-core)
command -v chromedriver > /dev/null || missing+=(chromium-driver)
command -v npm > /dev/null || missing+=(npm)

if ((${#missing[@]})); then
    as_root=()
    ((EUID == 0)) || as_root=(sudo -n)
    if ! command -v apt-get > /dev/null || ! "${as_root[@]}" true 2> /dev/null; then
        echo "The tests in a browser need ${missing[*]} (names of Debian packages), and only root may install them." >&2
        echo "Install them, then run this again: sudo apt-get install ${missing[*]}" >&2
        exit 1
    fi
    echo "installing ${missing[*]}"
    quiet=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o=Dpkg::Use-Pty=0)
    "${quiet[@]}" update
    "${quiet[@]}" install --yes --no-install-recommends "${missing[@]}" > /dev/null
fi

mkdir -p "$folder"
npm install --prefix "$folder" --silent --no-save --no-package-lock --ignore-scripts --no-audit --no-fund "$axe" > /dev/null
