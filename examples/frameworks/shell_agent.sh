#!/usr/bin/env bash
# An agent on bash and curl: it asks the model, and sends its own span as JSON, by OTLP over HTTP.
#
# By hand: echo '{"question": "What is 6 times 7, and what is 8 times 9?"}' | ./shell_agent.sh
set -euo pipefail

question=$(sed -n 's/.*"question": *"\([^"]*\)".*/\1/p')
model=${AGENT_MODEL:-gpt-4.1-mini}
# 00-TRACE-PARENT-01; without one the span starts a new trace.
IFS=- read -r _ trace parent _ <<< "${TRACEPARENT:-00-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')--01}"
span=$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')
begun=$(date +%s%N)

# Sends the span; its status is 1 (OK) or 2 (error).
report() {
  [ -n "${FULMEN_TRACES_URL:-}" ] || return 0
  curl --silent --show-error --fail --output /dev/null "$FULMEN_TRACES_URL" \
    --header "content-type: application/json" --header "authorization: Bearer $OPENAI_API_KEY" --data @- <<JSON
{"resourceSpans": [{"scopeSpans": [{"scope": {"name": "shell-agent"}, "spans": [{
  "traceId": "$trace", "spanId": "$span", "parentSpanId": "$parent", "name": "ask", "kind": 1,
  "startTimeUnixNano": "$begun", "endTimeUnixNano": "$(date +%s%N)", "status": {"code": $1},
  "attributes": [{"key": "input.value", "value": {"stringValue": "$question"}}]}]}]}]}
JSON
}

answer=$(curl --silent --show-error --fail "$OPENAI_BASE_URL/chat/completions" \
  --header "content-type: application/json" --header "authorization: Bearer $OPENAI_API_KEY" \
  --header "traceparent: 00-$trace-$span-01" \
  --data "{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"$question\"}]}") || {
  report 2
  exit 1
}
report 1
sed -n 's/.*"content": *"\([^"]*\)".*/\1/p' <<< "$answer"
