// Runs assignments. A real agent replaces `solve`. The rest is what any runner must do: keep the time limit, stop
// when requested, record a span, and report how the attempt ended.

import { randomBytes, randomUUID } from "node:crypto";
import { setTimeout as pause } from "node:timers/promises";

import { CompleteRequest } from "../build/gen/fulmen/llm_proxy/v1/completion_service.js";
import { FailureKind } from "../build/gen/fulmen/store/v1/failure.js";
import { AttemptResult, type Assignment } from "../build/gen/fulmen/store/v1/lease.js";
import { SpanBatch, SpanCodec } from "../build/gen/fulmen/store/v1/span.js";
import { AppendSpansRequest } from "../build/gen/fulmen/store/v1/span_service.js";
import { Span } from "../build/gen/opentelemetry/proto/trace/v1/trace.js";
import { bearer, call, type Connection } from "./connection.js";
import { decoded, FulmenError } from "./errors.js";
import type { Options } from "./main.js";

/** Runs one attempt to its end; never throws: a failure is part of the result. */
export async function attempted(store: Connection, assignment: Assignment, options: Options, stop: AbortSignal) {
  const { attempt, leaseId, epoch } = assignment;
  const timeoutMs = Number(assignment.timeout!.seconds) * 1000 + assignment.timeout!.nanos / 1e6;
  const signal = AbortSignal.any([stop, AbortSignal.timeout(timeoutMs)]);
  try {
    const startTime = new Date();
    const { question } = JSON.parse(assignment.rollout!.input.toString("utf8"));
    const [left, right] = question.slice(0, -1).split("*").map(Number);
    const product = String(left * right);
    const answer = await solve(question, product, store, assignment, options, signal);
    const value = answer.includes(product) ? 1 : 0;
    await reportSpan(store, assignment, { question, answer }, startTime, signal);
    const output = Buffer.from(JSON.stringify({ answer }));
    return AttemptResult.fromPartial({
      attempt, leaseId, epoch, rewards: [{ value }], output, outputContentType: "application/json",
    });
  } catch (cause) {
    const failureKind = failureKindOf(decoded(cause), signal);
    return AttemptResult.fromPartial({ attempt, leaseId, epoch, failureKind, failureMessage: String(cause) });
  }
}

function failureKindOf(error: unknown, signal: AbortSignal) {
  if (signal.aborted) {
    const late = signal.reason instanceof DOMException && signal.reason.name === "TimeoutError";
    return late ? FailureKind.FAILURE_KIND_TIMEOUT : FailureKind.FAILURE_KIND_CANCELLED;
  }
  const unreachable = error instanceof FulmenError && error.unreachable;
  return unreachable ? FailureKind.FAILURE_KIND_INFRA : FailureKind.FAILURE_KIND_AGENT_ERROR;
}

/** Asks the model, if there is one; otherwise computes the answer. */
async function solve(
  question: string,
  product: string,
  store: Connection,
  { attemptKey }: Assignment,
  options: Options,
  signal: AbortSignal,
) {
  if (options.workMs) await pause(options.workMs, undefined, { signal });
  if (!options.model) return product;
  const body = { model: options.model, messages: [{ role: "user", content: question }] };
  const request = CompleteRequest.fromPartial({
    path: "/v1/chat/completions",
    bodyJson: Buffer.from(JSON.stringify(body)),
  });
  const { completions, deadline } = store;
  // The attempt key names the attempt: the proxy records the call for it, and refuses the key once it ends.
  const answer = await call(completions, completions.complete, request, bearer(attemptKey), { deadline, signal });
  const text = answer.bodyJson.toString("utf8");
  // A refusal by the backend or the proxy is an answer with its HTTP status, not an error of the rpc.
  if (answer.httpStatus !== 200) {
    const code = answer.httpStatus >= 500 ? "UNAVAILABLE" : "FAILED";
    throw new FulmenError(code, `the model answered ${answer.httpStatus}: ${text}`);
  }
  return JSON.parse(text).choices[0].message.content as string;
}

/** Appends one span and waits until it is durable, so that readers of the finished attempt find it. */
async function reportSpan(
  store: Connection,
  { attempt, attemptKey }: Assignment,
  attributes: Record<string, string>,
  startTime: Date,
  signal: AbortSignal,
) {
  const endTime = new Date();
  const span = Span.fromPartial({
    traceId: randomBytes(16),
    spanId: randomBytes(8),
    name: "solve",
    startTimeUnixNano: BigInt(startTime.getTime()) * 1_000_000n,
    endTimeUnixNano: BigInt(endTime.getTime()) * 1_000_000n,
    attributes: Object.entries(attributes).map(([key, value]) => ({
      key,
      value: { value: { $case: "stringValue", value } },
    })),
  });
  const otlpSpan = Buffer.from(Span.encode(span).finish());
  const batch = SpanBatch.fromPartial({ spans: [{ otlpSpan, scope: "client" }] });
  const chunk = {
    attempt,
    chunkId: randomUUID(), // a chunk that is sent again with the same id is stored once
    spanCount: 1,
    codec: SpanCodec.SPAN_CODEC_IDENTITY,
    payload: Buffer.from(SpanBatch.encode(batch).finish()),
    startTime,
    endTime,
  };
  signal.throwIfAborted();
  const stream = store.spans.appendSpans(bearer(attemptKey), { deadline: store.deadline });
  signal.addEventListener("abort", () => stream.cancel());
  stream.end(AppendSpansRequest.fromPartial({ chunks: [chunk] }));
  for await (const { rejected } of stream) {
    if (rejected.length) throw new Error(`the store rejected the span: ${rejected[0].message}`);
  }
}
