# Sourced: has apt-get download Debian packages, without root, with all that they need, whatever the system has of it.
# extract_packages FOLDER ARCHITECTURE... -- PACKAGE... extracts them to FOLDER; the first architecture is the default.

extract_packages() {
  local folder=$1 architectures=() apt
  shift
  while [ "$1" != -- ]; do architectures+=("$1") && shift; done
  shift
  apt=$(mktemp -d)
  mkdir -p "$apt"/{lists,archives}/partial "$folder"
  : >"$apt/status"
  cat >"$apt/conf" <<END
APT::Architecture "${architectures[0]}";
APT::Architectures { $(printf '"%s"; ' "${architectures[@]}")};
APT::Sandbox::User "";
Acquire::Languages "none";
Dir::State "$apt";
Dir::State::status "$apt/status";
Dir::Cache "$apt";
END
  APT_CONFIG=$apt/conf apt-get -qq update || true # a source that lacks an architecture fails
  APT_CONFIG=$apt/conf apt-get -qq install --yes --download-only --no-install-recommends "$@" || return
  for package in "$apt"/archives/*.deb; do
    dpkg-deb --extract "$package" "$folder"
  done
  rm -r "$apt"
}
