# Environments with SGLang; sourced after lib.sh and lib-python.sh, never run.
# shellcheck shell=bash

# The versions that kvcached/integration/versions.py names, oldest first.
SGLANG_VERSIONS=(0.5.22 0.5.23)

# sglang_venv VERSION: sets `python` to an interpreter that has this SGLang. The newest brings torch and everything else (4.7 GB on
# disk); older ones pin the same torch, lie on top of it and see its packages through a .pth file.
sglang_venv() {
    local newest=${SGLANG_VERSIONS[-1]} packages
    venv "sglang-$newest" "sglang==$newest" pytest==9.2.0
    [[ $1 != "$newest" ]] || return 0
    # shellcheck disable=SC2154  # set by venv
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    venv "sglang-$1" --no-deps "sglang==$1"
    printf '%s\n' "$packages" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang.pth"
}
