# Environments with torch and transformers; sourced after lib.sh and lib-python.sh, never run.
# shellcheck shell=bash

# torch from the package index is 2.7 GB to download and 4.7 GB on disk, so there is one of it: environments that need more lie on
# top of it and see its packages through a .pth file.
TORCH_PACKAGES=(torch==2.11.0 'numpy>=2.1,<3' psutil==7.2.2 pytest==9.2.0)

# The two shapes that continuous batching has had, each with a version that is known to have it.
# shellcheck disable=SC2034  # read by those who source this
TRANSFORMERS_VERSIONS=(5.17.0 5.22.2)

# torch_venv: sets `python` to an interpreter that has torch.
torch_venv() {
    venv torch "${TORCH_PACKAGES[@]}"
}

# transformers_venv VERSION: sets `python` to an interpreter that has this transformers and the torch of torch_venv.
transformers_venv() {
    local packages
    torch_venv
    # shellcheck disable=SC2154  # set by venv
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    venv "transformers-$1" "transformers==$1" 'numpy>=2.1,<3'
    printf '%s\n' "$packages" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
}
