// Model calls with their tokens and texts, loaded when they are looked at.

import { SpanService } from "../../api/gen/fulmen/store/v1/span_service_pb";
import { type Problem, problemOf, wasAborted } from "../../api/problems";
import { client } from "../../api/transport";
import type { WholeCall } from "./logic/chat";
import { bytesOf, numberOf, spanOf, type TraceSpan } from "./logic/spans";

const CALLS_PER_PAGE = 20;

/** The whole spans of some ids; those that are gone are left out. */
export async function wholeSpans(attempt: string, spans: TraceSpan[], signal: AbortSignal): Promise<TraceSpan[]> {
  const found: TraceSpan[] = [];
  let pageToken = "";
  do {
    const page = await client(SpanService).listSpans(
      { parent: attempt, pageSize: 1000, pageToken, filter: { spanIds: spans.map(({ id }) => bytesOf(id)) } },
      { signal },
    );
    found.push(...page.spans.map(spanOf).filter((each) => each !== undefined));
    pageToken = page.nextPageToken;
  } while (pageToken);
  return found;
}

/** The first calls of an attempt, and more of them on request. */
export class Calls {
  loaded = $state.raw<WholeCall[]>([]);
  problem = $state<Problem>();
  isBusy = $state(false);
  wanted = $state(CALLS_PER_PAGE);
  readonly #known = new Map<string, WholeCall>();

  constructor(attempt: () => string, spans: () => TraceSpan[]) {
    $effect(() => {
      const shown = spans().slice(0, this.wanted);
      const ended = new AbortController();
      void this.#load(attempt(), shown, ended.signal);
      return () => ended.abort();
    });
  }

  more = (): void => {
    this.wanted += CALLS_PER_PAGE;
  };

  async #load(attempt: string, shown: TraceSpan[], signal: AbortSignal): Promise<void> {
    const missing = shown.filter(({ id }) => !this.#known.has(`${attempt}/${id}`));
    try {
      for (let from = 0; from < missing.length; from += CALLS_PER_PAGE) {
        this.isBusy = true;
        for (const span of await wholeSpans(attempt, missing.slice(from, from + CALLS_PER_PAGE), signal)) {
          if (!span.call) continue;
          const choice = numberOf(span.otlp.attributes, "fulmen.choice") ?? 0;
          this.#known.set(`${attempt}/${span.id}`, { id: span.id, record: span.call, choice });
        }
        if (signal.aborted) return;
      }
      this.problem = undefined;
    } catch (error) {
      if (signal.aborted || wasAborted(error)) return;
      this.problem = problemOf(error);
    }
    this.isBusy = false;
    this.loaded = shown.map(({ id }) => this.#known.get(`${attempt}/${id}`)).filter((each) => each !== undefined);
  }
}
