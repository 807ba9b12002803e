# Sourced by the scripts beside it: makes .venv with the extras named as arguments on first use, and activates it.
#   PYTHON  the Python to make it with (default python3; 3.11 or newer, with venv and pip)
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repository/.venv

has_clang() { [ -n "${CC:-}" ] || command -v clang >/dev/null || compgen -c clang- | grep -qxE 'clang-[0-9]+'; }

install() {
  local extras=()
  for extra in "$@"; do
    [ "$extra" = clang ] && has_clang || extras+=("$extra")
  done
  local wanted stamp
  wanted=$(IFS=,; echo "${extras[*]-}")
  stamp=$venv/installed-${wanted//,/-}
  [ "$stamp" -nt "$repository/pyproject.toml" ] && return
  echo "setting up $venv (once)" >&2
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$repository[$wanted]" >&2
  touch "$stamp"
}

install "$@"
. "$venv/bin/activate"
