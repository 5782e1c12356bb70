// The spans of a rollout while they come. They are read in short slices, so that ten thousand of them never hold the page up.

import {
  type AttemptSpan,
  SpanService,
  WatchedForm,
  type WatchSpansResponse,
} from "../../api/gen/fulmen/store/v1/span_service_pb";
import type { Source } from "../../api/streams.svelte";
import { client } from "../../api/transport";
import { SpanSet, type TraceSpan } from "./logic/spans";

const SLICE_MS = 8;
const SHOWN_EVERY_MS = 250;

export class Trace implements Source<WatchSpansResponse> {
  /** Grows when there is more to show. */
  version = $state(0);
  /** True once all that is stored has come. */
  isCaughtUp = $state(false);
  readonly #spans = new SpanSet();
  #waiting: AttemptSpan[] = [];
  #next = 0;
  #isReading = false;
  #shownAt = -Infinity;
  #cursor = "";
  // To go on after what else waits, without the 4 ms that browsers add to timers that begin timers.
  readonly #turns = new MessageChannel();

  constructor(
    private readonly rollout: string,
    private readonly isFinal: () => boolean,
  ) {
    this.#turns.port1.onmessage = () => this.#read();
  }

  open(signal: AbortSignal): AsyncIterable<WatchSpansResponse> {
    const { rollout: parent } = this;
    return client(SpanService).watchSpans({ parent, form: WatchedForm.OUTLINES, cursor: this.#cursor }, { signal });
  }

  take(messages: WatchSpansResponse[]): void {
    for (const { spans, cursor } of messages) {
      for (const each of spans) this.#waiting.push(each);
      if (cursor) {
        this.#cursor = cursor;
        this.isCaughtUp = true;
      }
    }
    if (!this.#isReading) this.#read();
  }

  isOver(): boolean {
    return this.isFinal();
  }

  get size(): number {
    void this.version;
    return this.#spans.size;
  }

  get unreadable(): number {
    void this.version;
    return this.#spans.unreadable;
  }

  /** Returns the spans of an attempt. */
  of(attempt: number): TraceSpan[] {
    void this.version;
    return this.#spans.of(attempt);
  }

  #read = (): void => {
    const until = performance.now() + SLICE_MS;
    while (this.#next < this.#waiting.length && performance.now() < until)
      this.#spans.add(this.#waiting[this.#next++]!);
    this.#isReading = this.#next < this.#waiting.length;
    if (!this.#isReading) {
      this.#waiting = [];
      this.#next = 0;
    }
    if (!this.#isReading || performance.now() - this.#shownAt > SHOWN_EVERY_MS) {
      this.#shownAt = performance.now();
      this.version += 1;
    }
    if (this.#isReading) this.#turns.port2.postMessage(undefined);
  };
}
