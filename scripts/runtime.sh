# Sourced by the scripts that run Python with a GPU's runtime for CPUs. The first use downloads it to .venv/NAME, without
# root; apt-get installs nothing. The exit status is 77, with the reason, if it cannot be downloaded.
# run_on DEVICE NAME ARGUMENT... runs Python. The script defines `download`, which fills $runtime, and `with_runtime`,
# which runs a command with it; $root has the Debian packages, $libraries their folders of libraries.
. "$(dirname "$0")/usage.sh"
. "$(dirname "$0")/packages.sh"

unavailable() { echo "$0: skipped: $1" >&2 && exit 77; }

[ "$(uname -s)" = Linux ] && command -v apt-get >/dev/null || unavailable "no apt-get here to download with"
. "$(dirname "$0")/environment.sh"
triplet=$(uname -m)-linux-gnu

debian() { # extracts packages to $root
  extract_packages "$root" "$(dpkg --print-architecture)" -- "$@" >&2 ||
    unavailable "$1 cannot be downloaded from apt's sources"
}

run_on() {
  local device=$1
  runtime=$venv/$2 root=$venv/$2/root
  libraries=$root/usr/lib/$triplet:$root/lib/$triplet
  shift 2
  if ! [ -e "$runtime/made" ]; then
    echo "setting up $runtime (once)" >&2
    rm -rf "$runtime"
    download
    # Python has loaded the system's C and C++ libraries.
    rm -f "$root"/{lib,usr/lib}/"$triplet"/{ld-linux*,libc.*,libm.*,lib{dl,rt,pthread,gcc_s,stdc++}.so*}
    DEV=$device with_runtime python -c 'from tinygrad import Tensor; assert (Tensor([1.0]) * 2).item() == 2' >&2 ||
      unavailable "$device does not work here"
    touch "$runtime/made"
  fi
  with_runtime python "$@"
}
