// The part of the time that waterfall and flame view show.

/** Milliseconds. */
export interface Window {
  from: number;
  to: number;
}

const SMALLEST_MS = 0.005;

/** Returns a window that shows `factor` times as much, with what is at `share` of its width kept there, within `whole`. */
export function zoomed(shown: Window, whole: Window, factor: number, share: number): Window {
  const length = Math.min(whole.to - whole.from, Math.max(SMALLEST_MS, (shown.to - shown.from) * factor));
  const at = shown.from + (shown.to - shown.from) * share;
  return within(at - length * share, length, whole);
}

/** Returns a window moved by a share of its width, within `whole`. */
export function moved(shown: Window, whole: Window, share: number): Window {
  const length = shown.to - shown.from;
  return within(shown.from + length * share, length, whole);
}

/** Returns where something is, in percent of the window: its left edge and its width, of which nothing is outside. */
export function place(from: number, to: number, shown: Window): { left: number; width: number } {
  const length = shown.to - shown.from;
  const percent = (at: number) => Math.min(100, Math.max(0, ((at - shown.from) / length) * 100));
  const left = percent(from);
  return { left, width: percent(to) - left };
}

/** Returns round times in a window, as distances from `zero`: about `count` of them. */
export function ticks(shown: Window, zero: number, count: number): number[] {
  const rough = (shown.to - shown.from) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((each) => each * power >= rough) ?? 10);
  const first = Math.ceil((shown.from - zero) / step);
  const found: number[] = [];
  for (let n = first; n * step <= shown.to - zero && found.length < 3 * count; n++) found.push(n * step);
  return found;
}

function within(from: number, length: number, whole: Window): Window {
  const start = Math.max(whole.from, Math.min(from, whole.to - length));
  return { from: start, to: start + length };
}
