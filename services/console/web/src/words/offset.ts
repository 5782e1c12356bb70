const RESOLUTION_MS = 1_000;

/**
 * How far the clock of a service is ahead of the browser's, after an answer; all in milliseconds.
 *
 * The service wrote its time, in whole seconds, between question and answer. What is known stays as long as it agrees with that.
 */
export function offsetAfter(knownMs: number, serviceMs: number, askedMs: number, answeredMs: number): number {
  if (Number.isNaN(serviceMs)) return knownMs;
  const least = serviceMs - answeredMs;
  const most = serviceMs + RESOLUTION_MS - askedMs;
  return knownMs >= least && knownMs <= most ? knownMs : (least + most) / 2;
}
