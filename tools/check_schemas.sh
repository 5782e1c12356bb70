#!/usr/bin/env bash
# Checks workflows, templates of issues and CITATION.cff against their public schemas, which come with the checker: no network.
set -euo pipefail
cd "$(dirname "$0")/.."

tools/docs_env.sh
check() { .venv-docs/bin/check-jsonschema --quiet --builtin-schema "vendor.$1" "${@:2}"; }
check github-workflows .github/workflows/*.yml
check github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
check github-issue-config .github/ISSUE_TEMPLATE/config.yml
check citation-file-format CITATION.cff
