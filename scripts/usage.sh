# Sourced by the scripts beside it: --help as the first word prints the comment at a script's top, and ends the script.
case "${1:-}" in
  -h | --help) sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "$0" && exit 0 ;;
esac
