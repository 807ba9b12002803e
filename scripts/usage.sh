# Sourced by the other scripts: --help as the first argument prints the comment at the script's top and exits.
case "${1:-}" in
  -h | --help) sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "$0" && exit 0 ;;
esac
