// The one place for live streams: they connect, heal, resume, and slow down.
//
// - A stream that breaks, or is silent for longer than heartbeats are apart, is opened again, later each time, with some chance
//   in it. `open` asks for what came after the last message taken.
// - A page that nobody sees has no streams: it resumes them when it is looked at. Browsers allow six connections to a host
//   over HTTP/1.1, and all tabs share them: four streams run at a time, others take turns with a fifth.
// - Messages are handed over at most ten times a second, in order. What cannot be taken in time is not read, so the
//   service waits.

import type { Problem } from "./problems";
import { problemOf, signedOut } from "./problems";

/** Where the messages of a stream come from and go to. */
export interface Source<M extends object> {
  /** Opens the stream after the last message taken. */
  open(signal: AbortSignal): AsyncIterable<M>;
  /** Takes messages, in order, at most ten times a second. */
  take(messages: M[]): void;
  /** True if nothing can come any more: a stream that ends is then not opened again. */
  isOver?(): boolean;
}

export type StreamState = "connecting" | "live" | "waiting" | "ended" | "failed";

const HAND_OVER_MS = 100;
const SILENCE_MS = 45_000;
const HIDDEN_GRACE_MS = 10_000;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
const MAX_HELD = 2_000;
const SLOTS = 4;
const TURN_MS = 3_000;

/** A live stream. Its owner calls `stop`; `live` does that for components. */
export class LiveStream<M extends object> {
  state = $state<StreamState>("connecting");
  problem = $state<Problem>();
  readonly #stopped = new AbortController();

  constructor(private readonly source: Source<M>) {
    void this.#run();
  }

  stop(): void {
    this.#stopped.abort();
  }

  async #run(): Promise<void> {
    let waitMs = FIRST_WAIT_MS;
    const stopped = this.#stopped.signal;
    while (!stopped.aborted) {
      await whenVisible(stopped);
      if (stopped.aborted) return;
      let received = false;
      try {
        await inSlot(stopped, async (turn) => {
          received = await this.#once(turn);
        });
        this.problem = undefined;
        if (this.source.isOver?.()) {
          this.state = "ended";
          return;
        }
      } catch (error) {
        if (stopped.aborted) return;
        const problem = problemOf(error, "retried");
        this.problem = problem;
        if (signedOut(error) || !problem.isTemporary) {
          this.state = "failed";
          return;
        }
      }
      if (stopped.aborted) return;
      waitMs = received ? FIRST_WAIT_MS : Math.min(waitMs * 2, LONGEST_WAIT_MS);
      if (this.state !== "live" || !received) this.state = "waiting";
      await pause(waitMs * (0.5 + Math.random()), stopped);
    }
  }

  /** Reads a stream until it ends; true if it said anything. */
  async #once(turn: AbortSignal): Promise<boolean> {
    const opened = new AbortController();
    const leave = () => opened.abort();
    turn.addEventListener("abort", leave, { once: true });
    const unseen = whenHidden(opened.signal, leave);
    let silence = setTimeout(leave, SILENCE_MS);
    let held: M[] = [];
    let handOver: Promise<void> | undefined;
    let handedMs = -Infinity;
    const hand = () => {
      const taken = held;
      held = [];
      handOver = undefined;
      handedMs = performance.now();
      if (taken.length && !this.#stopped.signal.aborted) this.source.take(taken);
    };
    let received = false;
    try {
      for await (const message of this.source.open(opened.signal)) {
        clearTimeout(silence);
        silence = setTimeout(leave, SILENCE_MS);
        received = true;
        this.state = "live";
        if (isEmpty(message)) continue; // a heartbeat
        held.push(message);
        // What comes after a while is shown at once.
        const waitMs = handedMs + HAND_OVER_MS - performance.now();
        if (waitMs <= 0 && !handOver) hand();
        else handOver ??= pause(waitMs).then(hand);
        if (held.length >= MAX_HELD) await handOver;
      }
    } catch (error) {
      // Ended by the page: out of sight, silent, or the end of its turn.
      if (!opened.signal.aborted) throw error;
    } finally {
      clearTimeout(silence);
      turn.removeEventListener("abort", leave);
      unseen();
      hand();
      opened.abort();
    }
    return received;
  }
}

/** Opens a stream for the component that calls it, as long as it is on the page. What `source` reads from props opens it anew. */
export function live<M extends object>(source: () => Source<M> | undefined): { readonly current?: LiveStream<M> } {
  let current = $state.raw<LiveStream<M>>();
  $effect(() => {
    const found = source();
    const opened = found && new LiveStream(found);
    current = opened;
    return () => opened?.stop();
  });
  return {
    get current() {
      return current;
    },
  };
}

/** Lets at most ten of what comes through per second; the others are held and counted, until `release`. */
export class Paced<T> {
  held = $state(0);
  #waiting: T[] = [];
  #shownAt: number[] = [];

  constructor(
    private readonly show: (items: T[]) => void,
    private readonly limit = 1_000,
  ) {}

  offer(items: T[], now = performance.now()): void {
    this.#shownAt = this.#shownAt.filter((at) => at > now - 1_000);
    const room = this.#waiting.length ? 0 : Math.max(0, 10 - this.#shownAt.length);
    const shown = items.slice(0, room);
    this.#shownAt.push(...shown.map(() => now));
    if (shown.length) this.show(shown);
    const rest = items.slice(room);
    this.held += rest.length;
    this.#waiting = [...this.#waiting, ...rest].slice(-this.limit);
  }

  /** Shows what is held: the newest, if more came than can be kept. */
  release(): void {
    const shown = this.#waiting;
    this.#waiting = [];
    this.held = 0;
    this.show(shown);
  }
}

/** True if no field of a message is set, as in heartbeats. */
export function isEmpty(message: object): boolean {
  return Object.entries(message).every(
    ([name, value]) =>
      name.startsWith("$") ||
      value === undefined ||
      value === "" ||
      value === false ||
      value === 0 ||
      value === 0n ||
      (Array.isArray(value) && value.length === 0) ||
      (value instanceof Uint8Array && value.length === 0) ||
      (typeof value === "object" &&
        value !== null &&
        !("$typeName" in value) &&
        ("case" in value ? value.case === undefined : Object.keys(value).length === 0)),
  );
}

export function pause(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

function whenVisible(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const look = () => {
      if (document.visibilityState !== "visible" && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look, { once: true });
    look();
  });
}

/** Calls `leave` when the page was out of sight for a while; returns what ends this. */
function whenHidden(signal: AbortSignal, leave: () => void): () => void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const look = () => {
    clearTimeout(timer);
    if (document.visibilityState !== "visible" && !signal.aborted) timer = setTimeout(leave, HIDDEN_GRACE_MS);
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
}

/** Runs something when one of the browser's slots is free, or takes a turn with others that wait. */
async function inSlot(stopped: AbortSignal, run: (turn: AbortSignal) => Promise<void>): Promise<void> {
  // Pages that are not served over HTTPS or from this machine have no locks.
  if (!("locks" in navigator)) return run(stopped);
  for (let slot = 0; slot < SLOTS; slot++) {
    const had = await navigator.locks.request(`fulmen-stream-${slot}`, { ifAvailable: true }, async (lock) => {
      if (lock) await run(stopped);
      return lock !== null;
    });
    if (had) return;
  }
  await navigator.locks
    .request("fulmen-stream-turns", { signal: stopped }, () =>
      run(AbortSignal.any([stopped, AbortSignal.timeout(TURN_MS)])),
    )
    .catch((error: unknown) => {
      if (!stopped.aborted) throw error;
    });
}
