# Virtual environments of the Python scripts; sourced after lib.sh, never run.
# shellcheck shell=bash

# venv NAME PACKAGE...: makes sure that the environment has exactly these packages, and sets `python` to its interpreter. One
# that was made from another list, or by another interpreter, is made anew.
venv() {
    local name=$1 folder stamp wanted
    shift
    folder=$(cache_folder)/$name
    stamp=$folder/.made-from
    wanted=$(python3 -V; printf '%s\n' "$@")
    python=$folder/bin/python
    if [[ -x $python && -f $stamp && $(cat "$stamp") == "$wanted" ]]; then
        return
    fi
    mkdir -p "$(cache_folder)"
    # Two runs at once must not make the same folder.
    (
        flock 9
        [[ -x $python && -f $stamp && $(cat "$stamp") == "$wanted" ]] && exit 0
        rm -rf "$folder"
        python3 -m venv "$folder" || die "python3 cannot make a virtual environment: on Debian or Ubuntu install python3-venv"
        "$python" -m pip install --quiet --disable-pip-version-check "$@" ||
            die "could not install $*: is a package index reachable?"
        printf '%s\n' "$wanted" >"$stamp"
    ) 9>"$(cache_folder)/$name.lock" || exit $?
}

# install_wheel: puts the newest wheel of this tree into the environment of `python`.
install_wheel() {
    local wheel
    wheel=$(newest_wheel) || die "there is no wheel: run scripts/build-wheel first"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheel" ||
        die "$wheel could not be installed"
}

newest_wheel() {
    local wheels
    # shellcheck disable=SC2154  # set by every script
    wheels=$(find "$root/target/wheels" -maxdepth 1 -name 'tidekv-*.whl' -printf '%T@ %p\n' 2>/dev/null | sort -rn | head -n 1)
    [[ -n $wheels ]] && printf '%s\n' "${wheels#* }"
}
