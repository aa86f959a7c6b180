# shellcheck shell=bash
# Sourced by the scripts beside it: the one virtual environment they share, and how it is made.
#
#   ROOT             the repository's root, absolute
#   VENV             its virtual environment, $ROOT/.venv
#   make_venv        creates or renews VENV; does nothing while it is up to date
#   find_compiler    exports CXX: the path of one C++ compiler, without arguments
#
# The interpreter is $PYTHON where that is set, else the first usable one of 3.11 or later on PATH.

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"

# A name on PATH may be a stub that does not run, and Debian ships Pythons without ensurepip: try, do not trust.
_usable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

_find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3; do
        if _usable_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    echo "No Python 3.11 or later with the venv module on PATH. Install one, or name it: PYTHON=/path/to/python3.12" >&2
    return 1
}

# What the environment was made from: a change of any of it makes it stale. An editable install holds ROOT.
_stamp() {
    printf '%s\n' "$ROOT"
    cksum <"$ROOT/pyproject.toml"
    cksum <"$ROOT/setup.py"
}

make_venv() {
    local stamp python
    stamp="$(_stamp)"
    if [[ -x "$VENV/bin/python" && -f "$VENV/stamp" && "$(<"$VENV/stamp")" == "$stamp" ]]; then
        return
    fi
    echo "Installing into $VENV (a few minutes the first time)" >&2
    if [[ ! -x "$VENV/bin/python" ]]; then
        python="$(_find_python)"
        "$python" -m venv --clear "$VENV"
    fi
    (cd -- "$ROOT" && "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        -e '.[test,demo]')
    printf '%s\n' "$stamp" >"$VENV/stamp"
}

# The CUDA sources are tested on the host through a C++ compiler. Where none is installed, pip brings one.
find_compiler() {
    local candidate
    for candidate in ${CXX:+"$CXX"} g++ clang++ c++ "$VENV/bin/zig-c++"; do
        if "$candidate" --version >/dev/null 2>&1; then
            CXX="$(command -v "$candidate")"
            export CXX
            return
        fi
    done
    echo "No C++ compiler on PATH: installing ziglang into $VENV" >&2
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check ziglang
    # shellcheck disable=SC2016  # the text is a script; it is expanded when it runs
    printf '#!/bin/sh\nexec "$(dirname -- "$0")/python" -m ziglang c++ "$@"\n' >"$VENV/bin/zig-c++"
    chmod +x "$VENV/bin/zig-c++"
    export CXX="$VENV/bin/zig-c++"
}
