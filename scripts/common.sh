# Shared by quickstart.sh and test.sh: prerequisites, and the environment in .venv. Source it.

# torch's OpenMP threads wait for each other spinning. Where other processes use the cores too, a short spin is several
# times faster than the default; on an idle machine there is no difference to speak of.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-3000}

say() { printf '\n==> %s\n' "$*"; }

fail() {
  printf '\nerror: %s\n' "$*" >&2
  exit 1
}

# check_prerequisites: a sentence and exit 1 where something is missing. PYTHON and CXX choose other commands.
check_prerequisites() {
  PYTHON=${PYTHON:-python3}
  command -v "$PYTHON" >/dev/null ||
    fail "Python 3.11 or newer is needed, and there is no command '$PYTHON' (set PYTHON=/path/to/python to choose one)."
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed; '$PYTHON' is $("$PYTHON" -V 2>&1) (set PYTHON=/path/to/python to choose another)."
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "'$PYTHON' has no venv module with pip: install it (on Debian and Ubuntu: apt-get install python3-venv)."
  command -v "${CXX:-g++}" >/dev/null ||
    fail "A C++ compiler is needed for the CPU kernels: install g++ (on Debian and Ubuntu: apt-get install g++)."
}

# make_environment EXTRAS [NO_DEPS_PACKAGE…]: .venv in the checkout with the project (editable), the extras
# (comma-separated) and, without their dependencies, the packages. A stamp file remembers what was installed for this
# pyproject.toml, these constraints and this folder, so that a repeat installs nothing.
make_environment() {
  local extras=$1
  shift
  local venv_python=.venv/bin/python stamp=.venv/.installed base
  if ! "$venv_python" -m pip --version >/dev/null 2>&1; then
    say "Making .venv with $("$PYTHON" -V)"
    "$PYTHON" -m venv --clear .venv
  fi
  "$venv_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "The .venv here has $("$venv_python" -V), but Python 3.11 or newer is needed: delete .venv and run this again."
  base=$(printf '%s\n' "$PWD" | cat - pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
  if grep -qxF "$base $extras $*" "$stamp" 2>/dev/null; then
    say "The environment .venv is up to date"
    return
  fi
  grep -qs "^$base " "$stamp" || : >"$stamp"
  say "Installing rollout-rl[$extras] into .venv (a few minutes the first time)"
  "$venv_python" -m pip install -q -c constraints.txt -e ".[$extras]" ||
    fail "pip could not install the project; its message stands above."
  if [ $# -gt 0 ]; then
    "$venv_python" -m pip install -q -c constraints.txt --no-deps "$@" ||
      fail "pip could not install $*; its message stands above."
  fi
  printf '%s\n' "$base $extras $*" >>"$stamp"
}
