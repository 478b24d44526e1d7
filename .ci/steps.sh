# Sourced by the scripts in this directory: runs steps, and prints how many seconds each took.

times=()

# step COMMAND...: prints and runs the command, and records its duration.
step() {
    local started=$SECONDS status=0
    printf '\n== %s\n' "$*"
    # A failure ends the command, but not this function. Within `step ... || ...` bash ignores `set -e` in the command
    # too, so only the status of its last line counts there.
    set +e
    (set -e; "$@")
    status=$?
    set -e
    times+=("$(printf '%5d s  %s' $((SECONDS - started)) "$*")")
    return "$status"
}

skip() {
    printf '\n== skipped: %s\n' "$*"
}

print_times() {
    local status=$?
    printf '\n'
    [ ${#times[@]} = 0 ] || printf '%s\n' "${times[@]}"
    printf '%5d s  in all: %s\n' "$SECONDS" "$([ "$status" = 0 ] && echo passed || echo failed)"
}
trap print_times EXIT
