#!/usr/bin/env bash
# The steps of action.yml. Inputs are in INPUT_*; the other variables are a runner's.
set -euo pipefail
releases=https://github.com/softhca/softhca/releases

version() {
    local version=$INPUT_VERSION
    if [ "$version" = latest ]; then
        # The page of the latest release redirects to that of its tag.
        version=$(curl -fsSLo /dev/null -w '%{url_effective}' "$releases/latest")
        version=${version##*/v}
    fi
    echo "version=$version" >>"$GITHUB_OUTPUT"
    echo "prefix=$RUNNER_TOOL_CACHE/softhca/$version" >>"$GITHUB_OUTPUT"
}

install() {
    local prefix=$RUNNER_TOOL_CACHE/softhca/$VERSION
    [ -x "$prefix/bin/softhca" ] || PREFIX=$prefix sh "$GITHUB_ACTION_PATH/../install.sh" "$VERSION"
    echo "$prefix/bin" >>"$GITHUB_PATH"
    [ "$INPUT_ENVIRONMENT" = true ] || return 0
    local exports name
    exports=$("$prefix/bin/softhca" env)
    eval "$exports"
    for name in $(sed -n 's/^export \([A-Z_]*\)=.*/\1/p' <<<"$exports"); do
        echo "$name=${!name}" >>"$GITHUB_ENV"
    done
}

run() {
    local results=$RUNNER_TEMP/softhca-results status=0 words=()
    rm -rf "$results"
    mkdir -p "$results"
    {
        echo "results=$results"
        echo "artifact=$INPUT_ARTIFACT${INPUT_SHARD:+-${INPUT_SHARD%/*}}"
    } >>"$GITHUB_OUTPUT"
    [ -z "$INPUT_SEEDS" ] || words+=(--seeds "$INPUT_SEEDS")
    [ -z "$INPUT_SHARD" ] || words+=(--shard "$INPUT_SHARD")
    words+=(--junit "$results/junit.xml")
    # Inputs are lists of words, as on a command line.
    if [ -n "$INPUT_SWEEP" ]; then
        eval "words+=($INPUT_OPTIONS --out \"\$results/runs\" -- $INPUT_SWEEP)"
        softhca sweep "${words[@]}" >"$results/sweep.txt" || status=$?
        cat "$results/sweep.txt"
        { echo '### SoftHCA: sweep'; echo '```'; tail -n 40 "$results/sweep.txt"; echo '```'; } >>"$GITHUB_STEP_SUMMARY"
        [ "$status" -lt 1 ] || echo "::error title=softhca sweep::$(tail -n 1 "$results/sweep.txt")"
        return "$status"
    fi
    [ "$INPUT_BACKEND" = sim ] || words+=(--on "$INPUT_BACKEND")
    if [ -n "$INPUT_MERGE" ]; then
        words+=(--merge "$INPUT_MERGE" ${INPUT_SHARDS:+--shards "$INPUT_SHARDS"})
    else
        words+=(--out "$results/runs")
    fi
    words+=(--summary "$GITHUB_STEP_SUMMARY" --annotate --json)
    eval "words=($INPUT_SCENARIOS $INPUT_OPTIONS \"\${words[@]}\")"
    softhca run "${words[@]}" >"$results/results.json" || status=$?
    # The log shows a line for each run that did not pass.
    grep -v '"verdict":"pass"' "$results/results.json" | head -n 20 || true
    if [ -d "$results/runs" ] && [ "$status" != 0 ]; then
        softhca report "$results/runs"
    fi
    return "$status"
}

"$@"
