# Sourced by the other scripts: creates .venv, which all of them share, on first use, and activates it; creates it anew
# if its Python is gone. Before .venv exists, --help prints the comment at the script's top instead of waiting for the
# installation.
#   PYTHON  the Python to create it with (default python3; 3.11 or newer, with venv and pip)
#   more    an additional extra of pyproject.toml (more=arm64 . environment.sh)
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repository/.venv

has_clang() ( # not counting the one in .venv, which is on PATH once .venv is activated
  PATH=${PATH//"$venv/bin:"/}
  [ -n "${CC:-}" ] || command -v clang >/dev/null || compgen -c clang- | grep -qxE 'clang-[0-9]+'
)

install() { # extras, separated by commas
  local stamp=$venv/installed-${1//,/-}
  [ -x "$venv/bin/python" ] && [ "$stamp" -nt "$repository/pyproject.toml" ] && return
  echo "setting up $venv with [$1] (once)" >&2
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$repository[$1]" >&2
  touch "$stamp"
}

[ -d "$venv" ] || . "$repository/scripts/usage.sh"
install "$(has_clang || echo clang,)test"
[ -z "${more:-}" ] || install "$more"
unset PYTHON # tinygrad would take it for a number
. "$venv/bin/activate"
