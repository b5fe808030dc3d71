# Sourced by .ci/run and .ci/nightly: `word TARGET ...` runs make; a word that fails does not keep the others from running;
# `table` prints a row for each, and returns 1 if one failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rows=()
failed=0
word() {
    local began=$SECONDS result=ok
    echo "== make $*"
    make "$@" || { result=FAILED; failed=1; }
    local seconds=$((SECONDS - began))
    rows+=("$(printf '%-6s %3d:%02d min  make %s' "$result" $((seconds / 60)) $((seconds % 60)) "$*")")
}
table() {
    printf '%s\n' "${rows[@]}" "$(printf '%-6s %3d:%02d min' all $((SECONDS / 60)) $((SECONDS % 60)))"
    return $failed
}

# The tests between hosts need network namespaces (docs/notes/testing.md). On a machine that has what they need a skip is a
# failure; on another one they skip, and the log says so here and in the summary of the tests.
if { unshare --net true || unshare --user --map-root-user --net true; } 2>/dev/null \
    && command -v ip tc >/dev/null; then
    export LLM_DATADIST_HOSTS=required
else
    echo "this machine makes no network namespaces, or lacks ip or tc: tests between hosts may be skipped"
fi
