// What a component loads: its value, whether it is on its way, and why it failed.

import type { Problem } from "./problems";
import { problemOf, signedOut, wasAborted } from "./problems";
import { pause } from "./streams.svelte";

const FIRST_WAIT_MS = 1_000;
const LONGEST_WAIT_MS = 15_000;

/** A value that is loaded. The old one stays while a new one is on its way. */
export class Loading<T> {
  value = $state.raw<T>();
  problem = $state<Problem>();
  isBusy = $state(false);
  #version = $state(0);

  constructor(call: (signal: AbortSignal) => Promise<T>) {
    $effect(() => {
      void this.#version;
      const ended = new AbortController();
      void this.#load(call(ended.signal), () => call(ended.signal), ended.signal);
      return () => ended.abort();
    });
  }

  /** Loads it once more. */
  reload = (): void => {
    this.#version += 1;
  };

  async #load(first: Promise<T>, again: () => Promise<T>, signal: AbortSignal): Promise<void> {
    let waitMs = FIRST_WAIT_MS;
    let answer = first;
    this.isBusy = true;
    while (!signal.aborted) {
      try {
        const value = await answer;
        if (signal.aborted) return;
        this.value = value;
        this.problem = undefined;
        this.isBusy = false;
        return;
      } catch (error) {
        if (signal.aborted || wasAborted(error)) return;
        this.problem = problemOf(error, "retried");
        if (signedOut(error) || !this.problem.isTemporary) {
          this.value = undefined;
          this.isBusy = false;
          return;
        }
      }
      await pause(waitMs, signal);
      waitMs = Math.min(waitMs * 2, LONGEST_WAIT_MS);
      if (!signal.aborted) answer = again();
    }
  }
}

/** Loads something for the component that calls it; what `call` reads before its first `await` loads it anew when it changes. */
export function loading<T>(call: (signal: AbortSignal) => Promise<T>): Loading<T> {
  return new Loading(call);
}

/** Loads something now and every `everyMs` milliseconds, as long as the page is seen. */
export function polled<T>(everyMs: number, call: (signal: AbortSignal) => Promise<T>): Loading<T> {
  const found = new Loading(call);
  $effect(() => {
    const timer = setInterval(() => document.visibilityState === "visible" && found.reload(), everyMs);
    return () => clearInterval(timer);
  });
  return found;
}

/** A page of a list. */
export interface Page<T> {
  items: T[];
  /** Token of the next page; empty on the last one. */
  next: string;
}

/** A list that is loaded page by page. */
export class Pages<T> {
  items = $state.raw<T[]>([]);
  problem = $state<Problem>();
  isBusy = $state(false);
  isWhole = $state(false);
  /** True once the first page is there, also if it is empty. */
  isReady = $state(false);
  #next = "";
  #begun = new AbortController();
  #load: (token: string, signal: AbortSignal) => Promise<Page<T>>;

  constructor(load: (token: string, signal: AbortSignal) => Promise<Page<T>>) {
    this.#load = load;
    $effect(() => {
      // Reads what the request depends on, and begins anew when it changes.
      const first = new AbortController();
      this.#begin(load("", first.signal), first);
      return () => first.abort();
    });
  }

  /** Loads the next page. */
  more = (): void => {
    if (!this.isBusy && !this.isWhole && this.isReady)
      void this.#take(this.#load(this.#next, this.#begun.signal), true);
  };

  /** Loads the list from its beginning. */
  reload = (): void => {
    this.#begun.abort();
    const begun = new AbortController();
    this.#begin(this.#load("", begun.signal), begun);
  };

  #begin(first: Promise<Page<T>>, begun: AbortController): void {
    this.#begun = begun;
    void this.#take(first, false);
  }

  async #take(answer: Promise<Page<T>>, isNext: boolean): Promise<void> {
    const { signal } = this.#begun;
    this.isBusy = true;
    try {
      const page = await answer;
      if (signal.aborted) return;
      this.items = isNext ? [...this.items, ...page.items] : page.items;
      this.#next = page.next;
      this.isWhole = !page.next;
      this.isReady = true;
      this.problem = undefined;
      this.isBusy = false;
    } catch (error) {
      if (signal.aborted || wasAborted(error)) return;
      this.problem = problemOf(error);
      this.isBusy = false;
    }
  }
}

/** Loads a list for the component that calls it; what `load` reads before its first `await` begins it anew when it changes. */
export function pages<T>(load: (token: string, signal: AbortSignal) => Promise<Page<T>>): Pages<T> {
  return new Pages(load);
}
