# Sourced by the scripts that run the Python program of their name, which is beside them, with the arguments.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
exec python "$0.py" "$@"
