// Spans of a rollout as the page holds them.

import { fromBinary } from "@bufbuild/protobuf";

import type { AnyValue, KeyValue } from "../../../api/gen/opentelemetry/proto/common/v1/common_pb";
import { type Span, SpanSchema, Status_StatusCode } from "../../../api/gen/opentelemetry/proto/trace/v1/trace_pb";
import type { AttemptSpan } from "../../../api/gen/fulmen/store/v1/span_service_pb";
import { type ModelCallRecord, ModelCallRecordSchema } from "../../../api/gen/fulmen/type/v1/model_call_pb";

/** A span. Times are milliseconds since 1970, with microseconds behind the point. */
export interface TraceSpan {
  /** Hexadecimal; unique within an attempt. */
  id: string;
  /** Hexadecimal; empty for none. */
  parent: string;
  attempt: number;
  name: string;
  start: number;
  /** Never before `start`. */
  end: number;
  isFailed: boolean;
  scope: string;
  /** Set for a captured model call; without tokens and texts in an outline. */
  call?: ModelCallRecord;
  otlp: Span;
}

/** An attribute as text. */
export interface Attribute {
  key: string;
  text: string;
}

const MAX_ATTRIBUTES = 200;
const MAX_ENTRIES = 100;
const MAX_DEPTH = 8;

/** Returns a span of the store; undefined if it cannot be read. */
export function spanOf(found: AttemptSpan): TraceSpan | undefined {
  const record = found.span;
  if (!record) return undefined;
  try {
    const otlp = fromBinary(SpanSchema, record.otlpSpan);
    const start = milliseconds(otlp.startTimeUnixNano);
    return {
      id: hex(otlp.spanId),
      parent: hex(otlp.parentSpanId),
      attempt: attemptNumber(found.attempt),
      name: otlp.name,
      start,
      end: Math.max(start, milliseconds(otlp.endTimeUnixNano)),
      isFailed: otlp.status?.code === Status_StatusCode.ERROR,
      scope: record.scope,
      call: record.modelCall.length ? fromBinary(ModelCallRecordSchema, record.modelCall) : undefined,
      otlp,
    };
  } catch {
    return undefined; // what a strange writer sent
  }
}

/** The spans of a rollout, each once, in the order in which they came. */
export class SpanSet {
  readonly #seen = new Set<string>();
  readonly #byAttempt = new Map<number, TraceSpan[]>();
  size = 0;
  /** Spans that could not be read. */
  unreadable = 0;

  add(found: AttemptSpan): void {
    const span = spanOf(found);
    if (!span) {
      this.unreadable += 1;
      return;
    }
    const key = `${span.attempt}/${span.id}`;
    if (this.#seen.has(key)) return;
    this.#seen.add(key);
    this.size += 1;
    const known = this.#byAttempt.get(span.attempt);
    if (known) known.push(span);
    else this.#byAttempt.set(span.attempt, [span]);
  }

  /** Returns those of an attempt, in a list of its own. */
  of(attempt: number): TraceSpan[] {
    return [...(this.#byAttempt.get(attempt) ?? [])];
  }
}

export function attemptNumber(name: string): number {
  return Number(name.split("/").at(-1)) || 0;
}

export function hex(bytes: Uint8Array): string {
  let text = "";
  for (const byte of bytes) text += byte.toString(16).padStart(2, "0");
  return text;
}

export function bytesOf(text: string): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(text.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
}

/** Returns the attributes of a span or event as text; of very many the first. */
export function attributesOf(pairs: KeyValue[]): Attribute[] {
  return pairs.slice(0, MAX_ATTRIBUTES).map(({ key, value }) => ({ key, text: textOf(value) }));
}

/** Returns the number that an attribute holds. */
export function numberOf(pairs: KeyValue[], key: string): number | undefined {
  const value = pairs.find((pair) => pair.key === key)?.value?.value;
  if (value?.case === "intValue") return Number(value.value);
  return value?.case === "doubleValue" ? value.value : undefined;
}

function textOf(value: AnyValue | undefined): string {
  const plain = plainOf(value, 0);
  return typeof plain === "string" ? plain : JSON.stringify(plain);
}

function plainOf(value: AnyValue | undefined, depth: number): unknown {
  const found = value?.value;
  if (depth > MAX_DEPTH) return "…";
  switch (found?.case) {
    case "arrayValue":
      return found.value.values.slice(0, MAX_ENTRIES).map((each) => plainOf(each, depth + 1));
    case "kvlistValue":
      return Object.fromEntries(
        found.value.values.slice(0, MAX_ENTRIES).map((pair) => [pair.key, plainOf(pair.value, depth + 1)]),
      );
    case "bytesValue":
      return `${found.value.length} bytes`;
    case "intValue":
      return Number(found.value);
    case undefined:
      return "";
    default:
      return found?.value;
  }
}

function milliseconds(nanoseconds: bigint): number {
  return Number(nanoseconds / 1000n) / 1000;
}
