# Sourced by the scripts beside it: goes to the top of the tree and puts a ready .venv first on PATH.
# PYTHON=... names the interpreter that .venv is made from; otherwise it is the first one that is new enough.
# AIORLINF_PYTHON=... names the interpreter of an environment of your own, used as it is instead of .venv.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

if [ -n "${AIORLINF_PYTHON:-}" ]; then
    PATH="$(dirname "$AIORLINF_PYTHON"):$PATH"
    export PATH PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    return
fi

for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    # A name on PATH may be a stub that cannot run, so ask it.
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        break
    fi
    python=
done
if [ -z "$python" ]; then
    echo "No Python 3.11 or newer with the venv module was found; install one, or name it: PYTHON=/path/to/python $0" >&2
    exit 1
fi

"$python" scripts/_env.py </dev/null || exit 1
export VIRTUAL_ENV="$PWD/.venv"
export PATH="$VIRTUAL_ENV/bin:$PATH"
unset PYTHONHOME python
