# Sourced by the scripts beside it: makes .venv on first use, once for all of them, and activates it. Until it is there,
# --help is answered by the comment at a script's top, without waiting for it.
#   PYTHON  the Python to make it with (default python3; 3.11 or newer, with venv and pip)
#   more    another extra of pyproject.toml (more=arm64 . environment.sh)
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repository/.venv

has_clang() ( # besides the one in .venv, which is on PATH once that is activated
  PATH=${PATH//"$venv/bin:"/}
  [ -n "${CC:-}" ] || command -v clang >/dev/null || compgen -c clang- | grep -qxE 'clang-[0-9]+'
)

install() { # extras, by commas
  local stamp=$venv/installed-${1//,/-}
  [ "$stamp" -nt "$repository/pyproject.toml" ] && return
  echo "setting up $venv with [$1] (once)" >&2
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$repository[$1]" >&2
  touch "$stamp"
}

[ -d "$venv" ] || . "$repository/scripts/usage.sh"
install "$(has_clang || echo clang,)test"
[ -z "${more:-}" ] || install "$more"
. "$venv/bin/activate"
