# Environments with vLLM; sourced after lib.sh and lib-python.sh, never run.
# shellcheck shell=bash

# The versions that kvcached/integration/versions.py names, oldest first.
# shellcheck disable=SC2034  # read by those who source this
VLLM_VERSIONS=(0.31.0 0.32.0)

# The newest has everything it asks for: 8 GB on disk. Older ones are their own package alone and see the rest of the newest's
# through a .pth file: they ask for the same torch.
VLLM_NEWEST=0.32.0

# vllm_venv VERSION: sets `python` to an interpreter that has this vLLM.
vllm_venv() {
    local packages
    venv "vllm-$VLLM_NEWEST" "vllm==$VLLM_NEWEST" pytest==9.2.0
    [[ $1 != "$VLLM_NEWEST" ]] || return 0
    # shellcheck disable=SC2154  # set by venv
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    venv "vllm-$1" --no-deps "vllm==$1"
    printf '%s\n' "$packages" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/newest.pth"
}

# vllm_tests VERSION: sets `tests` to a folder with the tests of vLLM's source distribution, kept in the user's cache folder.
vllm_tests() {
    tests=$(cache_folder)/vllm-tests-$1
    [[ ! -d $tests/tests/v1/core ]] || return 0
    mkdir -p "$tests"
    # pip would build the distribution to learn its name.
    "$python" - "$1" "$tests" <<'PYTHON' || die "the source distribution of vLLM $1 could not be had: is a package index reachable?"
import html, os, re, shutil, sys, tarfile, tempfile, urllib.parse, urllib.request

version, folder = sys.argv[1:]
index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/vllm/"
page = urllib.request.urlopen(urllib.request.Request(index, headers={"Accept": "text/html"}), timeout=60).read().decode()
(link,) = {html.unescape(found) for found in re.findall(r'href="([^"#]+)', page) if f"vllm-{version}.tar.gz" in found}
with tempfile.TemporaryFile() as file:
    with urllib.request.urlopen(urllib.parse.urljoin(index, link), timeout=60) as answer:
        shutil.copyfileobj(answer, file)
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        for member in archive:
            top, _, path = member.name.partition("/")
            if path.startswith("tests/") and path.endswith(".py"):
                member.name = path
                archive.extract(member, folder, filter="data")
PYTHON
}
