# Shared by the scripts of this folder and by .ci/run; sourced, never run.
# shellcheck shell=bash

# Stops with a message that says what to change.
die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

# A heading that the eye finds in a long log.
heading() {
    printf '\n==== %s\n' "$*"
}

# The comment block at the top of the calling script is its manual: print it without the `# `.
print_help() {
    awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$1"
}

# need COMMAND PACKAGE WHY: makes sure that a command is there; as root on Debian or Ubuntu it is installed.
need() {
    local command=$1 package=$2 why=$3
    command -v "$command" >/dev/null && return
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        echo "installing $package ($why)"
        apt-get update -qq || true
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
            die "could not install $package: install it by hand ($why)"
    else
        die "$command is missing ($why): install it, on Debian or Ubuntu with 'sudo apt-get install $package'"
    fi
}

need_rust() {
    command -v cargo >/dev/null || die "cargo is missing: install Rust first, as on https://rustup.rs"
}

need_python() {
    need python3 python3 "the house rules and the checks of results are Python"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "python3 is $(python3 -V 2>&1), and 3.10 or later is needed"
}

# The release and test builds of all scripts go to one folder, so that nothing is compiled twice.
target_dir() {
    printf '%s\n' "${CARGO_TARGET_DIR:-$1/target}"
}

# Where tools and environments that are heavy to make are kept between runs.
cache_folder() {
    printf '%s\n' "${TIDEKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tidekv}"
}
