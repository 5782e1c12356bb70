// What is done with all rollouts that match a filter, in parts of a thousand.

import { toJson } from "@bufbuild/protobuf";

import { type Rollout, RolloutSchema, RolloutState } from "../../api/gen/fulmen/store/v1/rollout_pb";
import type { CountRolloutsResponse } from "../../api/gen/fulmen/store/v1/rollout_selection_pb";
import { RolloutService } from "../../api/gen/fulmen/store/v1/rollout_service_pb";
import { client } from "../../api/transport";
import { count } from "../../words/format";

const PART = 1_000;
/** Rollouts of a file at most: it is made in the browser's memory. */
export const MAX_EXPORTED = 100_000;
/** With tasks and answers, which are read rollout by rollout. */
export const MAX_WITH_TEXTS = 5_000;
const CALLS = 8;

export const LIVE = [RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.RETRY_WAIT];
export const FAILED = [RolloutState.FAILED];
export const FINAL = [RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED];

/** Rollouts of a project that match a filter. */
export interface Matching {
  project: string;
  filter: string;
}

export type Progress = (done: number) => void;

/** Returns how many of the counted rollouts are in these states, in words: `1,234`, or `at least 1,234`. */
export function numberIn(counted: CountRolloutsResponse | undefined, states: RolloutState[]): string {
  if (!counted) return "–";
  const sum = counted.parts
    .filter((each) => states.includes(each.state))
    .reduce((total, each) => total + Number(each.count), 0);
  return `${counted.hasMore ? "at least " : ""}${count(sum)}`;
}

/** Yields the matching rollouts, newest first. */
export async function* listed({ project, filter }: Matching, states: RolloutState[] = []): AsyncGenerator<Rollout[]> {
  let pageToken = "";
  do {
    const page = await client(RolloutService).listRollouts({ project, filter, states, pageSize: PART, pageToken });
    yield page.rollouts;
    pageToken = page.nextPageToken;
  } while (pageToken);
}

/** Cancels what has not ended; returns how many. */
export async function cancelAll(matching: Matching, progress: Progress): Promise<number> {
  let done = 0;
  for await (const rollouts of listed(matching, LIVE)) {
    if (!rollouts.length) continue;
    const answer = await client(RolloutService).cancelRollouts({ names: rollouts.map(({ name }) => name) });
    progress((done += answer.cancelledCount + answer.cancellingCount));
  }
  return done;
}

/** Runs what has failed once more, as new rollouts; returns how many. */
export async function retryAll({ project, filter }: Matching, progress: Progress): Promise<number> {
  let done = 0;
  let hasMore = true;
  while (hasMore) {
    const request = { project, filter: filter || "*", requestId: crypto.randomUUID() };
    const answer = await client(RolloutService).retryRollouts(request);
    progress((done += answer.rollouts.length));
    hasMore = answer.hasMore;
  }
  return done;
}

/** Deletes what has ended, for good; returns how many, and how many had to be kept. */
export async function deleteAll(
  { project, filter }: Matching,
  progress: Progress,
): Promise<{ done: number; kept: number }> {
  let [done, kept, pageToken] = [0, 0, ""];
  do {
    const answer = await client(RolloutService).deleteRollouts({ project, filter: filter || "*", pageToken });
    progress((done += answer.deletedCount));
    kept += answer.keptCount;
    pageToken = answer.nextPageToken;
  } while (pageToken);
  return { done, kept };
}

/**
 * Saves rollouts as JSON, one in a line, as lists show them; returns how many, and whether these are all.
 *
 * `withTexts` adds each task and the answer of its last attempt as `task` and `answer`.
 */
export async function exportAll(
  matching: Matching,
  progress: Progress,
  withTexts = false,
): Promise<{ done: number; isWhole: boolean }> {
  const most = withTexts ? MAX_WITH_TEXTS : MAX_EXPORTED;
  const lines: string[] = [];
  let isWhole = true;
  for await (const rollouts of listed(matching)) {
    const room = most - lines.length;
    const chosen = rollouts.slice(0, room);
    for (let at = 0; at < chosen.length; at += withTexts ? CALLS : chosen.length) {
      const part = chosen.slice(at, at + (withTexts ? CALLS : chosen.length));
      const texts = withTexts ? await Promise.all(part.map(textsOf)) : [];
      lines.push(...part.map((each, index) => lineOf(each, texts[index])));
      progress(lines.length);
    }
    if (rollouts.length > room) {
      isWhole = false;
      break;
    }
  }
  save(new Blob(lines, { type: "application/jsonl" }), "rollouts.jsonl");
  return { done: lines.length, isWhole };
}

/** Texts of a rollout that lists leave out. */
export interface Texts {
  task: string;
  answer: string;
}

/** A line of an export. The beginning of a task is left out beside the whole. */
export function lineOf(rollout: Rollout, texts?: Texts): string {
  const shown = toJson(RolloutSchema, rollout) as Record<string, unknown>;
  if (texts) delete shown.inputStart;
  return `${JSON.stringify({ ...shown, ...texts })}\n`;
}

export async function textsOf({
  name,
  endedAttemptCount,
}: Pick<Rollout, "name" | "endedAttemptCount">): Promise<Texts> {
  const [{ rollout }, { attempts }] = await Promise.all([
    client(RolloutService).getRollout({ name }),
    endedAttemptCount ? client(RolloutService).listAttempts({ parent: name, pageSize: 64 }) : { attempts: [] },
  ]);
  const text = (bytes: Uint8Array | undefined) => new TextDecoder().decode(bytes);
  return { task: text(rollout?.input), answer: text(attempts.at(-1)?.output) };
}

function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
